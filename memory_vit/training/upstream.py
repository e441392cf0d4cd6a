"""The backbone's own task: evaluated before and after training."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from memory_vit.config import Config
from memory_vit.data import datasets, image_ops
from memory_vit.data.sources import Source
from memory_vit.errors import ConfigError
from memory_vit.evaluation import evaluate
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BACKBONE, Task
from memory_vit.run_result import BackboneResult
from memory_vit.runtime import processes
from memory_vit.tasks import inference
from memory_vit.training.trainer import Trainer


def open_upstream(config: Config, backbone: Backbone) -> Source | None:
  """The data of the backbone's own task; None where none is configured."""
  where = config.upstream
  if not where.name:
    return None
  # It may be prepared on the way, in a directory that all share.
  source = processes.process_0_first(
    lambda: datasets.open_source(
      where.name,
      where.split,
      where.dir,
      config.data.cache_gib,
      max_bad=config.data.max_bad,
      stall_timeout=config.stall_timeout,
      trust_data_code=config.trust_data_code,
    ),
  )
  outputs = backbone.config.num_classes
  if source.num_classes != outputs:
    raise ConfigError(
      f"config.upstream: {where.name} has {source.num_classes} classes, the "
      f"head of the backbone has {outputs}."
    )
  return source


def evaluate_upstream(
  trainer: Trainer, source: Source, tasks: Sequence[Task]
) -> dict[str, Any]:
  """Evaluates the original outputs, with tasks in the same pass."""
  config, backbone = trainer.config, trainer.backbone
  everything = [*trainer.parents, *tasks] if tasks else []
  slots = inference.fill_slots(backbone, everything) if everything else []

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    trainer.stop.check()
    # `data` has scaled the pictures.
    out = inference.forward(backbone, slots, images, check=False)
    return {BACKBONE: out[BACKBONE]}

  where = config.upstream
  return evaluate.evaluate_source(
    predict,
    source,
    image_ops.evaluation_of(where.eval_crop, where.resize, config.image_size),
    batch_size=config.batch_size_eval,
    mesh=trainer.mesh,
    digest=True,
  )[BACKBONE]


def compare(
  fingerprint: str,
  before: Mapping[str, Any] | None,
  after: Mapping[str, Any] | None,
) -> BackboneResult:
  """The backbone in a result.

  Args:
    fingerprint: of its weights.
    before: from `evaluate_upstream` without the new tasks; None where there is
      no data.
    after: the same with them.
  """
  return BackboneResult(
    fingerprint=fingerprint,
    accuracy_before=before and before["top1"],
    accuracy_after=after and after["top1"],
    outputs_bit_equal=after and before["digest"] == after["digest"],
  )
