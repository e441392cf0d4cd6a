"""One optimizer step, and compiled steps that runs of one process share."""

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from memory_vit.config import OptimConfig
from memory_vit.data.batch import inputs_of
from memory_vit.kinds.kind import HeadOutputs
from memory_vit.model import trees
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import live_memory, sharding
from memory_vit.runtime.compilation import Unnamed
from memory_vit.tasks.split_forward import SplitForward, make_split_forward
from memory_vit.train import optim
from memory_vit.train.loss import HeadLoss
from memory_vit.train.mix import Mixup, mix

logger = logging.getLogger(__name__)

# Maximum number of cached `Step` objects: more than are in use at one time.
_SHARED = 32
# Function that returns the bytes of a traced program's temporary arrays. The
# second argument is a function from a value to its bytes on one device.
Temporary = Callable[[Any, Callable[[Any], int]], int]


@flax.struct.dataclass
class TrainState:
  """Training state: number of finished steps, parameters and optimizer state.

  `params` is {task name: trained parameters}, without anything frozen.
  """

  step: jax.Array
  params: Any
  opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
  """Memory of a step on a device, in bytes, without state and backbone.

  Attributes:
    batches: the batch in use, and prefetched batches.
    contexts: outputs of the frozen pass.
    temporary: temporary arrays of the program that needs the most memory.
  """

  batches: int
  contexts: int
  temporary: int

  @property
  def total(self) -> int:
    return self.batches + self.contexts + self.temporary


