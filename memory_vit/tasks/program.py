"""Run tasks on images: encode an image once, and run each task on its context.

A `Program` holds slots, for tasks that share a pass of the backbone, or the
parameters of tasks that need their own pass. Callers do not distinguish them.
"""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32

from memory_vit.errors import DataError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone
from memory_vit.model.context import Context
from memory_vit.model.task import (
  BACKBONE,
  EvalPreprocessing,
  Task,
  TaskSpec,
  require_backbone,
)
from memory_vit.tasks import image_check, inference
from memory_vit.tasks.compose import TasksLike, task_tuple
from memory_vit.tasks.slots import (
  Slots,
  SlotSizes,
  fill_slots,
  place_in_slots,
)
from memory_vit.tasks.split_forward import (
  Logits,
  logits_program,
  make_split_forward,
)


# The class has no `==`, which is ambiguous for arrays, and no repr, which would
# print all arrays.
@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["slots", "alone"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
  """Tasks that are ready to run on a backbone, in slots of fixed sizes.

  It is a JAX pytree: tasks of the same sizes need no recompiling.
  """

  # Tasks that share one pass, which also computes the original outputs; None if
  # there are no such tasks.
  slots: Slots | None = None
  # Tasks that cannot share the pass of `slots`: either any number of probes, or
  # a single task that changes what the backbone computes.
  alone: tuple[Task, ...] = ()

  @property
  def composes(self) -> bool:
    """Whether all tasks share the pass that computes the original outputs."""
    return not self.alone

  @property
  def heads(self) -> dict[str, tuple[int, int]]:
    """{task name: (row of its logits in `stacked`, number of its classes)}."""
    if self.slots is None:
      return {task.name: (0, task.spec.num_classes) for task in self.alone}
    slots = self.slots
    return {
      spec.name: (place, spec.num_classes)
      for place, spec in zip(slots.places, slots.specs, strict=True)
    }

  @functools.cached_property
  def shapes(self) -> Hashable:
    """Key of the compiled programs for a given backbone and shape of images."""
    params = self.slots.arrays if self.slots else [t.params for t in self.alone]
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return self._alone_specs, structure, shapes

  def __call__(
    self, backbone: Backbone, images: Float[Array, "b side side 3"]
  ) -> Logits:
    """Return the logits of all tasks.

    The key `BACKBONE` has the original outputs of the backbone. This key is
    missing if all tasks are in `alone`: their pass does not compute these
    outputs.
    """
    logits: Logits = {}
    if self.slots or not self.alone:
      outputs, context = _encode(backbone, images)
      logits = {BACKBONE: outputs, **self._read_slots(backbone, context)}
      del context  # free the largest array
    if self.alone:
      split = make_split_forward(backbone.config, self._alone_specs)
      frozen = {"backbone": backbone.params, "tasks": {}}
      logits |= self._read_alone(backbone, split.prepare(frozen, images))
    return logits

  def read(self, backbone: Backbone, inputs: Any) -> Logits:
    """Run tasks on the output of `SplitForward.prepare`, such as a context."""
    if self.alone:
      return self._read_alone(backbone, inputs)
    if isinstance(inputs, Mapping):  # pooled features for heads
      inputs = Context((), inputs["pooled"])
    return self._read_slots(backbone, inputs)

  def stacked(
    self,
    backbone: Backbone,
    images: Float[Array, "b side side 3"],
    *,
    tasks: bool,
    original: bool,
  ) -> tuple[Float32[Array, "b *t c"] | None, Float32[Array, "b c0"] | None]:
    """Return logits of all slots (rows as in `heads`), and original outputs."""
    # The logits include those of empty slots, so that programs need no
    # recompiling when a task takes another slot. A task in `alone` has no slot,
    # so its logits are (b, c), without the axis t of slots.
    outputs = logits = None
    if tasks and self.alone:
      [logits] = self(backbone, images).values()
    if original or (tasks and self.slots):
      outputs, context = _encode(backbone, images)
      if tasks and self.slots:
        logits = _read_places(backbone, self.slots, context)
      del context
    return logits, outputs if original else None

  def _read_slots(self, backbone: Backbone, context: Context) -> Logits:
    if not self.slots:
      return {}
    logits = _read_places(backbone, self.slots, context)
    return {
      spec.name: logits[:, place, : spec.num_classes]
      for place, spec in zip(self.slots.places, self.slots.specs, strict=True)
    }

  @property
  def _alone_specs(self) -> tuple[TaskSpec, ...]:
    """Specs without names, so that tasks of equal shapes share a program."""
    return tuple(
      dataclasses.replace(
        task.spec.for_programs,
        name=str(i),
        preprocessing=EvalPreprocessing(
          image_size=task.spec.backbone.image_size
        ),
      )
      for i, task in enumerate(self.alone)
    )

  def _read_alone(self, backbone: Backbone, inputs: Any) -> Logits:
    logits = logits_program(
      {str(i): task.params for i, task in enumerate(self.alone)},
      {"backbone": backbone.params, "tasks": {}},
      inputs,
      config=backbone.config,
      specs=self._alone_specs,
    )
    return {task.name: logits[str(i)] for i, task in enumerate(self.alone)}


def make_program(
  backbone: Backbone,
  tasks: TasksLike,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
) -> Program:
  """Make a `Program` of tasks of any regime; for sizes, see `fill_slots`."""
  tasks = task_tuple(tasks)
  for task in tasks:
    require_backbone(task.spec, backbone.id)
  composing = [task for task in tasks if task.spec.learned.composes]
  filled = None
  if composing:
    filled = fill_slots(
      backbone, composing, slots=slots, cells=cells, classes=classes
    )
  alone = (task for task in tasks if not task.spec.learned.composes)
  return Program(filled, tuple(alone))


def place_tasks(
  backbone: Backbone, tasks: Mapping[int, Task], sizes: SlotSizes
) -> Program:
  """Make a `Program` of {slot: task} in given slots; see `place_in_slots`."""
  alone = tuple(t for t in tasks.values() if not t.spec.learned.composes)
  if alone:
    return Program(alone=jax.device_put(alone))
  return Program(place_in_slots(backbone, tasks, sizes))


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
      the backbone. Images scaled to [0, 1] by mistake are not detected.
    check: whether to check the values of images, which costs next to nothing;
      False allows any values. While JAX traces, nothing is checked.

  Returns:
    The outputs of the backbone: the logits of its head or, without a head, its
    features; and the context that tasks attend to. Within a `jax.jit` of the
    caller they may differ by rounding, because XLA compiles another program,
    which does not split large batches.

  Raises:
    DataError: if images have another shape or type, or values that are not
      finite or outside [-1, 1].
  """
  images, refuse = accept_images(backbone, images, check)
  encoded = _encode(backbone, images)
  refuse()
  return encoded


def read(
  backbone: Backbone, tasks: TasksLike | Slots, context: Context
) -> dict[str, Float32[Array, "b _"]]:
  """Run tasks on a context.

  Args:
    backbone: the backbone that computed the context.
    tasks: a task, a sequence or generator of tasks, or {name: task}; in any
      order, with all tasks that they attend to. Or the result of `fill_slots`,
      so that slots are not filled in every call.
    context: from `encode`.

  Returns:
    {task name: logits (b, c)}.

  Raises:
    TaskError: if tasks are of another backbone, or do not fit together.
  """
  return Program(in_slots(backbone, tasks)).read(backbone, context)


def in_slots(backbone: Backbone, tasks: TasksLike | Slots) -> Slots | None:
  """Put tasks into slots of the sizes they need; return None without tasks."""
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
  """Run the original model and all tasks, in one pass.

  Args:
    backbone: the frozen ViT.
    tasks: any number; see `read`.
    images: see `encode`.
    check: see `encode`.

  Returns:
    {"backbone": (b, c0), task name: (b, c), ...}. "backbone" is bitwise
    identical whatever the tasks are; within a `jax.jit`, see `encode`.

  Raises:
    TaskError: as `read`.
    DataError: as `encode`.
  """
  program = Program(in_slots(backbone, tasks))
  images, refuse = accept_images(backbone, images, check)
  result = program(backbone, images)
  refuse()
  return result


def accept_images(
  backbone: Backbone, images: Float[ArrayLike, "b side side 3"], check: bool
) -> tuple[Float[Array, "b side side 3"], Callable[[], None]]:
  """Put images on the device; return a check to call after the model starts."""
  try:
    array = jnp.asarray(images)
  except (TypeError, ValueError) as error:
    raise DataError(
      f"images are of type {type(images).__name__}, expected an array; "
      "mv.preprocess makes an array from image files."
    ) from error
  image_check.require_shape(array, backbone.config.image_size)
  if not check:
    return array, lambda: None
  # Check a NumPy array on the host, and a JAX array on the device.
  seen = images if isinstance(images, np.ndarray) else array
  return array, image_check.begin(seen)


def _encode(
  backbone: Backbone, images: Float[Array, "b side side 3"]
) -> tuple[Float32[Array, "b c0"], Context]:
  return inference.encode_program(
    _params(backbone, images), images, config=backbone.config
  )


def _read_places(
  backbone: Backbone, slots: Slots, context: Context
) -> Float32[Array, "b t c"]:
  streamed = slots.arrays.mask is not None
  params = _params(backbone, context) if streamed else {}
  return inference.read_program(
    params, slots.arrays, context, config=backbone.config
  )


def _params(backbone: Backbone, inputs: Any) -> dict[str, Any]:
  """Return the parameters of a backbone for a program.

  Parameters are adapted to the device, unless JAX traces `inputs`.
  """
  # A traced program may be exported to another device, and must not store
  # parameters that are adapted to this device.
  return backbone.params if trees.is_traced(inputs) else backbone.for_programs
