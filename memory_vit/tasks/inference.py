"""The two compiled programs of a forward pass, and both at once.

`encode` is one executable for a backbone, whatever the tasks are: that is why
the original outputs stay the same to the bit. `read` is small, and holds all
that depends on the tasks, which lie in slots (`tasks/slots.py`). A context can
be kept, and read many times.
"""

# As text, `help` shows types by their short names.
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Float32

from memory_vit.errors import DataError, TaskError
from memory_vit.model.backbone import Backbone
from memory_vit.model.encoder import Cells, Context
from memory_vit.model.masks import TaskMask, task_mask
from memory_vit.model.regimes import SideKind
from memory_vit.model.stacking import (
  SlotArrays,
  StackedTasks,
  stack_heads,
  stack_tasks,
)
from memory_vit.model.task import BACKBONE, TaskSpec, require_backbone
from memory_vit.model.trees import Tree
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks import image_check
from memory_vit.tasks.compose import TasksLike, require_fit, task_tuple
from memory_vit.tasks.room import Room
from memory_vit.tasks.slots import Slots


@functools.partial(jax.jit, static_argnames="config")
def encode_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> tuple[Float32[Array, "b c0"], Context]:
  """`encode`, on the parameters of a backbone."""
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")


@functools.partial(jax.jit, static_argnames="config")
def plain_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b c0"]:
  """The original outputs alone.

  As nothing else is handed out, XLA leaves out what tasks would read.
  """
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")[0]


@functools.partial(jax.jit, static_argnames="config")
def summary_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b n d"]:
  """`summarize`, on the parameters of a backbone."""
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="summarize")


