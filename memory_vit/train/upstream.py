"""Compare the original outputs of the backbone before and after training."""

from collections.abc import Sequence

import jax

from memory_vit.data import crop_sizes
from memory_vit.evaluation import evaluate
from memory_vit.kinds.scores import Evaluation
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BACKBONE, Task
from memory_vit.run_result import BackboneResult
from memory_vit.train.inputs import RunInputs


def evaluate_upstream(
  inputs: RunInputs, tasks: Sequence[Task] | None = None
) -> Evaluation | None:
  """Evaluate the original outputs on the data of `config.upstream`.

  `tasks` run in the same pass; if None, the backbone runs alone. Return None if
  `config.upstream` is not set, or if no task can share the pass.
  """
  split = inputs.splits.get("upstream")
  composing = [task for task in tasks or () if task.spec.learned.composes]
  if split is None or (tasks is not None and not composing):
    return None
  config, mesh = inputs.config, inputs.mesh
  everything = [*inputs.parents, *composing] if composing else []
  outputs = evaluate.predict_fn(inputs.backbone, everything, mesh, [BACKBONE])

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    inputs.stop.check()
    return outputs(images)

  where = config.upstream
  own_classes = inputs.backbone.config.num_classes
  return evaluate.evaluate_source(
    predict,
    split,
    crop_sizes.preprocessing_of(
      where.eval_crop,
      where.resize,
      config.image_size,
      inputs.backbone.preprocessing,
    ),
    batch_size=config.batch_size_eval,
    mesh=mesh,
    also=["digest"],
    other_classes=split.num_classes != own_classes,
  )[BACKBONE]


def compare(
  backbone: Backbone,
  before: Evaluation | None,
  after: Evaluation | None,
) -> BackboneResult:
  """Return the entry of the backbone in a result.

  `before` and `after` are from `evaluate_upstream`.
  """
  return BackboneResult(
    fingerprint=backbone.fingerprint,
    dtype=backbone.config.dtype,
    accuracy_before=before.scores.score if before else None,
    accuracy_after=after.scores.score if after else None,
    outputs_bit_equal=(
      before.digest == after.digest if before and after else None
    ),
  )
