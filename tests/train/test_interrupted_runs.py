"""Faults of processes and disks: whole commands that are interrupted.

KILLS=20 makes the campaign as long as the one in docs/dev/reliability.md, and
FILE_KILLS=1000 kills before and after every operation on files.
"""

import json
import os
import re
import shutil
import signal
import socket
import time

import numpy as np
import pytest
from conftest import tiny_backbone
from faults import Process, Run
from two_processes import kept_port

import memory_vit as mv
from memory_vit.tasks import manifest, store
from memory_vit.train.checkpoints import Checkpoints

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("KILLS", "3"))
FILE_KILLS = int(os.environ.get("FILE_KILLS", "2"))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5), path)
  return path


@pytest.fixture(scope="module")
def whole(backbone, tmp_path_factory):
  """A run that nobody interrupts."""
  run = Run(backbone, tmp_path_factory.mktemp("whole") / "run")
  run.finish()
  return run


@pytest.fixture
def run(backbone, tmp_path):
  return Run(backbone, tmp_path / "run")


@pytest.mark.fault("random-kill")
def test_random_kills_change_no_bit(backbone, tmp_path):
  """In steps and in saves; each costs at most one interval."""
  options = {"total_steps": 100 * KILLS, "eval_every": 30 * KILLS}
  whole = Run(backbone, tmp_path / "whole", **options)
  whole.finish()
  killed = Run(backbone, tmp_path / "killed", **options)
  rng = np.random.default_rng()
  lost, in_save, last = [], 0, None
  for _ in range(KILLS):
    with killed.start() as process:
      process.wait_for(r" step \d+/")  # it is not compiling any more
      if last is not None:
        lost.append(last - process.resumed)
      # Some saves further on, in steps or in one of them.
      further = process.resumed + rng.integers(1, 40)
      process.wait_for(rf" step {further}/")
      time.sleep(rng.uniform(0, 0.15))
      process.signal(signal.SIGKILL)
      assert process.wait() == -signal.SIGKILL
      last = process.last_step
    checkpoints = killed.workdir / "checkpoints"
    in_save += any(checkpoints.glob("scratch-*"))
  lost.append(last - killed.finish().resumed)
  print(f"{KILLS} kills, {in_save} in a save; lost steps {lost}")
  assert max(lost) <= 10
  assert killed.state() == whole.state()
  assert arrays(killed) == arrays(whole)


def arrays(run):
  path = run.workdir / "tasks" / "digits-5-9"
  task = store.read_arrays(path, manifest.read(path))
  return {name: array.tobytes() for name, array in task.items()}


# However slow the machine is, the signal comes in step 13.
WAITS = """
import time
from memory_vit.runtime.preemption import StopSignal
is_wanted, taken = StopSignal.is_wanted, []
def waits(self):
  taken.append(1)
  while len(taken) == 13 and self._signal is None:
    time.sleep(0.01)
  return is_wanted(self)
StopSignal.is_wanted = waits
"""


@pytest.mark.fault("resumed-run", "sigterm", "signal-handlers", "signal-storm")
@pytest.mark.parametrize(
  ("number", "status", "storm"),
  [
    (signal.SIGTERM, 75, None),
    (signal.SIGINT, 130, None),
    (signal.SIGTERM, 75, signal.SIGTERM),
  ],
)
def test_signal_loses_no_step(run, whole, number, status, storm):
  """In a storm another one comes every 10 ms, until the process is gone."""
  with run.start(WAITS, fresh=True) as process:
    process.wait_for(" step 13/")
    process.signal(number)
    assert process.wait(storm) == status, process.text
    assert "Traceback" not in process.text
    assert process.text.endswith("Run the same command to resume.\n")
    print(f"{process.seconds:.1f} s from the signal to the end")
  assert run.steps() == [10, 13]
  assert run.finish().resumed == 13
  assert run.state() == whole.state()


IN_THE_SAVE = f"""{WAITS}
import sys
from memory_vit.runtime import checksums
seal = checksums.seal
def slow(directory, rest):
  while directory.name.endswith("13"):
    print("in the save", file=sys.stderr, flush=True)
    time.sleep(100)
  seal(directory, rest)
checksums.seal = slow
"""


@pytest.mark.fault("kill-during-save", "second-signal")
def test_second_signal_ends_the_process_at_once(run, whole):
  with run.start(IN_THE_SAVE) as process:
    process.wait_for(" step 13/")
    process.signal(signal.SIGTERM)
    process.wait_for("in the save")
    time.sleep(1.1)
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM  # the save never ends
  assert run.steps() == [10]
  assert run.finish().resumed == 10
  assert run.state() == whole.state()


