"""Whole runs in an emulated bucket, against the same runs in a directory."""

import contextlib
import dataclasses
import signal

import numpy as np
import pytest
from bucket_server import objects
from conftest import tiny_backbone
from faults import MAIN, Process, Run
from PIL import Image
from two_processes import joined, kept_port

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit import plots
from memory_vit.commands import inspect
from memory_vit.evaluation.hits import read_hits
from memory_vit.runtime import files, paths
from memory_vit.train import run, settle

pytestmark = [
  pytest.mark.processes,
  # What gcsfs sends; it is an error of tests alone.
  pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

NAME = "digits-5-9"


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5, depth=1), path)
  return path


def settings(**values):
  """A short run on the digits."""
  config = config_lib.from_dict(digits.get_config().to_dict())
  return config.replaced(
    {
      "batch_size": 16, "batch_size_eval": 64,
      "total_steps": 6, "log_every": 1, "eval_every": 3, "checkpoint_every": 2,
      **values,
    }
  )  # fmt: skip


def untimed(result):
  """A result without the clock."""
  return dataclasses.replace(
    result,
    wall_seconds=0.0,
    images_per_second=0.0,
    sweep=result.sweep and "sweep",
  )


def states(workdir):
  """The newest states: digests of all arrays, and the rest."""
  found = {}
  for path in (workdir / "checkpoints").rglob("state.json"):
    saved = files.read_object(path)["saved"]
    del saved["files"], saved["meta"]["timed"]  # of the clock
    saved["meta"].pop("plan")  # of the free memory
    found[path.parent.relative_to(workdir).as_posix()] = saved
  return found


def assert_same_files(remote, local):
  for name in ("config.json", "hits.json"):
    assert files.read_object(remote / name) == files.read_object(local / name)
  for name in ("tasks", "inventory"):
    names = [
      sorted(p.relative_to(w).as_posix() for p in (w / name).rglob("*"))
      for w in (remote, local)
    ]
    assert names[0] == names[1]
  assert read_hits(remote).keys() == read_hits(local).keys()


@pytest.mark.fault("run-in-a-bucket")
def test_run_in_a_bucket_equals_run_in_a_directory(
  backbone_file, bucket_dir, tmp_path, pictures, capsys
):
  """States, task, result, events and plots, and functions that read them."""
  config = settings(backbone=str(backbone_file), gelu="tanh", log_images=2)
  remote, local = paths.place(bucket_dir, "--workdir"), tmp_path / "run"
  result = mv.train_and_evaluate(config, bucket_dir)
  assert untimed(result) == untimed(mv.train_and_evaluate(config, local))
  assert mv.load_result(bucket_dir) == result
  assert states(remote) == states(local)
  assert_same_files(remote, local)
  assert (remote / ".lock").read_text() == ""
  backbone = mv.load_backbone(backbone_file)
  task = mv.load_task(f"{bucket_dir}/tasks/{NAME}", backbone)
  assert task.digest == mv.load_task(local / "tasks" / NAME, backbone).digest
  found, expected = map(plots.read_scalars, (bucket_dir, local))
  assert found.keys() == expected.keys()
  for tag in found:
    if "loss" in tag:
      for one, other in zip(found[tag], expected[tag], strict=True):
        np.testing.assert_array_equal(one, other)
  for name in ("attention.png", "answers.png"):
    with files.fetched(remote / name) as one:
      pixels = [np.asarray(Image.open(file)) for file in (one, local / name)]
    np.testing.assert_array_equal(*pixels)
  child = config.replaced({"task.attends_to": (f"{bucket_dir}/tasks/{NAME}",)})
  assert settle.parent_directories(child)[0] == [remote / "tasks" / NAME]
  # Finished, it is read and not made again.
  assert mv.train_and_evaluate(config, bucket_dir) == result
  assert inspect.main([bucket_dir + "/tasks"]) == 0
  assert f" {bucket_dir}/tasks/{NAME}\n" in capsys.readouterr().out


