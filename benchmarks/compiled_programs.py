"""The programs that are compiled for absent devices, as the package runs them.

Each is a function and the shapes of its arguments on the devices of a mesh. The
peers are what others run: the plain ViT as vit_jax writes it, and LoRA.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
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
from memory_vit.tasks import inference, split_forward
from memory_vit.train import step
from memory_vit.train.optim import make_optimizer, make_schedule

CLASSES, CELLS = 100, 5
# Programs that the package runs one after the other, and their sum.
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


@dataclasses.dataclass(frozen=True)
class Program:
  """A program before it is compiled.

  Attributes:
    name: in tables.
    function: the traced function; it may be jitted.
    arguments: their shapes, with shardings.
    is_ours: whether the package runs it; others are compared.
  """

  name: str
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  is_ours: bool = True


@dataclasses.dataclass(frozen=True)
class Target:
  """The model, and the devices for which its programs are compiled."""

  config: mv.ViTConfig  # its `platform` is that of the devices
  batch: int  # on all devices
  mesh: Mesh

  def on_all(self, tree: Any) -> Any:
    """Shapes of arrays as training lays them out; small ones everywhere."""
    return self._laid_out(tree, sharding.layout(tree, self.mesh))

  def by_rows(self, tree: Any) -> Any:
    """Shapes of arrays with a row for each image."""
    rows = sharding.by_rows(self.mesh)
    return self._laid_out(tree, jax.tree.map(lambda _: rows, tree))

  def _laid_out(self, tree: Any, layout: Any) -> Any:
    return jax.tree.map(
      lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
      tree,
      layout,
    )

  @property
  def images(self) -> jax.ShapeDtypeStruct:
    size = self.config.image_size
    shape = (self.batch, size, size, 3)
    return self.by_rows(jax.ShapeDtypeStruct(shape, "float32"))

  @property
  def labels(self) -> jax.ShapeDtypeStruct:
    return self.by_rows(jax.ShapeDtypeStruct((self.batch,), "int32"))

  @functools.cached_property
  def backbone(self) -> Any:
    """Shapes of the parameters, as loaded: kernels in the compute dtype."""
    shapes = backbone_shapes(self.config)
    made = jax.eval_shape(
      lambda p: rounded(mv.Backbone(self.config, p, "")).params, shapes
    )
    return self.on_all(made)


def programs(target: Target) -> Iterator[Program]:
  """All programs of the tables."""
  yield from _forward(target)
  yield from _reading(target)
  yield from _training(target, (1, 20))
  yield from _training(target, (1,), regime="side_masked")
  yield from _training(target, (1,), regime="probe")
  yield from _full_finetuning(target)
  yield from _fused(target)
  yield from _masked_sequence(target)
  yield from plain_peers_of(target)


def _forward(target: Target) -> Iterator[Program]:
  arguments = target.backbone, target.images
  yield Program("plain", _with(inference.plain_program, target), arguments)
  yield Program("encode", _with(inference.encode_program, target), arguments)


def _with(program: Any, target: Target) -> Callable[..., Any]:
  """The function of an `ImageProgram`."""
  return functools.partial(program.__wrapped__, config=target.config)


def context_of(target: Target) -> Any:
  encode = _with(inference.encode_program, target)
  _, context = jax.eval_shape(encode, target.backbone, target.images)
  return target.by_rows(context)


def _reading(target: Target) -> Iterator[Program]:
  context = context_of(target)
  for counts, regime in (
    ((1, 4, 16, 64), "memory_masked"), ((1, 16), "side_masked"),
  ):  # fmt: skip
    for count in counts:
      slots = target.on_all(_slots(target, count, regime))
      yield Program(
        _named(f"read {count}", regime),
        functools.partial(inference.read_program, config=target.config),
        (target.backbone, slots, context),
      )


def _named(name: str, regime: str) -> str:
  words = {"side_masked": "side stream", "probe": "probe"}
  return f"{name}, {words[regime]}" if regime in words else name


@functools.lru_cache(maxsize=1)
def _backbone(config: mv.ViTConfig) -> mv.Backbone:
  """Weights of zero, from which slots are made on the CPU."""
  params = jax.tree.map(
    lambda a: np.zeros(a.shape, a.dtype), backbone_shapes(config)
  )
  return mv.Backbone(config, params, "benchmark")


def _tasks(config: mv.ViTConfig, count: int, regime: str) -> list[mv.Task]:
  on_cpu = dataclasses.replace(config, platform="", dtype="float32")
  task = mv.init_task(
    jax.random.key(0), _backbone(on_cpu), name="t", num_classes=CLASSES,
    regime=regime, cells=CELLS if regime == "memory_masked" else None,
    bottleneck=16 if regime == "probe" else 0,
  )  # fmt: skip
  return [
    mv.Task(dataclasses.replace(task.spec, name=f"t{i}"), task.params)
    for i in range(count)
  ]


def _slots(target: Target, count: int, regime: str) -> Any:
  config = target.config
  on_cpu = dataclasses.replace(config, platform="")
  backbone = _backbone(dataclasses.replace(on_cpu, dtype="float32"))
  backbone = rounded(dataclasses.replace(backbone, config=on_cpu))
  return mv.fill_slots(backbone, _tasks(config, count, regime)).arrays


def _step_of(
  target: Target, count: int, regime: str, make_pass: Any
) -> tuple[step.Step, Any, Any, Any]:
  """The step of some tasks, with the shapes of its arguments."""
  tasks = _tasks(target.config, count, regime)
  names = [task.name for task in tasks]
  config = OptimConfig()
  schedules = dict.fromkeys(names, make_schedule(config, 0.01, 1000))
  optimizer = make_optimizer(dict.fromkeys(names, config), schedules)
  cut = make_pass(target.config, tuple(task.spec for task in tasks))
  taken = step.Step(cut, optimizer, target.mesh, schedules=schedules)
  state = jax.eval_shape(
    lambda params: step.TrainState(
      jnp.int32(0), params, optimizer.init(params)
    ),
    {task.name: task.params for task in tasks},
  )
  frozen = {"backbone": target.backbone, "tasks": {}}
  return taken, target.on_all(state), frozen, cut


def _training(
  target: Target, counts: tuple[int, ...], regime: str = "memory_masked"
) -> Iterator[Program]:
  for count in counts:
    taken, state, frozen, cut = _step_of(
      target, count, regime, split_forward.make_split_forward
    )
    inputs = target.by_rows(jax.eval_shape(cut.prepare, frozen, target.images))
    if regime == "probe":
      yield Program("summarize", cut.prepare, (frozen, target.images))
    yield Program(
      _named(f"gradient {count}", regime),
      taken.gradient_program,
      (state.params, frozen, inputs, target.labels),
    )
    scalar = jax.ShapeDtypeStruct((), "float32")
    metrics = dict.fromkeys(state.params, {"loss": scalar, "accuracy": scalar})
    yield Program(
      _named(f"update {count}", regime),
      taken.update_program,
      (state, state.params, metrics, 1.0),
    )


def _full_finetuning(target: Target) -> Iterator[Program]:
  """The gradient of all weights, on the backbone's own head."""
  encode = _with(inference.plain_program, target)

  def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return _mean_loss(encode(params, images), labels)

  params = target.on_all(backbone_shapes(target.config))
  yield Program(
    "full fine-tuning, gradient", jax.grad(loss),
    (params, target.images, target.labels),
  )  # fmt: skip


