"""Two real processes (gloo), on this machine."""

import contextlib
import json
import pathlib
import signal
import sys
import types

import fake_data
import numpy as np
import pytest
import two_processes as two
from conftest import tiny_backbone
from faults import Process
from tensorboard.backend.event_processing import event_accumulator

import memory_vit as mv
from memory_vit.errors import ConfigError
from memory_vit.model import trees
from memory_vit.runtime import launch, processes
from memory_vit.tasks import manifest, store

STEPS = 12


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "wide.npz"
  mv.save_backbone(tiny_backbone(width=64, mlp_dim=256, num_classes=5), path)
  return path


def flags_of(workdir, backbone_file, **changes) -> list[str]:
  """A sweep of two trials, the backbone in two parts."""
  options = {
    "backbone": backbone_file, "batch_size": 16,
    "batch_size_eval": 64, "total_steps": STEPS, "log_every": 1,
    "eval_every": 6, "checkpoint_every": 3, "mesh.fsdp": 2,
    "sweep.learning_rate": "(0.1, 0.03)", "log_images": 0, **changes,
  }  # fmt: skip
  return [
    "--config=configs/digits.py",
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in options.items()),
  ]


def logs_in(directory: pathlib.Path) -> list[pathlib.Path]:
  return [directory / f"process-{i}.jsonl" for i in range(2)]


def run_both(directory, backbone_file, changes) -> dict[str, pathlib.Path]:
  """{"together", "alone": directory} of a run by two processes and by one."""
  places = {name: directory / name for name in ("together", "alone")}
  for place in places.values():
    place.mkdir()
  flags = {
    name: flags_of(place / "run", backbone_file, **changes)
    for name, place in places.items()
  }
  ended = two.run_two(logs_in(places["together"]), [flags["together"]] * 2)
  with two.start(places["alone"] / "log", flags["alone"], 4) as alone:
    alone.wait()
  for process in (*ended, alone):
    assert process.status == 0, process.text
  return places


@pytest.fixture(scope="module")
def together(tmp_path_factory, backbone_file):
  """A run of two processes with two devices each: (directory, outcomes)."""
  path = tmp_path_factory.mktemp("together")
  flags = flags_of(path / "run", backbone_file, log_images=4)
  return path, two.run_two(logs_in(path), [flags, flags])


@pytest.fixture(scope="module")
def alone(tmp_path_factory, backbone_file):
  """The same run by one process with four devices."""
  path = tmp_path_factory.mktemp("alone")
  flags = flags_of(path / "run", backbone_file, log_images=4)
  with two.start(path / "log.jsonl", flags, 4) as process:
    assert process.wait() == 0, process.text
  return path


def test_contradictory_flags_are_refused():
  for options, message in (
    ({"process_id": 1}, "--coordinator, --num_processes is missing"),
    ({"coordinator": "h:1"}, "--num_processes, --process_id is missing"),
    ({"coordinator": "localhost", "num_processes": 2, "process_id": 0},
     "'localhost', expected HOST:PORT"),
    ({"coordinator": "h:99999", "num_processes": 2, "process_id": 0},
     "--coordinator is 'h:99999', expected HOST:PORT"),
    ({"num_processes": 0}, "--num_processes is 0, expected at least 1"),
    ({"process_id": "1"}, "--process_id is '1', expected int . None: at"),
    ({"distributed": True}, "cannot be joined.* if jax can detect"),
  ):  # fmt: skip
    with pytest.raises(ConfigError, match=message):
      launch.start(launch.Options(**options))
  launch.start(launch.Options())  # one process: nothing is started


@pytest.mark.fault("no-coordinator")
def test_a_wrong_address_is_named_once_the_time_is_over(monkeypatch):
  clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
  clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
  monkeypatch.setattr(launch, "time", clock)
  with two.kept_port(shared=False) as port:
    address = f"127.0.0.1:{port}"
    with pytest.raises(
      ConfigError, match=f"no coordinator answered at {address} for 7 s"
    ):
      launch.start(
        launch.Options(
          coordinator=address,
          num_processes=2,
          process_id=1,
          initialization_timeout=7,
        )
      )
  assert 7 <= clock.now < 8


