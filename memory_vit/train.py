"""The training loop: steps, and what is seen and saved on the way."""

import dataclasses
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from clu import metric_writers, periodic_actions
from jax.sharding import Mesh

from memory_vit import sharding
from memory_vit.checkpoints import Checkpoints
from memory_vit.errors import TrainingError
from memory_vit.progress import Progress
from memory_vit.step import Step, TrainState

logger = logging.getLogger("memory_vit")


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


def fit(
  step_fn: Step,
  state: TrainState,
  frozen: Any,
  batches: Iterator[dict[str, np.ndarray]],
  *,
  name: str,
  steps: Steps,
  batch_size: int,
  mesh: Mesh,
  schedules: dict[str, optax.Schedule],
  validate: Callable[[Any], dict[str, dict[str, Any]]] | None = None,
  checkpoints: Checkpoints | None = None,
  meta: Mapping[str, Any] = types.MappingProxyType({}),
  logdir: Path | None = None,
) -> tuple[TrainState, float]:
  """Trains from the step of `state` to `steps.total`.

  Args:
    step_fn: one step.
    state: where to begin; is used up.
    frozen: what the regime reads and does not train.
    batches: the rows of this process, from the example at which `state` stands.
    name: of the run, for the progress line.
    steps: how long, and how often what.
    batch_size: of all processes together.
    mesh: over which batches are split.
    schedules: learning rate of every name, to be shown.
    validate: params -> {name: `evaluate.evaluate`}; the mean "top1" over the
      names decides which state is the best.
    checkpoints: where states are saved; None saves none.
    meta: what is saved beside every state, and "examples_seen".
    logdir: of TensorBoard events; None writes none.

  Returns:
    The last state, and the training pictures per second.

  Raises:
    TrainingError: where a loss or a gradient is not finite. Nothing is saved
      after the step at which that happened.
  """
  first = int(state.step)
  watch = _Watch(first, name, checkpoints)
  progress = Progress(name, first, steps.total, batch_size)
  writer = _writer(logdir)
  hooks = _profiler(logdir, steps.profile_at)
  batches = sharding.prefetch(batches, mesh)
  for step in range(first + 1, steps.total + 1):
    state, metrics = step_fn(state, frozen, next(batches))
    watch.add(metrics)
    progress.advance()
    for hook in hooks:
      hook(step)
    if step == first + 1 or steps.due(step, steps.log):
      _log(step, watch.check(), schedules, progress, writer)
    evaluates = steps.due(step, steps.evaluate)
    if evaluates or steps.due(step, steps.checkpoint):
      watch.check()  # nothing that is not finite is ever saved
      progress.pause()
      accuracy = _validate(step, state, validate, writer) if evaluates else None
      if checkpoints:
        seen = {"examples_seen": step * batch_size}
        checkpoints.save(step, state, {**meta, **seen}, accuracy)
      progress.resume()
  progress.pause()
  progress.close()
  writer.close()
  return state, progress.images_per_second


class _Watch:
  """Keeps the metrics of the last steps, and stops a run that is lost.

  They are looked at now and then only: to look at every step would make the
  host wait for the device at every step.
  """

  def __init__(
    self, step: int, name: str, checkpoints: Checkpoints | None
  ) -> None:
    self._step, self._name, self._checkpoints = step, name, checkpoints
    self._kept: list[Any] = []
    self._last: dict[str, dict[str, float]] = {}

  def add(self, metrics: Any) -> None:
    """Keeps the metrics of the next step, on the device."""
    self._kept.append(metrics)

  def check(self) -> dict[str, dict[str, float]]:
    """Returns the metrics of the last step; raises where one is not finite."""
    for metrics in jax.device_get(self._kept):
      self._step += 1
      self._last = jax.tree.map(float, metrics)
      for task, values in self._last.items():
        if not np.isfinite(list(values.values())).all():
          raise TrainingError(self._message(task, values))
    self._kept = []
    return self._last

  def _message(self, task: str, values: dict[str, float]) -> str:
    saved = self._checkpoints.latest() if self._checkpoints else None
    shown = ", ".join(f"{key} {value}" for key, value in values.items())
    return (
      f"training of {self._name!r} stopped at step {self._step}: a value of "
      f"{task!r} is not finite ({shown}). The last saved step is {saved}, and "
      "is as it was. Try a lower learning_rate or a longer optim.warmup, and "
      "look for broken pictures in the data."
    )


def _log(
  step: int,
  metrics: dict[str, dict[str, float]],
  schedules: dict[str, optax.Schedule],
  progress: Progress,
  writer: metric_writers.MetricWriter,
) -> None:
  """Shows the metrics of a step, and writes them for TensorBoard."""
  scalars = {"images_per_second": progress.images_per_second}
  for name, values in metrics.items():
    rate = float(schedules[name](step - 1))
    scalars |= {f"{name}/train/{key}": v for key, v in values.items()}
    scalars[f"{name}/learning_rate"] = rate
    prefix = f"{name}/" if len(metrics) > 1 else ""
    progress.report(
      {
        f"{prefix}loss": values["loss"],
        f"{prefix}accuracy": values["accuracy"],
        "lr": rate,
      }
    )
  writer.write_scalars(step, scalars)


def _validate(
  step: int,
  state: TrainState,
  validate: Callable[[Any], dict[str, dict[str, Any]]] | None,
  writer: metric_writers.MetricWriter,
) -> float | None:
  """Evaluates a state; its mean accuracy, or None without a validation set."""
  if validate is None:
    return None
  results = validate(state.params)
  for name, result in results.items():
    shown = {key: result[key] for key in ("loss", "top1", "top5")}
    logger.info(
      "%s step %d  validation of %d: loss %.4f  top-1 %.4f  top-5 %.4f",
      name, step, result["examples"], *shown.values(),
    )  # fmt: skip
    writer.write_scalars(
      step, {f"{name}/validation/{key}": v for key, v in shown.items()}
    )
  writer.flush()
  return float(np.mean([result["top1"] for result in results.values()]))


def _writer(logdir: Path | None) -> metric_writers.MetricWriter:
  """TensorBoard events, by one process."""
  if logdir is None or jax.process_index() != 0:
    return metric_writers.MultiWriter([])
  return metric_writers.SummaryWriter(str(logdir))


def _profiler(logdir: Path | None, profile_at: int) -> list[Callable]:
  """A hook that profiles five steps from `profile_at` on, or nothing."""
  if logdir is None or not profile_at:
    return []
  hook = periodic_actions.Profile(
    logdir=logdir,
    num_profile_steps=5,
    profile_duration_ms=0,
    first_profile=profile_at,
    every_secs=None,
  )
  return [hook]
