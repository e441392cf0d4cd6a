"""The exported function: from images to the outputs of all tasks.

It calls the same `Program` as evaluation and prediction.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from memory_vit.errors import ExportError, TaskError
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BACKBONE, EvalPreprocessing, Task
from memory_vit.tasks import compose
from memory_vit.tasks.program import Program, make_program
from memory_vit.tasks.split_forward import Logits

Weights = tuple[Backbone, Program]
# Minimum ratio of the standard deviation of predicted values to their mean.
# Below this ratio, values would agree in the first 5 of the about 7 decimal
# digits that float32 has.
_LEAST_SPREAD = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class ExportedModel:
  """A pure function of images, and the arrays that it computes with."""

  backbone: Backbone
  tasks: tuple[Task, ...]  # tasks that share one pass, or a single task
  program: Program
  # The exported arrays. If a task has trained parameters of the backbone, they
  # are exported instead of the original parameters.
  weights: Weights
  activation: bool = False  # whether outputs pass through `TaskKind.activate`

  def run(
    self, weights: Weights, images: Float[Array, "b side side 3"]
  ) -> Logits:
    """Compute the outputs for images; this is the function that is exported."""
    backbone, program = weights
    outputs = self._with_scores(program(backbone, images))
    kinds = self.activated
    return {
      name: kinds[name].activate(array, jnp) if name in kinds else array
      for name, array in outputs.items()
    }

  def _with_scores(self, outputs: Logits) -> Logits:
    """Return `outputs`, plus scores (b, 1) of each task that rejects images."""
    scores = {
      score_name(task.name): task.spec.kind.kind.known_score(
        outputs[task.name], jnp
      )[..., None]
      for task in self.rejecting
    }
    return {**outputs, **scores}

  @property
  def rejecting(self) -> tuple[Task, ...]:
    """The tasks that reject images of unknown classes."""
    return tuple(t for t in self.tasks if t.spec.kind.unknown is not None)

  @property
  def activated(self) -> dict[str, TaskKind]:
    """{name of an output: its kind}, for the outputs that are activated."""
    if not self.activation:
      return {}
    kinds = {task.name: task.spec.kind for task in self.tasks}
    has_head = self.backbone.config.num_classes > 0
    return {**kinds, BACKBONE: CLASSES} if has_head else kinds

  @property
  def preprocessing(self) -> EvalPreprocessing:
    """The image preprocessing that all tasks share."""
    return self.tasks[0].spec.preprocessing

  @property
  def weight_bytes(self) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the outputs in the order of tasks; JAX orders them by name."""
    names = tuple(task.name for task in self.tasks)
    names += tuple(score_name(task.name) for task in self.rejecting)
    return (BACKBONE, *names) if self.program.composes else names

  def outputs(self) -> dict[str, int]:
    """Return {name of an output: width}, ordered like `names`."""
    side = self.preprocessing.image_size
    images = jax.ShapeDtypeStruct((1, side, side, 3), "float32")
    shapes = jax.eval_shape(self.run, self.weights, images)
    return {name: shapes[name].shape[-1] for name in self.names}

  def call_own(self, images: Float[ArrayLike, "b side side 3"]) -> Logits:
    """Compute reference outputs for an export, without activation."""
    return self._with_scores(self.program(self.backbone, jnp.asarray(images)))


def score_name(task: str) -> str:
  """Return the output name of a task's scores; task names have no dots."""
  return f"{task}.known_score"


def make_model(
  backbone: Backbone, tasks: compose.TasksLike, *, activation: bool = False
) -> ExportedModel:
  """Make the function of a backbone and tasks, on the CPU.

  CPUs compute in full float32; accelerators round factors of matrix products. A
  task that needs its own pass is exported without the original outputs, which
  would take a second pass.
  """
  cpu = _cpu()
  backbone, chosen = jax.device_put((backbone, compose.task_tuple(tasks)), cpu)
  if not chosen:
    raise TaskError("there is no task to export.")
  # Choose operations for CPUs, because CPU operations run on all platforms. By
  # default, operations are chosen for jax's first device, which may be a GPU.
  config = dataclasses.replace(backbone.config, platform="cpu")
  backbone = dataclasses.replace(backbone, config=config)
  compose.require_one_pass(chosen)
  if activation:
    for task in chosen:
      _require_float32(task.name, task.spec.kind)
  program = make_program(backbone, chosen)
  weights = _with_own_backbone(backbone, program)
  return ExportedModel(backbone, chosen, program, weights, activation)


def _require_float32(name: str, kind: TaskKind) -> None:
  """Raise if float32 cannot represent the spread of a task's values."""
  for mean, std in zip(kind.mean, kind.std, strict=True):
    if std < _LEAST_SPREAD * abs(mean):
      raise ExportError(
        f"activation: a value of task {name!r} has mean {mean:.4g} and "
        f"standard deviation {std:.4g}, which float32 outputs cannot "
        "represent. Export without activation and compute mean + std * output "
        "in float64, or subtract an offset from the values before training."
      )


def _with_own_backbone(backbone: Backbone, program: Program) -> Weights:
  """Move backbone weights of a task from `program` to `backbone`.

  Return a copy of `backbone` with the moved weights, and a copy of `program`
  without them.
  """
  params, alone = backbone.params, []
  for task in program.alone:
    params = {**params, **task.params.get("backbone", {})}
    rest = {part: v for part, v in task.params.items() if part != "backbone"}
    alone.append(dataclasses.replace(task, params=rest))
  return (
    dataclasses.replace(backbone, params=params),
    dataclasses.replace(program, alone=tuple(alone)),
  )


def _cpu() -> jax.Device:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ExportError(
      "jax has no CPU device, but a model is exported and compared on the CPU: "
      "add cpu to JAX_PLATFORMS, as in JAX_PLATFORMS=cuda,cpu."
    ) from error


def flat_weights(model: ExportedModel) -> list[np.ndarray]:
  """Return the arrays of a model, in pytree order."""
  return [np.asarray(leaf) for leaf in jax.tree.leaves(model.weights)]