@pytest.mark.parametrize("several", [False, True])
def test_signalled_process_leaves_at_once(monkeypatch, several):
  """JAX lets several processes wait for each other."""
  left = []
  monkeypatch.setattr(launch.os, "_exit", left.append)
  monkeypatch.setattr(launch.jax.distributed, "is_initialized", lambda: several)
  for status in (0, 75, 130):
    with contextlib.suppress(SystemExit), launch.leaving():
      sys.exit(status)
  assert left == ([] if several else [75, 130])


def test_jax_hears_how_long_to_wait(monkeypatch):
  """For other processes at the start, and for their heartbeat later."""
  heard = {}
  monkeypatch.setattr(
    launch.jax.distributed,
    "initialize",
    lambda **options: heard.update(options),
  )
  launch.start(
    launch.Options(
      coordinator="127.0.0.1:1", num_processes=2, process_id=0,
      initialization_timeout=11, heartbeat_timeout=12,
    )
  )  # fmt: skip
  assert heard["initialization_timeout"] == 11
  assert heard["heartbeat_timeout_seconds"] == 12


@pytest.mark.fault("no-coordinator")
@pytest.mark.processes
def test_a_command_without_its_coordinator_ends(tmp_path, backbone_file):
  with two.kept_port(shared=False) as port:
    flags = [
      *flags_of(tmp_path / "run", backbone_file),
      *two.joined(1, port),
      "--initialization_timeout=2",  # the last one counts
    ]
    with two.start(tmp_path / "log", flags) as process:
      assert process.wait() == 2, process.text
  reason = f"no coordinator answered at 127.0.0.1:{port} for 2 s"
  assert f"error: {reason}" in process.text
  assert "Traceback" not in process.text
  assert not (tmp_path / "run").exists()


def test_one_process_agrees_with_itself(tmp_path):
  processes.require_same("configuration", {"seed": 1})
  processes.require_shared(tmp_path)
  assert list(tmp_path.iterdir()) == []
  assert processes.broadcast_from_process_0([1, "a"]) == [1, "a"]
  done = []
  assert processes.on_process_0(lambda: done.append(1)) is None
  assert processes.process_0_first(lambda: 3) == 3
  assert done == [1]


@pytest.mark.fault("differing-processes")
def test_values_of_processes_are_compared(monkeypatch):
  """The texts of other processes are made up."""
  monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes, "_require_joined", lambda: None)
  mine = {"config.seed": 1, "same": "x", "long": list(range(999))}
  other = {**mine, "config.seed": 2, "long": [], "more": None}
  hashes = [np.zeros(32, np.uint8), np.ones(32, np.uint8)]
  monkeypatch.setattr(
    processes.multihost_utils, "process_allgather", lambda _: np.stack(hashes)
  )
  texts = [json.dumps(values) for values in (mine, other)]
  monkeypatch.setattr(processes, "_gather", lambda _: texts)
  with pytest.raises(ConfigError) as error:
    processes.require_same("configuration", mine)
  lines = str(error.value).splitlines()
  assert [line.split(":")[0].strip() for line in lines[1:]] == [
    "config.seed", "long",
  ]  # fmt: skip
  assert lines[1].strip() == "config.seed: process 0 has 1, process 1 has 2"
  assert len(lines[2]) < 300
  hashes[1] = hashes[0]
  processes.require_same("configuration", mine)


def test_union_over_processes_has_the_numbers_of_all(monkeypatch):
  assert processes.gather("a") == ["a"]
  assert processes.union_over_processes({3, 1}) == [1, 3]
  monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes, "_gather", lambda text: [text, "[2, 3]"])
  assert processes.union_over_processes({3, 1}) == [1, 2, 3]
  assert processes.union_over_processes({}) == [2, 3]
  assert processes.gather("a") == ["a", [2, 3]]


def test_lost_process_is_recognized_by_its_error(monkeypatch):
  gone = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
  assert not processes.is_lost_partner(gone)  # there is no other one
  monkeypatch.setattr(processes.jax.distributed, "is_initialized", lambda: True)
  assert processes.is_lost_partner(gone)
  assert not processes.is_lost_partner(ValueError("shapes do not match"))
  assert not processes.is_lost_partner(ConfigError("barrier"))


