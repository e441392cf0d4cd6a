"""Training of a pack by `fit`: saved states, timing and interruptions."""

import dataclasses
import logging
import os
import re
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import class_evaluation

from memory_vit.data.data_record import DataRecord
from memory_vit.errors import DivergedError, TrainingError
from memory_vit.kinds.scores import Scores
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import Interrupted, StopSignal
from memory_vit.train import fit, progress, tensorboard
from memory_vit.train import state as state_lib
from memory_vit.train.checkpoints import Checkpoints
from memory_vit.train.divergence import SkipCount
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.state import BestParams, LoopState, Steps
from memory_vit.train.step import TrainState
from memory_vit.train.tensorboard import TensorBoard

META = {
  "fingerprint": "f", "config": {}, "parents": {}, "attends_to": {},
  "trials": {}, "data": {"classes": []}, "files": {}, "drawn_by": 1,
}  # fmt: skip
ZERO = {"w": np.zeros(3, np.float32)}


class Run:
  """A run whose only parameter counts its steps."""

  def __init__(self, directory, total=6, accuracies=(), skips=(), **steps):
    """Makes a run.

    Args:
      directory: of its states.
      total: steps.
      accuracies: of its evaluations; they need the state of the step.
      skips: steps whose update is skipped.
      **steps: when it evaluates and saves.
    """
    self.directory, self.skips = directory, skips
    self.steps = Steps(total=total, log=1, **steps)
    self.accuracies = dict(accuracies)
    self.taken, self.evaluated = [], []
    self.stop = StopSignal()
    self.in_step = self.in_evaluation = self.in_save = lambda step: None
    self.logdirs, self.top5, self.classes = {}, 1.0, 2
    self.meta = META

  def step(self, state, frozen, batch):
    step = int(state.step) + 1
    self.taken.append(step)
    self.in_step(step)
    skipped = float(step in self.skips)
    params = jax.tree.map(lambda a: a + 1 - skipped, state.params)
    metrics = {"loss": 1.0, "accuracy": 0.0, "skipped": skipped,
               "learning_rate": 0.1}  # fmt: skip
    return TrainState(jnp.int32(step), params, state.opt_state), {"a": metrics}

  def _batches(self, start):
    """One for each step that is left; what comes next is broken."""
    for _ in range(start, self.steps.total):
      yield {"image": np.zeros((1, 1))}
    raise AssertionError("a batch that no step will see")

  def _validate(self, params):
    count = int(params["a"]["w"][0])
    self.in_evaluation(count)
    self.stop.check()
    self.evaluated.append(count)
    top1 = self.accuracies[count]
    found = class_evaluation(top1, top5=self.top5, classes=self.classes)
    return {"a": found}

  def go(self):
    """Trains from the newest state to the end; returns it and its past."""
    first = TrainState(jnp.int32(0), {"a": ZERO}, ())
    with Checkpoints(self.directory) as checkpoints, self.stop.listening():

      def save(state, past):
        self.in_save(int(state.step))
        state_lib.save(checkpoints, state, past, self.meta, {})

      state, past = state_lib.resume(
        checkpoints, first, self.meta, {}, self.steps, DataRecord()
      )
      logdirs = self.logdirs
      with MetricWriters(TensorBoard(logdirs)) as writers:
        return fit.fit(
          self.step, state, self._batches(int(state.step)), past, title="run",
          frozen=None, mesh=sharding.make_mesh(jax.devices()[:1]),
          steps=self.steps, batch_size=1,
          evaluate=self._validate if self.accuracies else None,
          save=save, stop=self.stop, profile_dir=logdirs.get("a"),
          writers=writers if logdirs else fit.NO_WRITERS,
        )  # fmt: skip

  def saved(self):
    """{step: best step and its parameter} in what lies on disk."""
    found = {}
    first = TrainState(jnp.int32(0), {"a": ZERO}, ())
    with Checkpoints(self.directory) as checkpoints:
      for step in checkpoints.steps():
        best_step, *_ = checkpoints.meta(step)["best"]["a"]
        best = {"a": ZERO} if best_step else {}
        read = checkpoints.restore(step, {"state": first, "best": best})
        value = read["best"]["a"]["w"][0] if best_step else None
        found[step] = (best_step, value)
    return found