def _mean_loss(logits: Any, labels: jax.Array) -> jax.Array:
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(losses)


def _fused(target: Target) -> Iterator[Program]:
  """One program in place of the package's two or three."""
  encode = _with(inference.encode_program, target)

  def forward(params: Any, slots: Any, images: jax.Array) -> Any:
    outputs, context = encode(params, images)
    read = inference.read_program(params, slots, context, config=target.config)
    return outputs, read

  slots = target.on_all(_slots(target, 1, "memory_masked"))
  yield Program(
    "forward 1, fused", forward, (target.backbone, slots, target.images),
    is_ours=False,
  )  # fmt: skip
  taken, state, frozen, cut = _step_of(
    target, 1, "memory_masked", split_forward.make_split_forward
  )
  yield _whole_step("gradient 1 from images, fused", target, taken, cut, state,
                    frozen)  # fmt: skip


def _whole_step(
  name: str, target: Target, taken: step.Step, cut: Any, state: Any, frozen: Any
) -> Program:
  def gradient(params: Any, frozen: Any, images: Any, labels: Any) -> Any:
    inputs = cut.prepare(frozen, images)
    return taken.gradient_program(params, frozen, inputs, labels)

  arguments = (state.params, frozen, target.images, target.labels)
  return Program(name, gradient, arguments, is_ours=False)


def _masked_sequence(target: Target) -> Iterator[Program]:
  """Tasks in the sequence of the backbone, as the paper's figures show it."""
  for count in (1, 16):
    tasks = _tasks(target.config, count, "memory_masked")
    specs = tuple(task.spec for task in tasks)
    params = target.on_all({task.name: task.params for task in tasks})
    yield Program(
      f"masked sequence, forward {count}",
      functools.partial(
        masked_sequence.forward, config=target.config, specs=specs
      ),
      (target.backbone, params, target.images),
      is_ours=False,
    )
  taken, state, frozen, cut = _step_of(
    target, 1, "memory_masked", masked_sequence.masked_sequence_pass
  )
  yield _whole_step("masked sequence, gradient 1", target, taken, cut, state,
                    frozen)  # fmt: skip


def plain_peers_of(target: Target) -> Iterator[Program]:
  """What others run: vit_jax's plain ViT, and LoRA of rank 8."""
  model = plain_peers.PlainViT(target.config, CLASSES)
  made = jax.eval_shape(model.init, jax.random.key(0), target.images)["params"]
  params = target.on_all(
    jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, target.config.dtype), made
    )
  )
  yield Program(
    "vit_jax, plain",
    lambda p, x: model.apply({"params": p}, x),
    (params, target.images),
    is_ours=False,
  )
  lora = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, "float32"),
    jax.eval_shape(functools.partial(plain_peers.init_lora, model), made),
  )

  def loss(lora: Any, frozen: Any, images: Any, labels: Any) -> jax.Array:
    params = plain_peers.with_lora(frozen, lora)
    return _mean_loss(model.apply({"params": params}, images), labels)

  yield Program(
    "LoRA 8, gradient",
    jax.grad(loss),
    (target.on_all(lora), params, target.images, target.labels),
    is_ours=False,
  )
