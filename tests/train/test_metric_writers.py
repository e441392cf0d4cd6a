"""What TensorBoard and the history show, and writers that fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import class_evaluation, one_device

from memory_vit import plots
from memory_vit.train import fit, parameters, tensorboard
from memory_vit.train.metric_writers import Guard, History, MetricWriters
from memory_vit.train.state import Steps
from memory_vit.train.step import TrainState
from memory_vit.train.tensorboard import TensorBoard

pytestmark = pytest.mark.versions

STEPS = Steps(total=5, log=2, evaluate=2)
RATES = {"a": [0.1, 0.2, 0.3, 0.2, 0.1], "b": [1.0, 0.5, 0.25, 0.125, 0.0625]}


def step_fn(state, frozen, batch):
  """Its loss is the step, its accuracy a tenth of it; of "b" twice that."""
  step = int(state.step) + 1
  metrics = {
    name: {"loss": factor * step, "accuracy": factor * step / 10,
           "grad_norm": 2.0, "param_norm": 3.0, "skipped": 0.0,
           "learning_rate": RATES[name][step - 1]}
    for name, factor in (("a", 1.0), ("b", 2.0))
  }  # fmt: skip
  params = jax.tree.map(lambda a: a + 1, state.params)
  return TrainState(jnp.int32(step), params, state.opt_state), metrics


def validate(params):
  """What it says tells which step it was shown."""
  step = float(params["a"]["w"])
  return {
    name: class_evaluation(step / 100, factor * step, step / 50, classes=6)
    for name, factor in (("a", 1.0), ("b", 2.0))
  }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """{name: {tag: (steps, values)}} of two trials: of events, and in memory."""
  root = tmp_path_factory.mktemp("events")
  logdirs = {"a": root / "a", "b": root / "b"}
  # Two layers of three cells; of the second, one is not like the others.
  memory = np.zeros((2, 3, 4), np.float32)
  memory[1, 0] = 3
  zero = {"w": np.float32(0), "memory": memory}
  batches = ({"image": np.zeros((1, 1))} for _ in range(STEPS.total))
  history = History()
  with MetricWriters(TensorBoard(logdirs), history) as writers:
    fit.fit(
      step_fn, TrainState(jnp.int32(0), {"a": zero, "b": zero}, ()), batches,
      title="run", frozen=None, steps=STEPS, batch_size=4, mesh=one_device(),
      evaluate=validate, writers=writers,
    )  # fmt: skip
  read = {name: plots.read_scalars(path) for name, path in logdirs.items()}
  return read, {name: history.curves(name) for name in logdirs}


@pytest.fixture(scope="module")
def scalars(written):
  return written[0]


def test_history_in_memory_equals_the_events(written):
  events, history = written
  assert events.keys() == history.keys() == RATES.keys()
  for name, curves in events.items():
    assert curves.keys() == history[name].keys()
    for tag, (steps, values) in curves.items():
      np.testing.assert_array_equal(history[name][tag][0], steps, tag)
      np.testing.assert_array_equal(history[name][tag][1], values, tag)


def test_masked_task_without_cells_has_no_memory_norms():
  """The mean over no cells would be no number, in every layer."""
  task = {
    "head": np.full((3, 3), 2, np.float32),
    "memory": np.zeros((2, 0, 4), np.float32),
  }
  found = parameters.part_norms({"pets": task}, ["pets"], one_device())
  assert found == {"pets": {"norm/head": 6.0}}


def test_events_have_exactly_the_expected_tags(scalars):
  for found in scalars.values():
    assert set(found) == {
      "train/loss", "train/accuracy", "train/grad_norm", "train/param_norm",
      "train/skipped", "train/learning_rate", "images_per_second",
      "norm/w", "norm/memory/layer_01", "norm/memory/layer_02",
      "validation/loss", "validation/top1", "validation/top5",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "factor"), [("a", 1.0), ("b", 2.0)])
def test_scalars_are_written_at_the_step_they_describe(scalars, name, factor):
  """The first step, every second, and the last; in numbers that are exact."""
  expected = {
    "train/loss": {step: factor * step for step in (1, 2, 4, 5)},
    "train/accuracy": {step: factor * step / 10 for step in (1, 2, 4, 5)},
    # With which that step was taken, not the one after it.
    "train/learning_rate": {s: RATES[name][s - 1] for s in (1, 2, 4, 5)},
    "train/skipped": dict.fromkeys((1, 2, 4, 5), 0.0),
    # Of the parameters after that step.
    "norm/w": {step: step for step in (1, 2, 4, 5)},
    # Of a cell of four equal values, twice that; the mean of all cells.
    "norm/memory/layer_01": {step: 2 * step for step in (1, 2, 4, 5)},
    "norm/memory/layer_02": {step: 2 * step + 2 for step in (1, 2, 4, 5)},
    "validation/loss": {step: factor * step for step in (2, 4, 5)},
    "validation/top1": {step: step / 100 for step in (2, 4, 5)},
    "validation/top5": {step: step / 50 for step in (2, 4, 5)},
  }
  for tag, points in expected.items():
    steps, values = scalars[name][tag]
    assert list(steps) == list(points), tag
    np.testing.assert_array_equal(
      np.float32(values), np.float32(list(points.values())), tag
    )


class Failing:
  """A writer of which one method raises."""

  def __init__(self, method):
    self.guard, self.method, self.calls = Guard("MLflow"), method, []

  def _called(self, method):
    self.calls.append(method)
    if method == self.method:
      raise OSError(28, "No space left on device")

  def write_scalars(self, step, scalars):
    self._called("write_scalars")

  def write_images(self, step, images):
    self._called("write_images")

  def flush(self):
    self._called("flush")

  def close(self):
    self._called("close")


@pytest.mark.fault("unwritable-events")
@pytest.mark.parametrize(
  ("method", "calls"),
  [
    ("write_scalars", ["write_scalars"]),
    ("write_images", ["write_scalars", "write_images"]),
    ("flush", ["write_scalars", "write_images", "flush"]),
    ("close", ["write_scalars", "write_images", "flush"]),
  ],
)
def test_failing_writer_is_dropped_and_others_continue(method, calls, caplog):
  first, last = Failing(method), History()
  with MetricWriters(first, last) as writers:
    for step in (1, 2):
      writers.write_scalars(step, {"a": {"loss": float(step)}})
      writers.write_images(step, {"a": {"plot": np.zeros((1, 1, 3), "u1")}})
      writers.flush()
  calls = calls * (2 if method == "close" else 1)
  assert first.calls == [*calls, "close"]  # what is open is closed in any case
  steps, values = last.curves("a")["loss"]
  assert (list(steps), list(values)) == ([1, 2], [1.0, 2.0])
  given_up, incomplete = [record.message for record in caplog.records]
  assert given_up == (
    "MLflow cannot be written; training continues without it (OSError: [Errno "
    "28] No space left on device)"
  )
  assert incomplete == "MLflow: not all of this run was written"


def test_event_files_of_an_earlier_pass_are_closed(tmp_path):
  """A sweep may have more trials than a process may have open files."""
  logdirs = {name: tmp_path / name for name in "abc"}
  writer = TensorBoard(logdirs)
  writer.write_scalars(1, {"a": {"loss": 1.0}, "b": {"loss": 2.0}})
  writer.write_scalars(2, {"b": {"loss": 3.0}})  # a is lost
  assert writer._closing.keys() == {"a", "b"}
  writer.write_scalars(1, {"c": {"loss": 4.0}})
  assert writer._closing.keys() == {"c"}
  writer.write_scalars(3, {"a": {"loss": 5.0}})  # the best of all
  writer.close()
  found = {n: plots.read_scalars(path)["loss"] for n, path in logdirs.items()}
  assert {n: (list(s), list(v)) for n, (s, v) in found.items()} == {
    "a": ([1, 3], [1.0, 5.0]), "b": ([1, 2], [2.0, 3.0]), "c": ([1], [4.0]),
  }  # fmt: skip


@pytest.mark.fault("unwritable-events")
def test_trial_whose_events_cannot_be_written_is_given_up_alone(
  tmp_path, caplog
):
  (tmp_path / "a").write_text("a file")
  logdirs = {name: tmp_path / name for name in "ab"}
  with MetricWriters(TensorBoard(logdirs)) as writers:
    for step in (1, 2):
      writers.write_scalars(step, {n: {"loss": float(step)} for n in "ab"})
  steps, _ = plots.read_scalars(tmp_path / "b")["loss"]
  assert list(steps) == [1, 2]
  given_up, incomplete = [record.message for record in caplog.records]
  title = f"TensorBoard events of 'a' in {tmp_path / 'a'}"
  assert given_up.startswith(f"{title} cannot be written; training continues")
  assert incomplete == f"{title}: not all of this run was written"
  assert (tmp_path / "a").read_text() == "a file"


def test_all_writers_are_closed_after_one_fails_to(tmp_path, monkeypatch):
  closed = []

  class Outbox:
    def __init__(self, path):
      self.local = self.path = path

    def close(self):
      closed.append(self.path.name)
      raise OSError(28, "No space left on device")

  monkeypatch.setattr(tensorboard, "Outbox", Outbox)
  with MetricWriters(TensorBoard({n: tmp_path / n for n in "abc"})) as writers:
    writers.write_scalars(1, {n: {"loss": 1.0} for n in "abc"})
  assert sorted(closed) == ["a", "b", "c"]