# Counts what the run does with files from the save of step 60 on, the export
# and the result included, and dies in it. What tensorstore does by itself is
# not seen: it comes between.
DIES = """
import builtins, io, os, re, signal, sys, threading, time
from memory_vit.train.checkpoints import Checkpoints
at, before, workdir = {at!r}, {before}, {workdir!r}
save, lock, state = Checkpoints.save, threading.RLock(), [False, 0]
def from_here(self, step, *args):
  state[0] = state[0] or step == 60
  save(self, step, *args)
Checkpoints.save = from_here
def dies(now, what):
  here = re.fullmatch(at, what) if isinstance(at, str) else state[1] == at
  if here and now == before:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
def counted(module, name):
  real = getattr(module, name)
  def operation(path, *args, **kwargs):
    where = os.fspath(path) if isinstance(path, os.PathLike) else path
    ours = not isinstance(where, str) or where.startswith(workdir)
    ours = ours or not os.path.isabs(where)
    reads = name == "open" and not set("wax+") & set(
      str(args[0] if args else kwargs.get("mode", "r")))
    if not (state[0] and ours) or reads:
      return real(path, *args, **kwargs)
    with lock:
      state[1] += 1
      print("operation", state[1], name, where, file=sys.stderr, flush=True)
      dies(True, f"{{name}} {{where}}")
      result = real(path, *args, **kwargs)
      dies(False, f"{{name}} {{where}}")
      return result
  setattr(module, name, operation)
for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync"):
  counted(os, name)
counted(io, "open")
counted(builtins, "open")
"""


@pytest.mark.fault("kill-at-file-operation")
def test_kill_at_a_file_operation_changes_no_bit(backbone, whole, tmp_path):
  """In the last save and after it, where no further save tidies anything."""

  def started_at(name, at, before):
    run = Run(backbone, tmp_path / name)
    if name != "part":
      shutil.copytree(tmp_path / "part", run.workdir)
    workdir = str(run.workdir)
    return run, run.start(DIES.format(at=at, before=before, workdir=workdir))

  run, process = started_at("part", 1, True)
  assert process.wait() == -signal.SIGKILL, process.text
  assert run.steps() == [40, 50]
  run, process = started_at("count", 0, True)
  assert process.wait() == 0, process.text
  operations = re.findall(r"^operation \d+ (.*)", process.text, re.MULTILINE)
  assert len(operations) > 20
  # By their names, as a state has not always as many files: a third state, and
  # half a task, would be left.
  named = ["rename .*/00000040", "rename .*/[.]digits-5-9-.{8}/new"]
  assert all(any(re.fullmatch(n, o) for o in operations) for n in named)
  points = [(k, before) for k in range(1, len(operations) + 1)
            for before in (True, False)]  # fmt: skip
  some = np.linspace(0, len(points) - 1, min(FILE_KILLS - 2, len(points)))
  chosen = [*((n, True) for n in named), *(points[int(i)] for i in some)]
  hit = 0
  for number, (at, before) in enumerate(chosen):
    run, process = started_at(str(number), at, before)
    point = f"{'before' if before else 'after'} {at}"
    status = process.wait()
    # A state has not always as many files: then there is no such number.
    if isinstance(at, str) or status:
      assert status == -signal.SIGKILL, (point, process.text)
      hit += 1
    run.finish()
    assert run.state() == whole.state(), point
    assert arrays(run) == arrays(whole), point
    assert result(run) == result(whole), point
    assert left(run) == left(whole), point
  print(f"{hit} kills at {len(operations)} operations")


def result(run):
  """Without what the clock says."""
  found = json.loads((run.workdir / "result.json").read_text())
  del found["wall_seconds"], found["images_per_second"]
  return found


def left(run):
  """What lies in the work directory, but for TensorBoard's files."""
  folders = [run.workdir, run.workdir / "checkpoints", run.workdir / "tasks"]
  found = [path.name for folder in folders for path in folder.iterdir()]
  return sorted(name for name in found if not name.startswith("events."))


FULL = """
import resource
from memory_vit.train.checkpoints import Checkpoints
save = Checkpoints.save
def full(self, step, *args):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  if step == 30:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
  try:
    save(self, step, *args)
  finally:  # stderr is a file as well
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
Checkpoints.save = full
"""


@pytest.mark.fault("disk-full")
def test_full_disk_during_a_save_stops_training(run, whole):
  with run.start(FULL) as process:
    assert process.wait() == 2, process.text
    assert process.last_step == 30  # at once
    assert "error: step 30 cannot be written to" in process.text
    assert "The steps saved before, [10, 20], are unchanged" in process.text
    assert "Traceback" not in process.text
  assert run.finish().resumed == 20
  assert run.state() == whole.state()