class Step:
  """One optimizer step on a batch, in three programs.

  The programs are `SplitForward.prepare` (the frozen pass), the gradient, and
  the update. With `accumulation_steps`, the first two run once for each part of
  a batch; with `mixup`, the batch is mixed before that.
  """

  def __init__(
    self,
    forward: SplitForward,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    losses: Mapping[str, HeadLoss] = types.MappingProxyType({}),
    schedules: Mapping[str, optax.Schedule] = types.MappingProxyType({}),
    mixup: Mixup | None = None,
    accumulation_steps: int = 1,
  ) -> None:
    """Build the programs; nothing is compiled yet.

    `schedules` are the learning rates of the optimizer, reported as metrics.
    """
    self.prepare, self._mesh = forward.prepare, mesh
    self.optimizer, self.schedules = optimizer, schedules
    self._parts = accumulation_steps
    self._is_compiled = False
    loss = functools.partial(_loss, forward, losses)
    # None: the programs themselves set the shardings of gradient and state.
    outputs = (None, sharding.replicated(mesh))
    self.gradient_program = jax.jit(
      functools.partial(_gradient, jax.grad(loss, has_aux=True), mesh),
      out_shardings=outputs,
    )
    self.update_program = jax.jit(
      functools.partial(_update, optimizer, schedules, mesh),
      donate_argnums=0,
      out_shardings=outputs,
    )
    self._create = jax.jit(functools.partial(_create, optimizer, mesh))
    self._mix = None
    if mixup:
      self._mix = jax.jit(
        functools.partial(mix, mixup=mixup),
        out_shardings=sharding.by_rows(mesh),
      )
    self._split = jax.jit(
      _split, static_argnums=(1, 2), out_shardings=sharding.by_rows(mesh)
    )

  def create_state(self, params: Any) -> TrainState:
    """Return the state at step 0, on the mesh as `sharding.layout` says."""
    state: TrainState = self._create(sharding.put(params, self._mesh)).tree
    return state

  def gradient(
    self, params: Any, frozen: Any, batch: dict[str, Any]
  ) -> tuple[Any, dict[str, dict[str, jax.Array]]]:
    """Return the gradient of each task's mean loss, and each task's metrics."""
    prepare = functools.partial(self.prepare, frozen)
    inputs = inputs_of(batch, prepare)
    results = self.gradient_program(params, frozen, inputs, batch["label"])
    gradient, metrics = (part.tree for part in results)
    return gradient, metrics

  def memory(
    self,
    params: Any,
    frozen: Any,
    batch: Mapping[str, Any],
    evaluated: int = 0,
    *,
    temporary: Temporary,
  ) -> StepMemory:
    """Estimate the device memory of a step, without state and backbone.

    `batch` is the batch of a whole step, with "inputs" if they are cached;
    `evaluated` is the number of images in an evaluation batch. `temporary` is
    called for the gradient and, without cached "inputs", for the frozen pass.
    """
    rows = sharding.by_rows(self._mesh)
    passed = batch
    if self._mix:
      passed = jax.eval_shape(self._mix, dict(batch), jnp.int32(0))

    def on_rows(a: Any, parts: int = 1) -> jax.ShapeDtypeStruct:
      shape = (a.shape[0] // parts, *a.shape[1:])
      return jax.ShapeDtypeStruct(shape, a.dtype, sharding=rows)

    part = jax.tree.map(lambda a: on_rows(a, self._parts), dict(passed))
    images = jax.tree.leaves(part)[0].shape[0]

    def on_a_device(aval: Any) -> int:
      size = live_memory.whole_bytes(aval)
      by_rows = size and images in aval.shape[:2]
      return size // self._mesh.size if by_rows else size

    programs: list[Any] = []

    def prepared(images: Any) -> Any:
      programs.append(jax.jit(self.prepare).trace(frozen, images))
      return jax.tree.map(on_rows, programs[0].out_info)

    inputs = inputs_of(part, prepared)
    trace = self.gradient_program.trace
    programs.append(trace(params, frozen, inputs, part["label"]))
    # An evaluation batch may have more images than an accumulation step.
    contexts = trees.bytes_of(inputs) * max(1.0, evaluated / images)
    return StepMemory(
      # Two batches are prefetched while a third batch is in use.
      batches=3 * trees.bytes_of(batch) // self._mesh.size,
      contexts=int(contexts / self._mesh.size),
      # The programs run one after the other, so the program that needs the most
      # temporary memory determines the maximum.
      temporary=max(temporary(program, on_a_device) for program in programs),
    )

  def __call__(
    self, state: TrainState, frozen: Any, batch: dict[str, Any]
  ) -> tuple[TrainState, dict[str, dict[str, jax.Array]]]:
    """Return (next state, {task: metrics}); `state` is donated.

    The metrics of a task are "loss", `HeadLoss.metric`, "grad_norm",
    "param_norm", "skipped" and "learning_rate". If loss, gradient or new
    parameters of a task are not finite, the task keeps its old parameters and
    optimizer state, and "skipped" is 1.
    """
    if not self._is_compiled:
      logger.info(
        "compiling a training step: up to a minute the first time, then cached"
      )
      self._is_compiled = True
    if self._mix:
      batch = self._mix(batch, state.step)

    def part(i: int) -> Any:
      rows = batch if self._parts == 1 else self._split(batch, self._parts, i)
      return self.gradient(state.params, frozen, rows)

    total = part(0)
    for i in range(1, self._parts):
      total = jax.tree.map(jnp.add, total, part(i))
    grads, metrics = total
    updated = self.update_program(state, grads, metrics, 1.0 / self._parts)
    state, metrics = (part.tree for part in updated)
    return state, metrics


def _create(
  optimizer: optax.GradientTransformation, mesh: Mesh, params: Any
) -> Unnamed:
  # Copy the parameters: the training loop donates its state, which would delete
  # the arrays of the caller.
  params = jax.tree.map(jnp.copy, params)
  state = TrainState(jnp.int32(0), params, optimizer.init(params))
  return Unnamed(sharding.constrain(state, mesh))


def _split(batch: dict[str, Any], parts: int, i: int) -> dict[str, Any]:
  """Return every `parts`-th row from row `i` on; no row changes its device."""
  return jax.tree.map(lambda rows: rows[i::parts], batch)


def _loss(
  forward: SplitForward,
  losses: Mapping[str, HeadLoss],
  params: Any,
  frozen: Any,
  inputs: Any,
  labels: Any,
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
  """Return (sum of the mean losses of all tasks, {task: metrics}).

  The loss of a task has no gradient for the parameters of other tasks, because
  a task treats the keys and values of tasks that it attends to as constants.
  """
  metrics = {}
  outputs = frozen.get("outputs", HeadOutputs())
  for name, logits in forward.logits(params, frozen, inputs).items():
    head = losses.get(name, HeadLoss())
    loss, metric = head.of_batch(logits, labels, outputs)
    metrics[name] = {"loss": loss, head.metric: metric}
  mean_losses = [values["loss"] for values in metrics.values()]
  return functools.reduce(jnp.add, mean_losses), metrics


def _gradient(
  loss_gradient: Any, mesh: Mesh, *args: Any
) -> tuple[Unnamed, Unnamed]:
  """Return (gradient, metrics); shard the gradient like the parameters."""
  grads, metrics = loss_gradient(*args)
  return Unnamed(sharding.constrain(grads, mesh)), Unnamed(metrics)


def _update(
  optimizer: optax.GradientTransformation,
  schedules: Mapping[str, optax.Schedule],
  mesh: Mesh,
  state: TrainState,
  grads: Any,
  metrics: dict[str, dict[str, jax.Array]],
  scale: float,
) -> tuple[Unnamed, Unnamed]:
  """Return (new state, metrics).

  `grads` and `metrics` are sums over the accumulation steps; multiplying the
  sums by `scale` gives means.
  """
  grads, metrics = jax.tree.map(lambda a: a * scale, (grads, metrics))
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  finite = {}
  for name, values in metrics.items():
    values["grad_norm"] = optax.tree.norm(grads[name])
    norms = (values["loss"], values["grad_norm"], optax.tree.norm(params[name]))
    finite[name] = jnp.isfinite(jnp.stack(norms)).all()
    params[name] = optim.where(finite[name], params[name], state.params[name])
    values["param_norm"] = optax.tree.norm(params[name])
    values["skipped"] = 1.0 - finite[name]
    if name in schedules:
      values["learning_rate"] = schedules[name](state.step)
  opt_state = optim.where_finite(finite, opt_state, state.opt_state)
  state = TrainState(state.step + 1, params, opt_state)
  return Unnamed(sharding.constrain(state, mesh)), Unnamed(metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """Key of a shared step: everything its programs depend on, except arrays."""

  backbone: ViTConfig
  specs: tuple[TaskSpec, ...]  # each from `TaskSpec.for_programs`
  # (name, options, learning rate) of each trained task.
  optimizers: tuple[tuple[str, OptimConfig, float], ...]
  losses: tuple[tuple[str, HeadLoss], ...]
  total_steps: int
  mixup: Mixup | None
  accumulation_steps: int
  mesh: Mesh


@functools.lru_cache(_SHARED)
def shared_step(plan: StepPlan) -> Step:
  """Build the step of a plan once, so that later runs compile nothing."""
  options = {name: config for name, config, _ in plan.optimizers}
  schedules = {
    name: optim.make_schedule(config, rate, plan.total_steps)
    for name, config, rate in plan.optimizers
  }
  return Step(
    make_split_forward(plan.backbone, plan.specs),
    optim.make_optimizer(options, schedules),
    plan.mesh,
    losses=dict(plan.losses),
    schedules=schedules,
    mixup=plan.mixup,
    accumulation_steps=plan.accumulation_steps,
  )