def read_tasks(
  task_params: Any,
  backbone_params: Any,
  context: Context,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> dict[str, Float32[Array, "b _"]]:
  """The function that training differentiates: `MemoryViT.read`.

  Args:
    task_params: {name: parameters of the task}.
    backbone_params: of the backbone; nothing here is differentiated with
      respect to them, nor to the context.
    context: from `encode`.
    config: of the backbone.
    specs: of the tasks.

  Returns:
    {name: logits (b, c)}.
  """
  params = {"backbone": backbone_params, "tasks": task_params}
  model = MemoryViT(config, specs)
  return apply(model, params, context, method="read")


@functools.partial(jax.jit, static_argnames="config")
def read_program(
  backbone_params: Any,
  slots: SlotArrays,
  context: Context,
  *,
  config: ViTConfig,
) -> Float32[Array, "b t c"]:
  """`MemoryViT.read_slots`; compiled once for all tasks that fit the slots."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, slots, context, method="read_slots")


@functools.partial(jax.jit, static_argnames="config")
def memory_program(
  backbone_params: Any,
  memory: Float[Array, "l t m d"],
  norm: Bool[Array, " t"],
  *,
  config: ViTConfig,
) -> Cells:
  """Keys and values of memory, the same for all images."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, memory, norm, method="keys_values")


def fill_slots(
  backbone: Backbone,
  tasks: TasksLike,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
) -> Slots:
  """Make tasks ready to be read many times.

  The keys and values of their memory are computed here, once. Shapes are
  rounded up to slots of 1, 2, 4, 8, then multiples of 8 tasks; multiples of 8
  cells; multiples of 128 classes. As long as they are the same, nothing is
  compiled again when tasks change, and the logits of a task in its slot do not
  depend on what lies in the others, to the bit.

  Args:
    backbone: the frozen ViT.
    tasks: a task, a sequence or generator of tasks, or {name: task}; at least
      one, and all that they attend to must be among them.
    slots: t, at least.
    cells: m, at least.
    classes: c, at least.

  Returns:
    What `read` and `forward` take in place of the tasks.

  Raises:
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  tasks = task_tuple(tasks)
  if not tasks:
    raise TaskError("there is no task to fill slots with.")
  for task in tasks:
    require_backbone(task.spec, backbone.id)
  require_fit(tasks)
  specs = tuple(task.spec for task in tasks)
  room = Room(slots=slots, cells=cells).holding(specs)
  stacked, heads, mask = _stack_program(
    [task.params for task in tasks],
    task_mask(specs, slots=room.slots, cells=room.cells, parents=room.parents),
    classes,
    room.side,
  )
  arrays = SlotArrays(
    cls=stacked.cls,
    cells=memory_program(
      backbone.params, stacked.memory, mask.memory_norm, config=backbone.config
    ),
    **heads,
    mask=mask,
    norms=stacked.norms,
    layers=stacked.layers,
    side=stacked.side,
  )
  return Slots(specs, arrays)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _stack_program(
  params: Sequence[Tree],
  mask: TaskMask,
  classes: int,
  side: tuple[tuple[SideKind, int], ...],
) -> tuple[StackedTasks, Tree, TaskMask]:
  """Stack tasks in one program: there would be one for each operation."""
  stacked = stack_tasks(params, mask, dict(side))
  return stacked, stack_heads(params, len(stacked.cls), classes), mask


def encode(
  backbone: Backbone,
  images: Float[ArrayLike, "b side side 3"],
  *,
  check: bool = True,
) -> tuple[Float32[Array, "b c0"], Context]:
  """Run the backbone.

  Args:
    backbone: the frozen ViT.
    images: in [-1, 1], as `preprocess` makes them; side is the image size of
      the backbone. Images scaled to [0, 1] by mistake cannot be told from
      bright ones.
    check: whether values are looked at. It costs next to nothing; where they
      are known to be right, or meant to be others, False leaves it out. What
      JAX traces is never looked at.

  Returns:
    Its outputs, the logits of its head, or the features in front of it where
    it has none; and the context that tasks read. Within a `jax.jit` of the
    caller that does not use the context, the outputs of a backbone with rotary
    positions may differ by rounding.

  Raises:
    DataError: for images of another shape or type, with values outside
      [-1, 1] or that are not finite.
  """
  images, refuse = accept_images(backbone, images, check)
  encoded = encode_program(backbone.params, images, config=backbone.config)
  refuse()
  return encoded


def read(
  backbone: Backbone, tasks: TasksLike | Slots, context: Context
) -> dict[str, Float32[Array, "b _"]]:
  """Run tasks on a context.

  Args:
    backbone: the one that made the context.
    tasks: a task, a sequence or generator of tasks, or {name: task}; in any
      order, all that they attend to among them. Or what `fill_slots` made of
      them, which saves doing that in every call.
    context: from `encode`.

  Returns:
    {task name: logits (b, c)}.

  Raises:
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  slots = in_slots(backbone, tasks)
  if slots is None:
    return {}
  logits = read_program(
    backbone.params, slots.arrays, context, config=backbone.config
  )
  return {
    spec.name: logits[:, i, : spec.num_classes]
    for i, spec in enumerate(slots.specs)
  }


def in_slots(backbone: Backbone, tasks: TasksLike | Slots) -> Slots | None:
  """Tasks in slots of the size that they need; None where there is no task.

  Args:
    backbone: the one that they run on.
    tasks: see `read`; what lies in slots already stays as it is.

  Raises:
    TaskError: as `read`.
  """
  if not isinstance(tasks, Slots):
    tasks = task_tuple(tasks)
    if not tasks:
      return None
    tasks = fill_slots(backbone, tasks)
  require_backbone(tasks.specs[0], backbone.id)
  return tasks


def forward(
  backbone: Backbone,
  tasks: TasksLike | Slots,
  images: Float[ArrayLike, "b side side 3"],
  *,
  check: bool = True,
) -> dict[str, Float32[Array, "b _"]]:
  """The original model and all tasks, in one pass.

  Args:
    backbone: the frozen ViT.
    tasks: any number; see `read`.
    images: see `encode`.
    check: see `encode`.

  Returns:
    {"backbone": (b, c0), task name: (b, c), ...}. "backbone" holds the same
    bits whatever the tasks are; within a `jax.jit` of the caller, see `encode`.

  Raises:
    TaskError: as `read`.
    DataError: as `encode`.
  """
  if not isinstance(tasks, Slots):
    tasks = task_tuple(tasks)
  images, refuse = accept_images(backbone, images, check)
  outputs, context = encode_program(
    backbone.params, images, config=backbone.config
  )
  result = {BACKBONE: outputs, **read(backbone, tasks, context)}
  refuse()
  return result


def accept_images(
  backbone: Backbone, images: Float[ArrayLike, "b side side 3"], check: bool
) -> tuple[Float[Array, "b side side 3"], Callable[[], None]]:
  """Take images to the device, and begin to look at their values.

  Args:
    backbone: that shall take them.
    images: see `encode`.
    check: the same.

  Returns:
    The images on the device, and a check to call once the model runs.

  Raises:
    DataError: for images of another shape or type; the check raises it for
      their values.
  """
  try:
    array = jnp.asarray(images)
  except (TypeError, ValueError) as error:
    raise DataError(
      f"images are of type {type(images).__name__}, expected an array; "
      "mv.preprocess makes one of files."
    ) from error
  image_check.require_shape(array, backbone.config.image_size)
  if not check:
    return array, lambda: None
  # An array of NumPy is looked at where it is.
  seen = images if isinstance(images, np.ndarray) else array
  return array, image_check.begin(seen)
