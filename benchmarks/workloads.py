"""The measured programs, each a function without arguments."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks import masked_sequence
from memory_vit.cache.rows import DeviceRows, HostRows, RowLayout
from memory_vit.config import OptimConfig
from memory_vit.model.backbone import backbone_shapes, rounded
from memory_vit.model.products import einsum
from memory_vit.runtime import sharding
from memory_vit.runtime.dtypes import Precision
from memory_vit.tasks import split_forward
from memory_vit.tasks.inference import encode_program, plain_program
from memory_vit.tasks.split_forward import SplitForward
from memory_vit.train import step
from memory_vit.train.optim import make_optimizer, make_schedule


@dataclasses.dataclass(frozen=True)
class Setting:
  """Model with 1,000 classes, images, and a task that all tasks equal."""

  backbone: mv.Backbone
  task: mv.Task
  images: jax.Array
  labels: jax.Array


def make_setting(
  variant: str,
  image_size: int,
  dtype: str,
  batch: int,
  cells: int,
  classes: int,
) -> Setting:
  """Generate everything in numpy, so the device holds nothing else."""
  config = mv.vit_config(
    variant, image_size=image_size, num_classes=1000, dtype=dtype
  )
  rng = np.random.default_rng(0)
  params = jax.tree_util.tree_map_with_path(
    functools.partial(_random, rng), backbone_shapes(config)
  )
  shape = (batch, image_size, image_size, 3)
  images = np.clip(rng.standard_normal(shape, dtype=np.float32) / 3, -1, 1)
  backbone = rounded(mv.Backbone(config, params, "benchmark"))
  task = mv.init_task(
    jax.random.key(0), backbone, name="t", num_classes=classes, cells=cells
  )
  labels = np.arange(batch) % classes
  return Setting(backbone, task, *jax.device_put((images, labels)))


def _random(rng: np.random.Generator, path: Any, leaf: Any) -> jax.Array:
  scale = 1.0 if path[-1].key == "scale" else 0.0
  values = rng.standard_normal(leaf.shape, dtype=np.float32)
  return jax.device_put(scale + np.float32(0.02) * values)


def make_tasks(setting: Setting, count: int) -> list[mv.Task]:
  """Tasks that do not attend to each other."""
  task = setting.task
  return [
    mv.Task(dataclasses.replace(task.spec, name=f"t{i}"), task.params)
    for i in range(count)
  ]


def with_regime(setting: Setting, regime: str) -> Setting:
  """Replace the task by one of a regime without memory cells."""
  task = mv.init_task(
    jax.random.key(0), setting.backbone, name="t", regime=regime,
    num_classes=setting.task.spec.num_classes,
  )  # fmt: skip
  return dataclasses.replace(setting, task=task)


def plain(setting: Setting) -> jax.Array:
  """One forward pass of the plain ViT, the unit of all measurements."""
  return _plain(setting.backbone, setting.images)


def _plain(backbone: mv.Backbone, images: jax.Array) -> jax.Array:
  return plain_program(backbone.for_programs, images, config=backbone.config)


def plain_in(setting: Setting, dtype: str) -> Callable[[], Any]:
  """One forward pass of the plain ViT in a compute dtype of its own."""
  config = dataclasses.replace(setting.backbone.config, dtype=dtype)
  backbone = rounded(mv.Backbone(config, _in_float32(setting), "benchmark"))
  return lambda: _plain(backbone, setting.images)


def _in_float32(setting: Setting) -> Any:
  """The parameters of the backbone, with kernels in float32."""
  return jax.tree.map(lambda a: a.astype("float32"), setting.backbone.params)


def encoding(setting: Setting) -> Callable[[], Any]:
  """The plain ViT with its context, to which tasks attend."""
  return lambda: mv.encode(setting.backbone, setting.images)


def inference(setting: Setting, count: int) -> Callable[[], Any]:
  """The original model and `count` tasks on a batch, as served."""
  slots = mv.fill_slots(setting.backbone, make_tasks(setting, count))
  return lambda: mv.forward(setting.backbone, slots, setting.images)


def cached_inference(setting: Setting, count: int) -> Callable[[], Any]:
  """`count` tasks on a context that was computed before."""
  slots = mv.fill_slots(setting.backbone, make_tasks(setting, count))
  _, context = mv.encode(setting.backbone, setting.images)
  return lambda: mv.read(setting.backbone, slots, context)


def masked_inference(setting: Setting, count: int) -> Callable[[], Any]:
  """Inference in one sequence, which projects memory on every call."""
  tasks = make_tasks(setting, count)
  program = functools.partial(
    masked_sequence.forward_program,
    config=setting.backbone.config,
    specs=tuple(task.spec for task in tasks),
  )
  params = {task.spec.name: task.params for task in tasks}
  return lambda: program(setting.backbone.params, params, setting.images)


class Training:
  """A training loop that takes a step each time it is called."""

  def __init__(
    self,
    cut: SplitForward,
    params: Any,
    frozen: Any,
    setting: Setting,
  ) -> None:
    config, mesh = OptimConfig(), sharding.make_mesh(jax.devices()[:1])
    schedule = make_schedule(config, 0.01, 1000)
    optimizer = make_optimizer(
      dict.fromkeys(params, config), dict.fromkeys(params, schedule)
    )
    self._step = step.Step(cut, optimizer, mesh)
    self._frozen = frozen
    self._batch = {"image": setting.images, "label": setting.labels}
    self.state = self._step.create_state(params)

  def __call__(self) -> Any:
    """Take a step; its result is ready when the step is done."""
    self.state, metrics = self._step(self.state, self._frozen, self._batch)
    return metrics


def training(setting: Setting, count: int) -> Training:
  """Train `count` tasks at once, as the package does."""
  return _task_training(split_forward.make_split_forward, setting, count)


class CachedTraining(Training):
  """`Training` on cached contexts, with random rows in every step."""

  def __init__(
    self,
    cut: SplitForward,
    params: Any,
    frozen: Any,
    setting: Setting,
    where: str,
  ) -> None:
    super().__init__(cut, params, frozen, setting)
    mesh, size = sharding.make_mesh(jax.devices()[:1]), len(setting.images)
    context = cut.prepare(frozen, setting.images)
    # More than a batch, so that rows are scattered.
    places = range(0, 4 * size, size)
    layout = RowLayout.of(context, "float32", np.dtype(np.int32))
    kind = DeviceRows if where == "device" else HostRows
    self._rows = kind(layout, 4 * size, mesh, places)
    labels = np.asarray(setting.labels)
    for start in places:
      self._rows.put(start, context, {"label": labels, "mask": labels})
    self._order, self._size = np.random.default_rng(0), size

  def __call__(self) -> Any:
    """Fetch the rows of a batch, and take a step."""
    drawn = self._order.permutation(len(self._rows.labels))[: self._size]
    self._batch = {
      "inputs": self._rows.take(drawn),
      "label": jax.device_put(self._rows.labels[drawn]),
    }
    return super().__call__()


def cached_training(setting: Setting, count: int, where: str) -> Training:
  """Train `count` tasks at once on cached contexts; includes fetching."""
  params, frozen, cut = _tasks(split_forward.make_split_forward, setting, count)
  return CachedTraining(cut, params, frozen, setting, where)


def masked_training(setting: Setting, count: int) -> Training:
  """Train in one sequence; only the forward pass differs."""
  return _task_training(masked_sequence.masked_sequence_pass, setting, count)


def _task_training(
  make_pass: Callable[..., SplitForward], setting: Setting, count: int
) -> Training:
  params, frozen, cut = _tasks(make_pass, setting, count)
  return Training(cut, params, frozen, setting)


def _tasks(
  make_pass: Callable[..., SplitForward], setting: Setting, count: int
) -> tuple[Any, Any, SplitForward]:
  """Trained parameters, frozen ones, and the pass between them."""
  tasks = make_tasks(setting, count)
  specs = tuple(task.spec for task in tasks)
  params = {task.spec.name: task.params for task in tasks}
  frozen = {"backbone": setting.backbone.params, "tasks": {}}
  return params, frozen, make_pass(setting.backbone.config, specs)


def full_finetuning(setting: Setting) -> Training:
  """Train all weights of the backbone, on its own head."""
  params = {"backbone": _in_float32(setting)}

  def logits(trained: Any, frozen: Any, images: jax.Array) -> Any:
    del frozen
    outputs, _ = encode_program(
      trained["backbone"], images, config=setting.backbone.config
    )
    return {"backbone": outputs}

  cut = SplitForward(lambda frozen, images: images, logits)
  return Training(cut, params, {}, setting)


def matrix_products(dtype: str) -> tuple[Callable[[], Any], float]:
  """Large square matrix products, the speed limit of a ViT; operations."""
  size, times = (2048, 1) if jax.default_backend() == "cpu" else (8192, 8)
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((2, size, size), dtype=np.float32)
  # With this scale, all products are of order 1.
  a, b = jax.device_put((a, (b / np.sqrt(size)).astype(dtype)))

  @jax.jit
  def program(a: jax.Array, b: jax.Array) -> jax.Array:
    for _ in range(times):
      a = einsum("ij,jk->ik", a, b, Precision(dtype))
    return a

  return lambda: program(a, b), 2.0 * times * size**3


def forward_operations(config: mv.ViTConfig) -> float:
  """Additions and multiplications of matrix products per image."""
  n, d = config.num_patches, config.width
  embedding = n * config.patch_size**2 * 3 * d
  projections = 4 * (n + 1) * d**2
  attention = 2 * (n + 1) ** 2 * d
  mlp = 2 * (n + 1) * d * config.mlp_dim
  blocks = config.depth * (projections + attention + mlp)
  return 2.0 * (embedding + blocks + d * config.num_classes)