@pytest.mark.fault("falling-accuracy")
def test_every_saved_state_holds_the_best_parameters(tmp_path):
  """Scores fall at each evaluation: both saved states hold the first."""
  run = Run(tmp_path, 5, {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6, 5: 0.5}, evaluate=1)
  _, past = run.go()
  assert run.saved() == {4: (1, 1.0), 5: (1, 1.0)}
  assert (past.best["a"].step, past.best["a"].scores.score) == (1, 0.9)


def test_only_training_steps_are_timed(tmp_path, monkeypatch):
  """Of a clock that moves by 1 in a step, and by more in all else."""
  now = [0.0]

  def takes(seconds):
    return lambda step: now.__setitem__(0, now[0] + seconds)

  clock = types.SimpleNamespace(perf_counter=lambda: now[0])
  monkeypatch.setattr(progress, "time", clock)
  run = Run(tmp_path, 6, {2: 0.5, 4: 0.6, 6: 0.7}, evaluate=2, checkpoint=3)
  run.in_step, run.in_evaluation = takes(1), takes(100)
  run.in_save = takes(10_000)
  _, past = run.go()
  # The first step compiles, and is not counted.
  assert (past.timed_steps, past.timed_seconds) == (5, 5.0)


def test_computing_the_first_step_is_not_timed(tmp_path, monkeypatch):
  """`fit` only starts it; reading its metrics waits for the result."""
  clock = types.SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
  monkeypatch.setattr(progress, "time", clock)
  check, asked = fit.DivergenceMonitor.check, []

  def waits(monitor):
    clock.now += 1.0 if asked else 1_000.0
    asked.append(monitor)
    return check(monitor)

  monkeypatch.setattr(fit.DivergenceMonitor, "check", waits)
  run = Run(tmp_path, 5)
  run.steps = dataclasses.replace(run.steps, log=5)
  _, past = run.go()
  assert (past.timed_steps, past.timed_seconds) == (4, len(asked) - 1)


def test_first_step_of_a_resumed_run_is_not_timed(tmp_path):
  """The one for which there was no time before the interruption."""
  accuracies = {2: 0.5, 4: 0.6, 6: 0.7}
  run = Run(tmp_path, 6, accuracies, evaluate=2)
  run.in_evaluation = at(2)
  with pytest.raises(Interrupted):
    run.go()
  again = Run(tmp_path, 6, accuracies, evaluate=2)
  _, past = again.go()
  assert again.taken == [3, 4, 5, 6]
  assert again.evaluated == [2, 4, 6]
  assert past.timed_steps == 1 + 3


@pytest.mark.fault("nan-accuracy")
@pytest.mark.parametrize(
  ("accuracies", "best", "accuracy"),
  [
    ({1: None, 2: 0.5, 3: None}, 2, 0.5),
    ({1: 0.5, 2: None, 3: None}, 1, 0.5),
    ({1: None, 2: None, 3: None}, 3, None),  # the latest, for want of a better
  ],
)
def test_missing_score_is_best_only_if_all_are_missing(
  tmp_path, accuracies, best, accuracy
):
  run = Run(tmp_path, 3, accuracies, evaluate=1)
  _, past = run.go()
  assert (past.best["a"].step, past.best["a"].scores.score) == (best, accuracy)
  assert run.saved()[3] == (best, float(best))


def at(wanted, number=signal.SIGTERM):
  def send(step):
    if step == wanted:
      os.kill(os.getpid(), number)

  return send


