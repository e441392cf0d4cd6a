"""The two compiled programs of a forward pass, and both at once.

`encode` is one executable for a backbone, whatever the tasks are: that is why
the original outputs stay the same to the bit. `read` is small, and holds all
that depends on the tasks. A context can be kept, and read many times.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.backbone import Backbone
from memory_vit.encoder import Context
from memory_vit.errors import DataError, TaskError
from memory_vit.model import MemoryViT
from memory_vit.tasks import BACKBONE, BackboneId, Task, TaskSpec, visibility
from memory_vit.variants import ViTConfig


@functools.partial(jax.jit, static_argnames="config")
def encode_program(
  params: Any, images: jax.Array, *, config: ViTConfig
) -> tuple[jax.Array, Context]:
  """`encode`, on the parameters of a backbone."""
  model = MemoryViT(config)
  return model.apply({"params": {"backbone": params}}, images, method="encode")


def read_tasks(
  task_params: Any,
  backbone_params: Any,
  context: Context,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> dict[str, jax.Array]:
  """`read`, on parameters: the function that training differentiates.

  Args:
    task_params: {name: parameters of the task}.
    backbone_params: of the backbone; nothing here is differentiated with
      respect to them, nor to the context.
    context: from `encode`.
    config: of the backbone.
    specs: of the tasks.

  Returns:
    {name: logits (b, c)}, float32.
  """
  params = {"backbone": backbone_params, "tasks": task_params}
  model = MemoryViT(config, specs)
  return model.apply({"params": params}, context, method="read")


read_program = jax.jit(read_tasks, static_argnames=("config", "specs"))


def encode(backbone: Backbone, images: jax.Array) -> tuple[jax.Array, Context]:
  """Runs the backbone.

  Args:
    backbone: the frozen ViT.
    images: floats (b, s, s, 3) in [-1, 1], s the image size of the backbone.

  Returns:
    Its outputs, float32 (b, c0): the logits of its head, or the features in
    front of it where it has none; and the context that tasks read.

  Raises:
    DataError: for pictures of another shape or type.
  """
  size = backbone.config.image_size
  images = jnp.asarray(images)
  if images.shape[1:] != (size, size, 3) or not jnp.issubdtype(
    images.dtype, jnp.floating
  ):
    raise DataError(
      f"images are {images.dtype} {images.shape}, expected floats in [-1, 1] "
      f"of shape (batch, {size}, {size}, 3)."
    )
  return encode_program(backbone.params, images, config=backbone.config)


def read(
  backbone: Backbone, tasks: Sequence[Task], context: Context
) -> dict[str, jax.Array]:
  """Runs tasks on a context.

  Args:
    backbone: the one that made the context.
    tasks: in any order; all that they attend to must be among them.
    context: from `encode`.

  Returns:
    {task name: logits (b, c)}, float32.

  Raises:
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  specs = tuple(task.spec for task in tasks)
  for spec in specs:
    require_backbone(spec, backbone.id)
  visibility(specs)  # refuses what does not fit together
  return read_program(
    {task.spec.name: task.params for task in tasks},
    backbone.params,
    context,
    config=backbone.config,
    specs=specs,
  )


def forward(
  backbone: Backbone, tasks: Sequence[Task], images: jax.Array
) -> dict[str, jax.Array]:
  """The original model and all tasks, in one pass.

  Args:
    backbone: the frozen ViT.
    tasks: any number; see `read`.
    images: see `encode`.

  Returns:
    {"backbone": (b, c0), task name: (b, c), ...}, float32. "backbone" holds the
    same bits whatever the tasks are.

  Raises:
    TaskError: as `read`.
    DataError: as `encode`.
  """
  outputs, context = encode(backbone, images)
  return {BACKBONE: outputs, **read(backbone, tasks, context)}


def require_backbone(spec: TaskSpec, found: BackboneId) -> None:
  """Raises `TaskError` where a task was trained on another backbone."""
  if spec.backbone == found:
    return
  differences = [
    f"{field} {getattr(found, field)!r}, the task has "
    f"{getattr(spec.backbone, field)!r}"
    for field in ("fingerprint", "variant", "image_size", "gelu")
    if getattr(found, field) != getattr(spec.backbone, field)
  ]
  raise TaskError(
    f"task {spec.name!r} belongs to another backbone. This one has "
    f"{'; '.join(differences)}. Load the backbone that the task was trained on."
  )