@pytest.mark.fault("two-processes")
@pytest.mark.processes
def test_two_processes_do_what_one_does(together, alone):
  path, ended = together
  assert [e.status for e in ended] == [0, 0], ended[0].text + ended[1].text
  logs = logs_in(path)

  # The same examples in every step, each in one process.
  seen = [two.read(log, "examples") for log in logs]
  expected = two.read(alone / "log.jsonl", "examples")
  for i in range(STEPS):
    assert len(seen[0][i]) == len(seen[1][i]) == 8
    assert seen[0][i] + seen[1][i] == expected[i]
  losses = two.read(logs[0], "losses")
  assert losses == two.read(logs[1], "losses")
  assert len(losses) == STEPS
  for mine, other in zip(
    losses, two.read(alone / "log.jsonl", "losses"), strict=True
  ):
    assert mine == pytest.approx(other, abs=1e-5)

  # Every example of every split once, though none divides by the batch.
  counted = sum(sum(two.read(log, "counted")) for log in logs)
  assert counted == sum(two.read(alone / "log.jsonl", "counted"))
  results = [
    json.loads((where / "run" / "result.json").read_text())
    for where in (path, alone)
  ]
  for task in results[0]["tasks"]:
    assert task["test"]["examples"] % 64
  for mine, other in zip(*(r["tasks"] for r in results), strict=True):
    assert mine["name"] == other["name"]
    assert mine["val"]["score"] == other["val"]["score"]
    for key in ("score", "examples"):
      assert mine["test"][key] == other["test"][key]
    loss = other["test"]["loss"]
    assert mine["test"]["loss"] == pytest.approx(loss, abs=1e-5)
  assert results[0]["backbone"]["outputs_bit_equal"] is True

  tasks = [exported(where / "run") for where in (path, alone)]
  for name, array in tasks[0].items():
    np.testing.assert_allclose(array, tasks[1][name], atol=1e-5, err_msg=name)
  # One of them says what came of it.
  assert "result.json" in ended[0].printed
  assert "result.json" not in ended[1].printed
  names = {file.name for file in (path / "run").iterdir()}
  assert names >= {"config.json", "result.json", "sweep.png"}
  assert [name for name in names if name.startswith(".")] == [".lock"]
  # Of the best trial, by one process; where it looks needs all in one.
  drawn = [pictures_in(where / "run" / "sweep") for where in (path, alone)]
  assert drawn[0] == ["test/answers", "test/confusions"]
  assert drawn[1] == [
    "attention/overlays", "attention/shares", "test/answers", "test/confusions",
  ]  # fmt: skip


def pictures_in(logdirs: pathlib.Path) -> list[str]:
  """The tags of the images in all events below a folder."""
  found = []
  for folder in logdirs.iterdir():
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    # Without any, the plugin is not there.
    tags = events.summary_metadata
    found += [
      tag for tag in tags if tags[tag].plugin_data.plugin_name == "images"
    ]
  return sorted(found)