@pytest.mark.fault("two-runs")
def test_second_run_in_a_directory_is_refused(run, whole):
  with run.start(WAITS) as process:
    process.wait_for(" step 13/")
    second = run.start()
    assert second.wait() == 2, second.text
    assert f"process {process.pid} on {socket.gethostname()}" in second.text
    process.signal(signal.SIGKILL)
    process.wait()
  assert run.finish().resumed == 10
  assert run.state() == whole.state()


@pytest.mark.fault("lost-lock")
def test_run_whose_lock_is_removed_ends(run, whole):
  """Before it writes beside another one that was let in."""
  with run.start(WAITS) as process:
    process.wait_for(" step 13/")
    (run.workdir / ".lock").unlink()
    process.signal(signal.SIGTERM)
    assert process.wait() == 2, process.text
    assert ".lock was removed or replaced while" in process.text
    assert "Traceback" not in process.text
  assert run.steps() == [10]
  assert run.finish().resumed == 10
  assert run.state() == whole.state()


@pytest.mark.fault("changed-run")
def test_resuming_refuses_another_configuration_but_more_steps(
  backbone, whole, run
):
  shutil.copytree(whole.workdir, run.workdir)
  refused = Run(backbone, run.workdir, seed=1).start()
  assert refused.wait() == 2, refused.text
  assert "seed: 0, now 1" in refused.text
  longer = Run(backbone, run.workdir, total_steps=70)
  assert longer.steps() == whole.steps()
  assert longer.finish().resumed == 60
  assert longer.steps() == [60, 70]


PROCESS = """
import sys, time
import jax
port, process, backbone, workdir, eval_every = sys.argv[-5:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process),
                           initialization_timeout=300)
import dataclasses, pathlib
import memory_vit as mv
from memory_vit.tasks import manifest, store
from configs import digits
from memory_vit import config
from memory_vit.data import datasets
from memory_vit.train import evaluate
from memory_vit.train import progress
from memory_vit.train.fit import fit_pack
from memory_vit.train.inputs import make_inputs
from memory_vit.runtime import sharding
from memory_vit.train import sweep
from memory_vit.runtime.preemption import Interrupted, StopSignal
progress.log_to_stderr()
values = digits.get_config()
values.batch_size, values.total_steps, values.log_every = 16, 100_000, 1
values.checkpoint_every = 10
values.batch_size_eval, values.eval_every = 2, int(eval_every)
settings = config.from_dict(values.to_dict())

predict_fn = evaluate.predict_fn
def slow(*args, **options):
  outputs = predict_fn(*args, **options)
  def predict(images):
    print("a batch of an evaluation", file=sys.stderr)
    time.sleep(0.1)
    return outputs(images)
  return predict
evaluate.predict_fn = slow

mesh = sharding.make_mesh()
backbone = mv.load_backbone(backbone, image_size=8)
params = jax.device_put(backbone.params, sharding.replicated(mesh))
stop = StopSignal()
trials = sweep.trials_of(settings, "d")
inputs = make_inputs(
  settings, mesh, dataclasses.replace(backbone, params=params),
  {"train": datasets.open_split("digits:5-9", "train"),
   "validation": datasets.open_split("digits:5-9", "test")},
  trials, stop=stop,
)
try:
  with stop.listening():
    fit_pack(inputs, trials, pathlib.Path(workdir))
except Interrupted as stopped:
  print(stopped, file=sys.stderr)
  sys.exit(stopped.status)
"""


@pytest.mark.fault("sigterm-of-two", "signal-handlers")
@pytest.mark.parametrize(
  ("number", "status", "eval_every", "sent_at"),
  [
    (signal.SIGTERM, 75, 100_000, r" step 13/"),
    (signal.SIGINT, 130, 13, r"a batch of an evaluation"),
  ],
)
def test_two_processes_stop_at_the_same_step(
  backbone, tmp_path, number, status, eval_every, sent_at
):
  """Only one of them gets the signal, in a step or in an evaluation."""
  directory = tmp_path / "c"

  def start(index, port):
    flags = [str(port), str(index), str(backbone), str(directory)]
    flags.append(str(eval_every))
    return Process(PROCESS, flags, tmp_path / f"{index}.log")

  with kept_port() as port, start(0, port) as first, start(1, port) as second:
    second.wait_for(sent_at)
    second.signal(number)
    assert second.wait() == status, second.text
    assert "  validation of " not in second.text  # none was finished
    assert first.wait() == 75, first.text
    ends = [
      int(re.search(r"step (\d+) of 'd' is saved", process.text)[1])
      for process in (first, second)
    ]
  assert ends[0] == ends[1]
  with Checkpoints(directory) as checkpoints:
    assert checkpoints.latest() == ends[0]