@pytest.mark.fault("run-in-a-bucket")
def test_sweep_in_a_bucket_equals_sweep_in_a_directory(
  bucket_dir, tmp_path, backbone_file
):
  """Several passes, a profile, W&B."""
  pytest.importorskip("wandb")
  config = settings(
    **{
      "backbone": str(backbone_file),
      "sweep.regime": ("head", "memory_masked"), "total_steps": 2,
      "upstream.name": "", "profile_at": 2, "log_images": 0,
      "wandb.project": "tests", "wandb.mode": "offline",
    }
  )  # fmt: skip
  remote, local = paths.place(bucket_dir, "--workdir"), tmp_path / "run"
  result = run.train_and_evaluate(config, remote)
  assert untimed(result) == untimed(run.train_and_evaluate(config, local))
  assert states(remote) == states(local)
  assert (remote / "sweep.png").exists()
  for kind, count in {"*.xplane.pb": 2, "run-*.wandb": 1}.items():
    for place in (remote, local):
      assert len([*place.rglob(kind)]) == count, (kind, place)
  assert run.train_and_evaluate(config, remote) == result


# Real processes.


@pytest.fixture
def killed(backbone_file, storage, bucket_dir, tmp_path):
  """A run of the command in a bucket; its log files are local."""
  made = Run(backbone_file, tmp_path / "killed")
  made.workdir = paths.place(bucket_dir, "--workdir")
  made._flags[1] = f"--workdir={bucket_dir}"
  patch = f"import os\nos.environ.update({storage[0]})\n"
  return made, patch


@pytest.mark.fault("kill-in-a-bucket")
@pytest.mark.fault("two-runs-in-a-bucket")
def test_killed_run_in_a_bucket_resumes_bitwise(
  killed, backbone_file, tmp_path
):
  killed, patch = killed
  with killed.start(patch) as process:
    process.wait_for(" step 25/")
    process.signal(signal.SIGKILL)
    process.wait()
  with killed.start(patch) as early:
    assert early.wait() == 2
    assert f"process {process.pid} on " in early.text
    assert "(the lease ends after 120 s without renewal)" in early.text
  (killed.workdir / ".lock").unlink()  # as two minutes later
  with killed.start(patch) as process:
    assert process.wait() == 0, process.text
  assert process.resumed >= 10
  whole = Run(backbone_file, tmp_path / "whole")
  whole.finish()
  assert states(killed.workdir) == states(whole.workdir)
  result, expected = map(mv.load_result, (killed.workdir, whole.workdir))
  assert untimed(result) == untimed(expected)


@pytest.mark.fault("kill-in-a-bucket")
def test_preempted_run_in_a_bucket_releases_its_lease(killed):
  killed, patch = killed
  with killed.start(patch) as process:
    process.wait_for(" step 15/")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.text
  assert (killed.workdir / ".lock").read_text() == ""
  with killed.start(patch) as process:
    assert process.wait() == 0, process.text
    assert process.resumed >= 15


@pytest.mark.fault("lost-lease")
def test_run_that_lost_its_lease_writes_nothing_more(killed, storage):
  killed, patch = killed
  with killed.start(patch) as process:
    process.wait_for(" step 5/")
    (killed.workdir / ".lock").write_text(
      "process 1 on elsewhere, 0123456789abcdef\n"
    )
    name = str(killed.workdir).rpartition("/")[2]
    before = objects(storage[1], name)
    assert process.wait() == 2, process.text
  assert "was taken over or removed. Another run" in process.text
  assert not killed.steps()
  after = {
    key: generation
    for key, generation in objects(storage[1], name).items()
    if "tfevents" not in key  # of its own process
  }
  assert after.items() <= before.items()


@pytest.mark.fault("run-in-a-bucket")
def test_two_processes_write_to_a_bucket_as_to_a_directory(
  backbone_file, storage, bucket_dir, tmp_path
):
  """Each writes its part of a state; only one holds the lease."""
  places = paths.place(bucket_dir, "--workdir"), tmp_path / "run"
  for workdir in places:
    flags = [
      "--config=configs/digits.py", f"--workdir={workdir}",
      f"--config.backbone={backbone_file}",
      "--config.upstream.name=", "--config.batch_size=16",
      "--config.batch_size_eval=64", "--config.total_steps=4",
      "--config.eval_every=2", "--config.checkpoint_every=2",
      "--config.log_images=0",
    ]  # fmt: skip
    patch = f"import os\nos.environ.update({storage[0]})\n" + MAIN
    with kept_port() as port, contextlib.ExitStack() as stack:
      both = [
        stack.enter_context(
          Process(
            patch, [*flags, *joined(i, port)],
            tmp_path / f"{workdir.name}-{i}.log", devices=2,
          )
        )
        for i in range(2)
      ]  # fmt: skip
      for process in both:
        assert process.wait() == 0, process.text
  assert states(places[0]) == states(places[1])
  assert_same_files(*places)
