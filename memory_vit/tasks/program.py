"""Run tasks on images: encode an image once, and run each task on its context.

Behind a `Program` are slots, of tasks that share a pass of the backbone, or the
parameters of tasks that have one of their own. Callers do not ask which.
"""

# As text, `help` shows types by their short names.
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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["slots", "alone"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # it holds arrays
class Program:
  """Tasks that are ready to run on a backbone, compiled for sizes of slots.

  A tree of arrays for JAX: other tasks of these sizes compile nothing.
  """

  # Tasks that compose; None without any.
  slots: Slots | None = None
  # Tasks that share another pass: probes, or one that changes the computation
  # of the backbone.
  alone: tuple[Task, ...] = ()

  @property
  def composes(self) -> bool:
    """Whether all tasks share one pass, with the original outputs."""
    return not self.alone

  @property
  def heads(self) -> dict[str, tuple[int, int]]:
    """{task name: (its place among all logits, number of its classes)}."""
    if self.slots is None:
      return {task.name: (0, task.spec.num_classes) for task in self.alone}
    slots = self.slots
    return {
      spec.name: (place, spec.num_classes)
      for place, spec in zip(slots.places, slots.specs, strict=True)
    }

  @functools.cached_property
  def shapes(self) -> Hashable:
    """What compiled programs depend on, beside the backbone and the images."""
    params = self.slots.arrays if self.slots else [t.params for t in self.alone]
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return self._alone_specs, structure, shapes

  def __call__(
    self, backbone: Backbone, images: Float[Array, "b side side 3"]
  ) -> Logits:
    """Run all tasks, and the backbone if they compose or there is none."""
    found: Logits = {}
    if self.slots or not self.alone:
      outputs, context = _encode(backbone, images)
      found = {BACKBONE: outputs, **self._read_slots(backbone, context)}
      del context  # the largest array
    if self.alone:
      split = make_split_forward(backbone.config, self._alone_specs)
      frozen = {"backbone": backbone.params, "tasks": {}}
      found |= self._read_alone(backbone, split.prepare(frozen, images))
    return found

  def read(self, backbone: Backbone, inputs: Any) -> Logits:
    """Run tasks on what `SplitForward.prepare` made, such as a context."""
    if self.alone:
      return self._read_alone(backbone, inputs)
    if isinstance(inputs, Mapping):  # the features of heads alone
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
    """Logits of all places at once, see `heads`, and the original outputs."""
    # No program depends on which places are taken. A task that does not compose
    # has one place, without its axis.
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
    """Specs without names: one program for all tasks of one shape."""
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
    found = logits_program(
      {str(i): task.params for i, task in enumerate(self.alone)},
      {"backbone": backbone.params, "tasks": {}},
      inputs,
      config=backbone.config,
      specs=self._alone_specs,
    )
    return {task.name: found[str(i)] for i, task in enumerate(self.alone)}


def make_program(
  backbone: Backbone,
  tasks: TasksLike,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
) -> Program:
  """Make tasks of any regime ready; the minimum sizes are of `fill_slots`."""
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
  """Make tasks ready that come and go: see `place_in_slots`."""
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
      the backbone. Images scaled to [0, 1] by mistake cannot be told from
      bright ones.
    check: whether values are checked, which costs next to nothing; False also
      allows other values. Under a trace of JAX nothing is checked.

  Returns:
    Its outputs, the logits of its head or, without a head, its features; and
    the context that tasks attend to. Within a `jax.jit` of the caller they may
    differ by rounding: that is another program, which runs a large batch whole.

  Raises:
    DataError: for images of another shape or type, with values outside [-1, 1]
      or that are not finite.
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
    backbone: the one that made the context.
    tasks: a task, a sequence or generator of tasks, or {name: task}; in any
      order, all that they attend to among them. Or the result of `fill_slots`,
      which saves filling slots in every call.
    context: from `encode`.

  Returns:
    {task name: logits (b, c)}.

  Raises:
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  return Program(in_slots(backbone, tasks)).read(backbone, context)


def in_slots(backbone: Backbone, tasks: TasksLike | Slots) -> Slots | None:
  """Tasks in slots of the size that they need; None if there is no task."""
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
  """Put images on the device; also return a check to call once a model runs."""
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
  # A NumPy array is checked on the host.
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
  """The parameters for a program, in a trace as they are."""
  # An export may run on another device, and holds them once.
  return backbone.params if trees.is_traced(inputs) else backbone.for_programs
