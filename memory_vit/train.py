"""The training loop: state, step, fit. It knows regimes, not models."""

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metric_writers, periodic_actions
from jax.sharding import Mesh

from memory_vit import sharding
from memory_vit.checkpoints import Checkpoints
from memory_vit.errors import TrainingError
from memory_vit.progress import Progress
from memory_vit.regimes import Regime

logger = logging.getLogger("memory_vit")


@flax.struct.dataclass
class TrainState:
  """All that changes in training.

  Attributes:
    step: int32 (), steps done.
    params: {name: trained parameters}; nothing frozen is in here.
    opt_state: of the optimiser, for `params` alone.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def create_state(
  params: Any, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
  """A state at step 0, on every device of the mesh."""
  # A copy: the loop donates its state, and the caller keeps what it passed in.
  params = jax.tree.map(jnp.array, params)
  state = TrainState(jnp.int32(0), params, optimizer.init(params))
  return jax.device_put(state, sharding.replicated(mesh))


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


class Step:
  """One optimiser step on a batch, in three programs.

  The regime's `prepare` (everything frozen), the gradient (everything trained),
  and the update. A batch may pass the first two in parts.
  """

  def __init__(
    self,
    regime: Regime,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    label_smoothing: float = 0.0,
    accumulation_steps: int = 1,
  ) -> None:
    self._prepare = regime.prepare
    self._parts = accumulation_steps
    loss = functools.partial(_loss, regime, label_smoothing)
    on_all = sharding.replicated(mesh)
    self._gradient = jax.jit(jax.grad(loss, has_aux=True), out_shardings=on_all)
    self._update = jax.jit(
      functools.partial(_update, optimizer),
      donate_argnums=0,
      out_shardings=on_all,
    )
    self._split = jax.jit(
      _split, static_argnums=(1, 2), out_shardings=sharding.by_rows(mesh)
    )

  def gradient(
    self, params: Any, frozen: Any, batch: dict[str, jax.Array]
  ) -> tuple[Any, dict[str, dict[str, jax.Array]]]:
    """The gradient of the mean loss of every name, and its metrics."""
    inputs = self._prepare(frozen, batch["image"])
    return self._gradient(params, frozen, inputs, batch["label"])

  def __call__(
    self, state: TrainState, frozen: Any, batch: dict[str, jax.Array]
  ) -> tuple[TrainState, dict[str, dict[str, jax.Array]]]:
    """Takes one step.

    Args:
      state: is used up (donated).
      frozen: what the regime reads and does not train.
      batch: "image" (b, s, s, 3), "label" int (b,).

    Returns:
      The next state, and {name: {"loss", "accuracy", "grad_norm",
      "param_norm"}}, float32 ().
    """
    total = None
    for i in range(self._parts):
      part = batch if self._parts == 1 else self._split(batch, self._parts, i)
      new = self.gradient(state.params, frozen, part)
      total = new if total is None else jax.tree.map(jnp.add, total, new)
    grads, metrics = total
    return self._update(state, grads, metrics, 1.0 / self._parts)


def _split(batch: dict[str, jax.Array], parts: int, i: int) -> dict:
  """Every `parts`-th row, from row i: each device keeps rows of its own."""
  return {name: rows[i::parts] for name, rows in batch.items()}


def _loss(
  regime: Regime,
  label_smoothing: float,
  params: Any,
  frozen: Any,
  inputs: Any,
  labels: jax.Array,
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
  """The sum over names of the mean loss; no name enters another's gradient."""
  metrics = {}
  for name, logits in regime.logits(params, frozen, inputs).items():
    targets = optax.smooth_labels(
      jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing
    )
    loss = optax.softmax_cross_entropy(logits, targets).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    metrics[name] = {"loss": loss, "accuracy": accuracy}
  return sum(m["loss"] for m in metrics.values()), metrics


def _update(
  optimizer: optax.GradientTransformation,
  state: TrainState,
  grads: Any,
  metrics: dict[str, dict[str, jax.Array]],
  scale: float,
) -> tuple[TrainState, dict[str, dict[str, jax.Array]]]:
  """Applies the mean gradient; `scale` is one over the number of parts."""
  grads, metrics = jax.tree.map(lambda a: a * scale, (grads, metrics))
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  for name in metrics:
    metrics[name]["grad_norm"] = optax.global_norm(grads[name])
    metrics[name]["param_norm"] = optax.global_norm(params[name])
  return TrainState(state.step + 1, params, opt_state), metrics


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