@pytest.mark.parametrize(
  ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_interrupted_run_resumes_at_the_same_step(tmp_path, number, status):
  run = Run(tmp_path, checkpoint=5)
  run.in_step = at(3, number)
  with pytest.raises(Interrupted, match="step 3 of 'run' is saved") as error:
    run.go()
  assert error.value.status == status
  assert list(run.saved()) == [3]
  again = Run(tmp_path, checkpoint=5)
  state, _ = again.go()
  assert again.taken == [4, 5, 6]
  assert state.params["a"]["w"][0] == 6


@pytest.mark.fault("sigterm")
@pytest.mark.parametrize("where", ["in_step", "in_evaluation"])
@pytest.mark.parametrize("step", [2, 4])
def test_interrupted_evaluation_is_made_up_on_resuming(tmp_path, where, step):
  """The best is at it, and would be missed."""
  accuracies = {2: 0.3, 4: 0.1} | {step: 0.9}
  whole = Run(tmp_path / "whole", 4, accuracies, evaluate=2)
  _, expected = whole.go()
  run = Run(tmp_path / "run", 4, accuracies, evaluate=2)
  setattr(run, where, at(step))
  with pytest.raises(Interrupted):
    run.go()
  assert run.saved()[step][0] != step
  # Interrupted a second time, in what it makes up for.
  again = Run(tmp_path / "run", 4, accuracies, evaluate=2)
  again.in_evaluation = at(step)
  with pytest.raises(Interrupted):
    again.go()
  assert again.taken == []
  last = Run(tmp_path / "run", 4, accuracies, evaluate=2)
  _, found = last.go()
  assert last.taken == list(range(step + 1, 5))
  assert last.evaluated == [s for s in (2, 4) if s >= step]
  assert (found.best["a"].step, found.best["a"].scores.score) == (step, 0.9)
  assert expected.best["a"].step == step
  assert not found.pending


@pytest.mark.fault("sigterm")
def test_signal_during_the_last_save_stops_before_export(tmp_path):
  """Before it is exported; nothing is trained again."""
  run = Run(tmp_path, 2, {2: 0.5}, evaluate=2)
  run.in_save = at(2)
  with pytest.raises(Interrupted, match="the saved state is unchanged"):
    run.go()
  assert run.saved() == {2: (2, 2.0)}
  again = Run(tmp_path, 2, {2: 0.5}, evaluate=2)
  again.go()
  assert again.taken == again.evaluated == []


class Pending:
  """A number that the device has not computed before somebody waits for it."""

  def __init__(self, device, value):
    self.device, self.value, self.done = device, value, False
    device.append(self)

  def block_until_ready(self):
    """The device computes in the order in which it was told to."""
    for other in self.device[: self.device.index(self) + 1]:
      other.done = True
    return self

  def __float__(self):
    return float(self.block_until_ready().value)


@pytest.mark.fault("slow-steps")
def test_at_most_three_steps_are_in_flight(tmp_path):
  """A signal waits for all of them, on a slow device for minutes."""
  run = Run(tmp_path, 50)
  run.steps = Steps(total=50, log=1000)
  device, most, left = [], [], []
  step = run.step

  def dispatched(*args):
    state, metrics = step(*args)
    metrics["a"]["loss"] = Pending(device, 1.0)
    most.append(sum(not number.done for number in device))
    return state, metrics

  def asked():
    left.append(sum(not number.done for number in device))
    return False

  run.step, run.stop.is_wanted = dispatched, asked
  run.go()
  assert len(most) == 50
  assert max(most) == 3  # and no fewer: the device must not wait for the host
  assert max(left[:50]) == 2  # when `fit` asks whether to stop


@pytest.fixture
def progress_lines(caplog, monkeypatch):
  """What is said of steps."""
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  caplog.set_level(logging.INFO, "memory_vit")
  return lambda: [
    record.getMessage()
    for record in caplog.records
    if record.name.startswith("memory_vit.") and " step " in record.getMessage()
  ]


@pytest.mark.fault("slow-steps")
def test_progress_is_logged_at_least_every_half_minute(
  tmp_path, monkeypatch, progress_lines
):
  """Whatever `log_every` says; steps of 7 s."""
  clock = types.SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
  monkeypatch.setattr(progress, "time", clock)
  run = Run(tmp_path, 14)
  run.steps = Steps(total=14, log=1000)

  def takes_long(step):
    clock.now += 7

  run.in_step = takes_long
  run.go()
  lines = progress_lines()
  shown = [int(re.search(r" step (\d+)/14", line)[1]) for line in lines]
  assert shown == [1, 6, 11, 14]
  assert lines[0].endswith("learning_rate 0.1")  # nobody knows the speed yet
  assert lines[1].endswith("  0.14 images/s  ETA 0:56")


def test_progress_line_by_the_clock_does_not_check_divergence(
  tmp_path, monkeypatch
):
  """Another process would not look, and wait for this one for ever."""
  run = Run(tmp_path, 9, skips=range(2, 9))
  run.steps = Steps(total=9, log=1000)
  monkeypatch.setattr(progress.Progress, "is_overdue", lambda self: True)
  with pytest.raises(DivergedError):
    run.go()
  assert run.taken[-1] == 9  # where all look, not at the third


@pytest.mark.fault("non-finite-update")
def test_skipped_updates_are_counted_across_an_interruption(tmp_path):
  """Two before the interruption and one after it are three in a row."""
  run = Run(tmp_path, checkpoint=1, skips=(3, 4, 5))
  run.in_step = at(4)
  with pytest.raises(Interrupted):
    run.go()
  again = Run(tmp_path, checkpoint=1, skips=(3, 4, 5))
  with pytest.raises(DivergedError, match="at step 5") as error:
    again.go()
  assert error.value.lost == {"a": 5}
  assert list(again.saved()) == [3, 4]
  fine = Run(tmp_path, checkpoint=1, skips=(3, 4))
  _, past = fine.go()
  assert past.skipped == {"a": SkipCount(2, ())}


class Failing:
  """A writer of events on a disk that gets full."""

  def __init__(self, path):
    self.left = 2

  def write_scalars(self, step, scalars):
    self.left -= 1
    if self.left < 0:
      raise OSError(28, "No space left on device")

  def flush(self):
    pass

  def close(self):
    pass


@pytest.mark.fault("unwritable-events")
def test_training_continues_if_the_disk_of_events_is_full(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  monkeypatch.setattr(tensorboard, "EventFile", Failing)
  run = Run(tmp_path / "c")
  run.logdirs = {"a": tmp_path / "events"}
  state, _ = run.go()
  assert state.step == 6
  warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
  assert len(warnings) == 2
  assert "cannot be written; training continues" in warnings[0]
  assert "No space left" in warnings[0]
  assert "not all of this run was written" in warnings[1]


def test_event_error_without_a_message_is_logged_by_type(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)

  def fails(path):
    raise RuntimeError

  monkeypatch.setattr(tensorboard, "EventFile", fails)
  with MetricWriters(TensorBoard({"a": tmp_path})) as writers:
    writers.write_scalars(1, {"a": {"loss": 1.0}})
  assert "(RuntimeError: RuntimeError)" in caplog.text


@pytest.mark.fault("unwritable-events")
def test_training_continues_if_events_cannot_be_opened(tmp_path):
  (tmp_path / "file").write_text("")
  run = Run(tmp_path / "c", 2)
  run.logdirs = {"a": tmp_path / "file" / "events"}
  assert run.go()[0].step == 2


@pytest.mark.fault("resumed-run")
def test_every_field_of_the_loop_state_is_saved(tmp_path):
  """Every field of it: one that is forgotten changes a resumed run."""
  past = LoopState(
    best={
      "a": BestParams(
        1,
        {"w": np.ones(3, np.float32)},
        Scores(
          score=0.25,
          loss=1.5,
          metrics={"map": 0.25},
          per_output={"f1": [0.5, None]},
          examples=8,
          skipped=1,
          not_finite=2,
        ),
      )
    },
    lost={"b": 3},
    skipped={"b": SkipCount(4, (1, 2, 3))},
    pending=True,
    changes=({"step": 1, "key": "config.seed", "from": 0, "to": 1},),
    timed_steps=7,
    timed_seconds=1.5,
  )
  state = TrainState(jnp.int32(2), {"a": ZERO, "b": ZERO}, ())
  with Checkpoints(tmp_path) as checkpoints:
    state_lib.save(checkpoints, state, past, META, {})
    _, found = state_lib.resume(
      checkpoints, state, META, {}, Steps(total=9, log=1), DataRecord()
    )
  assert np.array_equal(found.best["a"].params["w"], np.ones(3))
  plain = {"a": dataclasses.replace(found.best["a"], params=None)}
  expected = {"a": dataclasses.replace(past.best["a"], params=None)}
  assert dataclasses.replace(found, best=plain) == dataclasses.replace(
    past, best=expected
  )


@pytest.mark.parametrize(("classes", "says"), [(5, False), (6, True)])
def test_top5_is_logged_only_with_more_than_five_classes(
  tmp_path, monkeypatch, caplog, classes, says
):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  caplog.set_level(logging.INFO)
  run = Run(tmp_path, 1, {1: 0.5}, evaluate=1)
  run.top5, run.classes = 0.875, classes
  run.go()
  (line,) = (said for said in caplog.messages if "validation of" in said)
  assert "validation of 9: loss 1.0000  top-1 0.5000" in line
  assert ("top-5 0.8750" in line) is says


def test_early_stopping_ends_a_run_without_improvement(tmp_path, caplog):
  """Two evaluations after the best one; state and best are saved."""
  accuracies = {1: 0.1, 2: 0.6, 3: 0.6, 4: 0.2, 5: 0.9, 6: 0.1}
  settings = {"total": 6, "accuracies": accuracies, "evaluate": 1}
  run = Run(tmp_path, **settings, patience=2)
  caplog.set_level(logging.INFO)
  past = run.go()[1]
  assert run.taken == [1, 2, 3, 4]
  assert (past.best["a"].step, past.best["a"].scores.score) == (2, 0.6)
  assert "stopped early at step 4 (config.early_stopping 2)" in caplog.text
  # Resuming takes no further step, except with more patience.
  again = Run(tmp_path, **settings, patience=2)
  assert again.go()[1].best["a"].step == 2
  assert again.taken == []
  longer = Run(tmp_path, **settings, patience=3)
  assert longer.go()[1].best["a"].step == 5
  assert longer.taken == [5, 6]


def test_options_that_would_change_no_step_of_a_stopped_run_are_refused(
  tmp_path,
):
  accuracies = {1: 0.6, 2: 0.2, 3: 0.1, 4: 0.1, 5: 0.1}

  def run(learning_rate, **steps):
    made = Run(tmp_path, 5, accuracies, evaluate=1, **steps)
    made.meta = {**META, "config": {"config.learning_rate": learning_rate}}
    return made

  run(0.1, patience=2).go()
  with pytest.raises(
    TrainingError,
    match=r"stopped early after 3 steps, so changes of config\.learning_rate "
    r"would .*greater config\.early_stopping",
  ):
    run(0.2, patience=2).go()
  again = run(0.1, patience=2)
  assert again.go()[1].changes == ()
  longer = run(0.2, patience=3)
  _, past = longer.go()
  assert longer.taken == [4]
  assert [change["key"] for change in past.changes] == ["config.learning_rate"]


def test_finished_run_refuses_another_patience(tmp_path):
  def run(patience):
    made = Run(tmp_path, 2, {1: 0.2, 2: 0.6}, evaluate=1, patience=patience)
    made.meta = {**META, "config": {"config.early_stopping": patience}}
    return made

  run(0).go()
  with pytest.raises(
    TrainingError,
    match=r"all of its 2 steps, so changes of config\.early_stopping would",
  ):
    run(1).go()


def test_lost_trial_does_not_delay_early_stopping():
  steps = Steps(total=9, log=1, evaluate=1, patience=2)
  best = {"a": BestParams(1), "b": BestParams(2)}
  assert steps.stops_early(3, LoopState(best, lost={"b": 3}).best_steps)
  assert not steps.stops_early(3, LoopState(best).best_steps)
