"""The programs that are compiled for absent devices, as the package runs them.

Beside them what others run: one program in place of our two or three, tasks in
one masked sequence, the plain ViT as vit_jax writes it, and LoRA.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import memory_vit as mv
from benchmarks import masked_sequence, plain_peers
from memory_vit.config import OptimConfig
from memory_vit.model.backbone import backbone_shapes, rounded
from memory_vit.runtime import sharding
from memory_vit.tasks import inference
from memory_vit.tasks.split_forward import make_split_forward
from memory_vit.train import step
from memory_vit.train.optim import make_optimizer, make_schedule

CLASSES, CELLS, BOTTLENECK = 100, 5, 16
_WORDS = {"memory_masked": "", "side_masked": ", side stream",
          "probe": ", probe"}  # fmt: skip
# What the package runs one after the other.
SUMS = {
  "infer 1": ("encode", "read 1"),
  "infer 16": ("encode", "read 16"),
  "infer 1, side stream": ("encode", "read 1, side stream"),
  "train 1": ("encode", "gradient 1", "update 1"),
  "train 20": ("encode", "gradient 20", "update 20"),
  "train 1, side stream": (
    "encode", "gradient 1, side stream", "update 1, side stream",
  ),
}  # fmt: skip


def sums(rows: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
  """(label, parts) of each of `SUMS` whose parts are among these rows."""
  for name, parts in SUMS.items():
    if all(part in rows for part in parts):
      yield f"**{name}** ({' + '.join(parts)})", parts


# A function and the shapes of its arguments.
Traceable = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that is not traced yet; `is_ours` if the package runs it."""

  build: Callable[[], Traceable]
  is_ours: bool = True

  def lower(self) -> jax.stages.Lowered:
    function, arguments = self.build()
    return jax.jit(function).lower(*arguments)


@dataclasses.dataclass(frozen=True)
class Target:
  """The model, and the devices for which its programs are compiled."""

  config: mv.ViTConfig  # its `platform` is that of the devices
  batch: int  # on all devices
  mesh: Mesh

  def on_all(self, tree: Any) -> Any:
    """Shapes of arrays as training lays them out."""
    return sharding.shapes(tree, self.mesh)

  def by_rows(self, tree: Any) -> Any:
    """Shapes of arrays with a row for each image."""
    rows = sharding.by_rows(self.mesh)
    return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), tree
    )

  @property
  def images(self) -> Any:
    size = self.config.image_size
    shape = (self.batch, size, size, 3)
    return self.by_rows(jax.ShapeDtypeStruct(shape, "float32"))

  @property
  def labels(self) -> Any:
    return self.by_rows(jax.ShapeDtypeStruct((self.batch,), "int32"))

  @functools.cached_property
  def backbone(self) -> Any:
    """Shapes of its parameters, as loaded: kernels in the compute dtype."""
    made = jax.eval_shape(
      lambda p: rounded(mv.Backbone(self.config, p, "")).params,
      backbone_shapes(self.config),
    )
    return self.on_all({"backbone": made})["backbone"]

  @functools.cached_property
  def context(self) -> Any:
    encode = _with(inference.encode_program, self)
    return self.by_rows(jax.eval_shape(encode, self.backbone, self.images)[1])


