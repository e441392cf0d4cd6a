"""The training loop: steps, and what is seen and saved on the way."""

import collections
import contextlib
import dataclasses
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from clu import metric_writers
from jax.sharding import Mesh

from memory_vit import sharding
from memory_vit.errors import DivergedError
from memory_vit.progress import Progress
from memory_vit.step import Step, TrainState

logger = logging.getLogger("memory_vit")

Validate = Callable[[Any], dict[str, dict[str, Any]]]
Save = Callable[[TrainState, "Past"], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """How long to train, and how often what happens; all in steps, 0 is never.

  The last step is evaluated and saved whatever is said here.
  """

  total: int
  log: int
  evaluate: int = 0
  checkpoint: int = 0
  profile_at: int = 0

  def due(self, step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens now."""
    return step == self.total or (every > 0 and step % every == 0)


@dataclasses.dataclass(frozen=True)
class Best:
  """Trained parameters as they were at their best.

  Attributes:
    step: at which that was.
    accuracy: on the validation set; None before the first evaluation, and
      where there is no such set: then the last step is the best.
    params: of one name, on the host; None as long as there is no best.
  """

  step: int = 0
  accuracy: float | None = None
  params: Any = None


@dataclasses.dataclass(frozen=True)
class Past:
  """What a run did before it was interrupted, beside its state.

  Attributes:
    best: {name: its best so far}.
    lost: {name: the step at which a value of it was not finite}. It is no
      longer looked at; what was its best before that still is.
    timed_steps: steps that were timed, and in how many seconds.
    timed_seconds: see there.
  """

  best: dict[str, Best]
  lost: dict[str, int]
  timed_steps: int = 0
  timed_seconds: float = 0.0


def fit(
  step_fn: Step,
  state: TrainState,
  frozen: Any,
  batches: Iterator[dict[str, np.ndarray]],
  *,
  title: str,
  steps: Steps,
  batch_size: int,
  mesh: Mesh,
  schedules: dict[str, optax.Schedule],
  past: Past | None = None,
  validate: Validate | None = None,
  save: Save | None = None,
  logdirs: Mapping[str, Path] = types.MappingProxyType({}),
) -> tuple[TrainState, Past]:
  """Trains from the step of `state` to `steps.total`.

  Args:
    step_fn: one step.
    state: where to begin; is used up.
    frozen: what is read and not trained.
    batches: the rows of this process, from the example at which `state` stands.
    title: of the run, for the progress line.
    steps: how long, and how often what.
    batch_size: of all processes together.
    mesh: over which batches are split.
    schedules: learning rate of every name, to be shown.
    past: of the run that is continued.
    validate: params -> {name: `evaluation.evaluate`}; of every name, the
      state with the best "top1" is kept.
    save: (state, past) writes both.
    logdirs: of TensorBoard events; a name without one writes none.

  Returns:
    The last state; and the best of every name, with the time that steps took.

  Raises:
    DivergedError: where a loss or a gradient of every name is not finite.
      Nothing is saved after the step at which that happened. As long as others
      are well, they go on: no name changes another.
  """
  first = int(state.step)
  past = past or Past({name: Best() for name in state.params}, {})
  watch = _Watch(first, title, past.lost)
  progress = Progress(title, first, steps.total, batch_size, past.timed_steps,
                      past.timed_seconds)  # fmt: skip
  best = dict(past.best)

  def so_far() -> Past:
    return Past(best, watch.lost, *progress.timed)

  with contextlib.ExitStack() as stack:
    stack.callback(progress.close)
    events = stack.enter_context(_Events(logdirs))
    profile = stack.enter_context(_Profile(logdirs, steps))
    # Last in, first out: no picture is read after the loop.
    batches = sharding.prefetch(batches, mesh)
    for step in range(first + 1, steps.total + 1):
      profile.before(step)
      state, metrics = step_fn(state, frozen, next(batches))
      watch.add(metrics)
      progress.advance()
      profile.after(step, state)
      if step == first + 1 or steps.due(step, steps.log):
        _log(step, watch.check(), schedules, progress, events)
      evaluates = steps.due(step, steps.evaluate)
      if not evaluates and not steps.due(step, steps.checkpoint):
        continue
      watch.check()  # what is lost must not become the best
      progress.pause()
      well = [name for name in best if name not in watch.lost]
      if evaluates and validate:
        accuracies = _validate(step, state, validate, events)
        best |= _better({name: best[name] for name in well}, accuracies, state)
      if step == steps.total:
        best |= _last({name: best[name] for name in well}, state)
      if save:
        save(state, so_far())
      if step < steps.total:
        progress.resume()
  return state, so_far()


def _better(
  best: Mapping[str, Best], accuracies: Mapping[str, float], state: TrainState
) -> dict[str, Best]:
  """The names that are now better than ever before."""
  return {
    name: _now(name, accuracies[name], state)
    for name, found in best.items()
    if found.accuracy is None or accuracies[name] > found.accuracy
  }


def _last(best: Mapping[str, Best], state: TrainState) -> dict[str, Best]:
  """Names that were never evaluated are best at the last step."""
  return {
    name: _now(name, None, state)
    for name, found in best.items()
    if found.accuracy is None
  }


def _now(name: str, accuracy: float | None, state: TrainState) -> Best:
  """A name as it is."""
  return Best(int(state.step), accuracy, sharding.to_host(state.params[name]))


class _Watch:
  """Keeps the metrics of the last steps, and notices what is not finite.

  They are looked at now and then only: to look at every step would make the
  host wait for the device at every step.
  """

  def __init__(self, step: int, title: str, lost: Mapping[str, int]) -> None:
    self.lost = dict(lost)
    self._step, self._title = step, title
    self._kept: list[Any] = []
    self._last: dict[str, dict[str, float]] = {}

  def add(self, metrics: Any) -> None:
    """Keeps the metrics of the next step, on the device."""
    self._kept.append(metrics)

  def check(self) -> dict[str, dict[str, float]]:
    """Metrics of the last step, of the names that are well.

    Raises:
      DivergedError: where none is.
    """
    for metrics in jax.device_get(self._kept):
      self._step += 1
      self._last = jax.tree.map(float, metrics)
      for name, values in self._last.items():
        if name not in self.lost and not np.isfinite([*values.values()]).all():
          self._lose(name, values)
    self._kept = []
    return {n: v for n, v in self._last.items() if n not in self.lost}

  def _lose(self, name: str, values: dict[str, float]) -> None:
    """Notes that a name is lost; raises where it was the last one."""
    self.lost[name] = self._step
    shown = ", ".join(f"{key} {value}" for key, value in values.items())
    message = (
      f"at step {self._step}: a value of {name!r} is not finite ({shown}). "
      "What was saved before is as it was. Try a lower learning_rate or a "
      "longer optim.warmup, and look for broken pictures in the data."
    )
    if len(self.lost) == len(self._last):
      text = f"training of {self._title!r} stopped {message}"
      raise DivergedError(text, dict(self.lost))
    logger.warning("%r is lost %s The others go on.", name, message)


class _Events:
  """TensorBoard events, one directory for every name; by one process."""

  def __init__(self, logdirs: Mapping[str, Path]) -> None:
    mine = logdirs if jax.process_index() == 0 else {}
    self._writers = {
      name: metric_writers.SummaryWriter(str(path))
      for name, path in mine.items()
    }

  def __enter__(self) -> "_Events":
    return self

  def __exit__(self, *args: object) -> None:
    for writer in self._writers.values():
      writer.close()

  def write(self, name: str, step: int, scalars: dict[str, float]) -> None:
    """Writes scalars of a name."""
    if name in self._writers:
      self._writers[name].write_scalars(step, scalars)

  def flush(self) -> None:
    """Makes what was written visible."""
    for writer in self._writers.values():
      writer.flush()


class _Profile:
  """Profiles five steps for TensorBoard, or as many as are left."""

  def __init__(self, logdirs: Mapping[str, Path], steps: Steps) -> None:
    self._first = steps.profile_at if logdirs else 0
    self._last = min(self._first + 4, steps.total)
    self._logdir = next(iter(logdirs.values()), None)
    self._runs = False

  def __enter__(self) -> "_Profile":
    return self

  def __exit__(self, *args: object) -> None:
    if self._runs:
      jax.profiler.stop_trace()

  def before(self, step: int) -> None:
    """Starts where it is time."""
    if step == self._first:
      jax.profiler.start_trace(str(self._logdir))
      self._runs = True

  def after(self, step: int, state: TrainState) -> None:
    """Stops once the last step has been computed, not only started."""
    if self._runs and step == self._last:
      jax.block_until_ready(state)
      jax.profiler.stop_trace()
      self._runs = False


def _log(
  step: int,
  metrics: dict[str, dict[str, float]],
  schedules: dict[str, optax.Schedule],
  progress: Progress,
  events: _Events,
) -> None:
  """Shows the metrics of a step, and writes them for TensorBoard."""
  shown = collections.defaultdict(list)
  for name, values in metrics.items():
    values = {**values, "learning_rate": float(schedules[name](step - 1))}
    for key in ("loss", "accuracy", "learning_rate"):
      shown[key].append(values[key])
    scalars = {f"train/{key}": value for key, value in values.items()}
    speed = {"images_per_second": progress.images_per_second}
    events.write(name, step, scalars | speed)
  progress.report(shown)


def _validate(
  step: int, state: TrainState, validate: Validate, events: _Events
) -> dict[str, float]:
  """Evaluates a state; returns the accuracy of every name."""
  results = validate(state.params)
  for name, result in results.items():
    shown = {key: result[key] for key in ("loss", "top1", "top5")}
    logger.info(
      "%s step %d  validation of %d: loss %.4f  top-1 %.4f  top-5 %.4f",
      name, step, result["examples"], *shown.values(),
    )  # fmt: skip
    events.write(
      name, step, {f"validation/{key}": v for key, v in shown.items()}
    )
  events.flush()
  return {name: result["top1"] for name, result in results.items()}
