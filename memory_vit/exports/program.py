"""The one function that is exported: images to the outputs of all tasks.

It goes through the functions that everybody calls: what they compute is what is
exported, whatever the backbone is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32

from memory_vit.errors import ExportError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import (
  BACKBONE,
  EvalPreprocessing,
  Task,
  require_backbone,
)
from memory_vit.tasks import compose, inference, split_forward

Logits = dict[str, Float32[Array, "b _"]]
# (weights, images) -> {name: logits (b, c)}
Run = Callable[[Any, Float[Array, "b side side 3"]], Logits]


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Program:
  """A pure function of images, and the arrays that it computes with.

  Attributes:
    backbone: of the tasks.
    tasks: several that share a pass, or one of any regime.
    weights: a tree of arrays: the backbone, and the tasks with the keys and
      values of their memory, which are the same for all images.
    run: the function.
  """

  backbone: Backbone
  tasks: tuple[Task, ...]
  weights: Any
  run: Run

  @property
  def evaluation(self) -> EvalPreprocessing:
    """How the images of all tasks are prepared."""
    return self.tasks[0].spec.evaluation

  @property
  def weight_bytes(self) -> int:
    """What its arrays take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the outputs, in order: JAX sorts the keys of dictionaries."""
    names = tuple(task.name for task in self.tasks)
    return names if _is_alone(self.tasks) else (BACKBONE, *names)

  def outputs(self) -> dict[str, int]:
    """{name: how many outputs}, in order; computes nothing."""
    side = self.evaluation.image_size
    images = jax.ShapeDtypeStruct((1, side, side, 3), "float32")
    shapes = jax.eval_shape(self.run, self.weights, images)
    return {name: shapes[name].shape[-1] for name in self.names}

  def call_own(self, images: Float[ArrayLike, "b side side 3"]) -> Logits:
    """What the exported function is compared with.

    That is `mv.forward`; for a task that composes with nothing, its forward
    pass in training.
    """
    if not _is_alone(self.tasks):
      return inference.forward(self.weights[0], self.weights[1], images)
    return split_forward.forward(self.backbone, self.tasks, jnp.asarray(images))


def make_program(backbone: Backbone, tasks: compose.TasksLike) -> Program:
  """Make the function of a backbone and tasks, on the CPU.

  There float32 is float32: accelerators round factors to fewer bits. A task
  whose regime composes with nothing is exported alone, and has no output but
  its own: the original ones would take a second pass.

  Args:
    backbone: the frozen ViT.
    tasks: a task, a sequence or generator of tasks, or {name: task}.

  Raises:
    TaskError: where there is none, or they cannot share a pass.
    ExportError: where jax was told to leave out the CPU.
  """
  cpu = _cpu()
  backbone, chosen = jax.device_put((backbone, compose.task_tuple(tasks)), cpu)
  if _is_alone(chosen):
    return _lone_program(backbone, chosen[0])
  slots = inference.fill_slots(backbone, chosen)

  def run(weights: Any, images: Float[Array, "b side side 3"]) -> Logits:
    filled_backbone, filled = weights
    return inference.forward(filled_backbone, filled, images, check=False)

  return Program(backbone, chosen, (backbone, slots), run)


def _cpu() -> jax.Device:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ExportError(
      "jax has no CPU here, on which exports are made and compared: expected "
      "cpu among JAX_PLATFORMS, as in JAX_PLATFORMS=cuda,cpu."
    ) from error


def _is_alone(tasks: tuple[Task, ...]) -> bool:
  """Whether these are one task that composes with nothing."""
  return compose.runs_alone([task.spec for task in tasks])


def _lone_program(backbone: Backbone, task: Task) -> Program:
  """The function of a task that composes with nothing."""
  require_backbone(task.spec, backbone.id)
  # One that the task brings takes the place of the other, which is left out.
  own = task.params.get("backbone", {})
  merged = dataclasses.replace(backbone, params={**backbone.params, **own})
  rest = {part: v for part, v in task.params.items() if part != "backbone"}

  def run(weights: Any, images: Float[Array, "b side side 3"]) -> Logits:
    used, changed = weights
    return split_forward.forward(used, [changed], images)

  weights = (merged, dataclasses.replace(task, params=rest))
  return Program(backbone, (task,), weights, run)


def flat_weights(program: Program) -> list[np.ndarray]:
  """The arrays of a program, in the order of its tree."""
  return [np.asarray(leaf) for leaf in jax.tree.leaves(program.weights)]