def programs(target: Target) -> dict[str, Program]:
  """All programs of the tables, by their names."""
  found = {
    "plain": _ours(_plain, target),
    "encode": _ours(_encode, target),
    **{f"read {n}": _ours(_read, target, n) for n in (1, 4, 16, 64)},
    **{
      f"read {n}, side stream": _ours(_read, target, n, "side_masked")
      for n in (1, 16)
    },
  }
  for count, regime in (
    (1, "memory_masked"), (20, "memory_masked"), (1, "side_masked"),
    (1, "probe"),
  ):  # fmt: skip
    words = f"{count}{_WORDS[regime]}"
    found[f"gradient {words}"] = _ours(_gradient, target, count, regime)
    found[f"update {words}"] = _ours(_update, target, count, regime)
  return {
    **found,
    "summarize": _ours(_summarize, target),
    "full fine-tuning, gradient": _ours(_full_fine_tuning, target),
    "forward 1, fused": _other(_fused_forward, target),
    "gradient 1 from images, fused": _other(
      _gradient_from_images, target, make_split_forward
    ),
    "masked sequence, forward 1": _other(_masked_forward, target, 1),
    "masked sequence, forward 16": _other(_masked_forward, target, 16),
    "masked sequence, gradient 1": _other(
      _gradient_from_images, target, masked_sequence.masked_sequence_pass
    ),
    "vit_jax, plain": _other(_vit_jax, target),
    "LoRA 8, gradient": _other(_lora, target),
  }


def _ours(build: Callable[..., Traceable], *arguments: Any) -> Program:
  return Program(functools.partial(build, *arguments))


def _other(build: Callable[..., Traceable], *arguments: Any) -> Program:
  return Program(functools.partial(build, *arguments), is_ours=False)


def _with(program: Any, target: Target) -> Callable[..., Any]:
  """The function of an `ImageProgram`."""
  return functools.partial(program.__wrapped__, config=target.config)


def _plain(target: Target) -> Traceable:
  program = _with(inference.plain_program, target)
  return program, (target.backbone, target.images)


def _encode(target: Target) -> Traceable:
  program = _with(inference.encode_program, target)
  return program, (target.backbone, target.images)


def _summarize(target: Target) -> Traceable:
  """The frozen pass of a probe."""
  program = _with(inference.summary_program, target)
  return program, (target.backbone, target.images)


def _read(
  target: Target, count: int, regime: str = "memory_masked"
) -> Traceable:
  program = functools.partial(inference.read_program, config=target.config)
  return program, (target.backbone, _slots(target, count, regime),
                   target.context)  # fmt: skip


@functools.lru_cache(maxsize=2)
def _zeros(config: mv.ViTConfig) -> mv.Backbone:
  """A backbone on the CPU, for tasks and slots."""
  params = jax.tree.map(
    lambda a: np.zeros(a.shape, a.dtype), backbone_shapes(config)
  )
  return mv.Backbone(config, params, "benchmark")


def tasks(config: mv.ViTConfig, count: int, regime: str) -> list[mv.Task]:
  """Tasks that do not attend to each other."""
  on_cpu = dataclasses.replace(config, platform="", dtype="float32")
  task = mv.init_task(
    jax.random.key(0), _zeros(on_cpu), name="t", num_classes=CLASSES,
    regime=regime, cells=CELLS if regime == "memory_masked" else None,
    bottleneck=BOTTLENECK if regime == "probe" else 0,
  )  # fmt: skip
  return [
    mv.Task(dataclasses.replace(task.spec, name=f"t{i}"), task.params)
    for i in range(count)
  ]


def _slots(target: Target, count: int, regime: str) -> Any:
  on_cpu = dataclasses.replace(target.config, platform="")
  backbone = rounded(_zeros(on_cpu))
  slots = mv.fill_slots(backbone, tasks(target.config, count, regime))
  return target.on_all(slots.arrays)


def step_of(
  target: Target,
  count: int,
  regime: str = "memory_masked",
  make_pass: Any = make_split_forward,
) -> tuple[step.Step, Any, Any]:
  """The step of some tasks; shapes of its state, and of what is frozen."""
  made = tasks(target.config, count, regime)
  names, config = [task.name for task in made], OptimConfig()
  schedules = dict.fromkeys(names, make_schedule(config, 0.01, 1000))
  optimizer = make_optimizer(dict.fromkeys(names, config), schedules)
  cut = make_pass(target.config, tuple(task.spec for task in made))
  taken = step.Step(cut, optimizer, target.mesh, schedules=schedules)
  state = jax.eval_shape(
    lambda params: step.TrainState(
      jnp.int32(0), params, optimizer.init(params)
    ),
    {task.name: task.params for task in made},
  )
  frozen = {"backbone": target.backbone, "tasks": {}}
  return taken, target.on_all(state), frozen