def exported(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  path = workdir / "tasks" / "digits-5-9"
  return store.read_arrays(path, manifest.read(path))


@pytest.mark.processes
def test_what_two_processes_leave_out_is_what_one_does(tmp_path, backbone_file):
  """Each reads its share of the images, and both know of all skipped ones."""
  for split, count in (("train", 12), ("test", 6)):
    for label in "ab":
      folder = tmp_path / "data" / split / label
      folder.mkdir(parents=True)
      for i in range(count):
        picture = fake_data.noise(100 * ord(label) + i, 9, 9)
        content = fake_data.encode(picture, "PNG") if i > 1 else b"broken"
        (folder / f"{i}.png").write_bytes(content)
  changes = {
    "upstream.name": "", "data.name": "folder", "data.dir": tmp_path / "data",
    "data.train": "train", "data.validation": "", "data.max_bad": 4,
    "task.name": "ab", "total_steps": 3, "eval_every": 3,
    "sweep.learning_rate": "()", "batch_size_eval": 8,
  }  # fmt: skip
  found = {}
  for name, directory in run_both(tmp_path, backbone_file, changes).items():
    result = json.loads((directory / "run" / "result.json").read_text())
    (task,) = result["tasks"]
    assert (task["test"]["examples"], task["test"]["skipped"]) == (8, 4)
    assert len(result["left_out"]) == 8
    found[name] = result["left_out"], task["test"]["score"]
  assert found["together"] == found["alone"]
  shares = [two.read(log, "examples") for log in logs_in(tmp_path / "together")]
  whole = two.read(tmp_path / "alone" / "log", "examples")
  for i in range(3):
    assert shares[0][i] + shares[1][i] == whole[i]


@pytest.mark.fault("kill-of-two")
@pytest.mark.processes
def test_a_killed_process_ends_the_other_and_nothing_is_lost(
  together, tmp_path, backbone_file
):
  flags, logs = flags_of(tmp_path / "run", backbone_file), logs_in(tmp_path)
  with two.kept_port() as port, contextlib.ExitStack() as stack:
    first, second = [
      stack.enter_context(two.start(logs[i], [*flags, *two.joined(i, port)]))
      for i in range(2)
    ]
    second.wait_for("step 7/")
    second.signal(signal.SIGKILL)
    status = first.wait()  # by itself
  print(f"the other ended after {first.seconds:.1f} s, with status {status}")
  assert status != 0
  assert f"all others end within {two.HEARTBEAT} s" in first.text
  assert (
    "lost another process" in first.text  # by the broken connection
    or "detected fatal errors" in first.text  # by jax
  )
  ended = two.run_two(logs, [flags, flags])
  assert [e.status for e in ended] == [0, 0], ended[0].text + ended[1].text
  assert "resuming from step 6" in ended[0].text
  whole = exported(together[0] / "run")
  for name, array in exported(tmp_path / "run").items():
    assert np.array_equal(array, whole[name]), name


@pytest.mark.fault("kill-of-two")
@pytest.mark.processes
def test_death_of_a_remote_process_is_noticed(tmp_path):
  """Without any communication: by jax's heartbeat."""
  code = (
    "import sys, time\n"
    "from memory_vit.runtime import launch\n"
    "options = launch.Options(coordinator=sys.argv[1], num_processes=2,\n"
    f"  process_id=int(sys.argv[2]), heartbeat_timeout={two.HEARTBEAT})\n"
    "with launch.leaving():\n"
    "  launch.start(options)\n"
    "  print('joined', flush=True, file=sys.stderr)\n"
    "  while True:\n"
    "    time.sleep(90)\n"
  )
  with two.kept_port() as port, contextlib.ExitStack() as stack:
    flags = [f"127.0.0.1:{port}"]
    first, second = [
      stack.enter_context(Process(code, [*flags, str(i)], tmp_path / f"{i}"))
      for i in range(2)
    ]
    for process in (first, second):
      process.wait_for("joined")
    second.signal(signal.SIGKILL)
    status = first.wait()  # nothing but jax can end it
  print(f"the other ended after {first.seconds:.1f} s, with status {status}")
  assert status != 0
  assert "detected fatal errors" in first.text


@pytest.mark.fault("differing-processes")
@pytest.mark.processes
@pytest.mark.parametrize("what", ["seed", "workdir"])
def test_processes_that_differ_are_refused(tmp_path, backbone_file, what):
  flags = [flags_of(tmp_path / "run", backbone_file) for _ in range(2)]
  if what == "seed":
    flags[1].append("--config.seed=1")
    expected = "config.seed: process 0 has 0, process 1 has 1"
  else:
    flags[1].append(f"--workdir={tmp_path / 'elsewhere'}")
    expected = "processes [1] do not see the files that process 0"
  for process in two.run_two(logs_in(tmp_path), flags):
    assert process.status == 2, process.text
    assert expected in process.text
    assert "Traceback" not in process.text
  assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.processes
def test_a_trained_backbone_lies_in_parts_on_two_processes(
  tmp_path, backbone_file
):
  """From random weights, in saved states and in exports."""
  changes = {
    "mesh.fsdp": 4, "regime": "full", "sweep.learning_rate": "()",
    "learning_rate": 0.03, "backbone": "random:Micro/2", "total_steps": 4,
    "eval_every": 4, "checkpoint_every": 2,
  }  # fmt: skip
  runs = {}
  for name, directory in run_both(tmp_path, backbone_file, changes).items():
    model = mv.load_backbone(directory / "run" / "digits-5-9.npz")
    runs[name] = trees.flatten(model.params)
  for key, array in runs["together"].items():
    np.testing.assert_allclose(
      array, runs["alone"][key], atol=2e-4, err_msg=key
    )