def _gradient(target: Target, count: int, regime: str) -> Traceable:
  """The gradient on contexts, or on what a probe reads."""
  taken, state, frozen = step_of(target, count, regime)
  inputs = jax.eval_shape(taken.prepare, frozen, target.images)
  arguments = (state.params, frozen, target.by_rows(inputs), target.labels)
  return taken.gradient_program, arguments


def _update(target: Target, count: int, regime: str) -> Traceable:
  taken, state, _ = step_of(target, count, regime)
  scalar = jax.ShapeDtypeStruct((), "float32")
  metrics = dict.fromkeys(state.params, {"loss": scalar, "accuracy": scalar})
  return taken.update_program, (state, state.params, metrics, 1.0)


def _gradient_from_images(target: Target, make_pass: Any) -> Traceable:
  taken, state, frozen = step_of(target, 1, "memory_masked", make_pass)

  def gradient(params: Any, frozen: Any, images: Any, labels: Any) -> Any:
    inputs = taken.prepare(frozen, images)
    return taken.gradient_program(params, frozen, inputs, labels)

  return gradient, (state.params, frozen, target.images, target.labels)


def _full_fine_tuning(target: Target) -> Traceable:
  """The gradient of all weights, on the backbone's own head."""
  plain = _with(inference.plain_program, target)

  def loss(params: Any, images: Any, labels: Any) -> jax.Array:
    return _mean_loss(plain(params, images), labels)

  params = target.on_all({"backbone": backbone_shapes(target.config)})
  return jax.grad(loss), (params["backbone"], target.images, target.labels)


def _mean_loss(logits: Any, labels: Any) -> jax.Array:
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(losses)


def _fused_forward(target: Target) -> Traceable:
  encode = _with(inference.encode_program, target)

  def forward(params: Any, slots: Any, images: Any) -> Any:
    outputs, context = encode(params, images)
    config = target.config
    return outputs, inference.read_program(
      params, slots, context, config=config
    )

  slots = _slots(target, 1, "memory_masked")
  return forward, (target.backbone, slots, target.images)


def _masked_forward(target: Target, count: int) -> Traceable:
  """Tasks in the sequence of the backbone, as the paper's figures show it."""
  made = tasks(target.config, count, "memory_masked")
  program = functools.partial(
    masked_sequence.forward,
    config=target.config,
    specs=tuple(task.spec for task in made),
  )
  params = target.on_all({task.name: task.params for task in made})
  return program, (target.backbone, params, target.images)


def _vit_jax(target: Target) -> Traceable:
  model = plain_peers.PlainViT(target.config, CLASSES)

  def plain(params: Any, images: Any) -> Any:
    return model.apply({"params": params}, images)

  return plain, (_peer_params(target, model), target.images)


def _peer_params(target: Target, model: plain_peers.PlainViT) -> Any:
  made = jax.eval_shape(model.init, jax.random.key(0), target.images)["params"]
  dtype = target.config.dtype
  return target.on_all(
    jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), made)
  )


def _lora(target: Target) -> Traceable:
  model = plain_peers.PlainViT(target.config, CLASSES)
  frozen = _peer_params(target, model)
  init = functools.partial(plain_peers.init_lora, model)
  trained = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, "float32"),
    jax.eval_shape(init, frozen),
  )

  def loss(trained: Any, frozen: Any, images: Any, labels: Any) -> jax.Array:
    params = plain_peers.with_lora(frozen, trained)
    return _mean_loss(model.apply({"params": params}, images), labels)

  arguments = (target.on_all(trained), frozen, target.images, target.labels)
  return jax.grad(loss), arguments
