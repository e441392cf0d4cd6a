"""Fit temperatures and thresholds of tasks on images not trained on."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from memory_vit.errors import TrainingError
from memory_vit.kinds import TaskKind
from memory_vit.kinds.class_sums import MOST_HELD_OUT
from memory_vit.kinds.scores import Evaluation
from memory_vit.runtime import processes, schema
from memory_vit.train.closed_form import ClosedFormStep
from memory_vit.train.evaluate import validate
from memory_vit.train.inputs import RunInputs
from memory_vit.train.pack import Start

logger = logging.getLogger(__name__)


def fitted_kinds(
  inputs: RunInputs, began: Start, params: Mapping[str, Any]
) -> dict[str, TaskKind]:
  """Return the `TaskKind` of each task, with fitted temperature or thresholds.

  All processes must call. Fitting takes a pass over the validation split, or
  several passes if the outputs of all trials take too much memory. Without this
  split, heads in closed form use the outputs of their cross-validation.

  Args:
    inputs: inputs of the run.
    began: the pack before its first step.
    params: the best parameters of each trial.
  """
  stated, config = inputs.kind, inputs.config
  kinds = dict.fromkeys(params, stated)
  if not stated.kind.fits:
    return kinds
  for name, evaluation in _held_out(inputs, began, params):
    if not len(evaluation.held_out.targets):
      continue
    fitted = stated.kind.fitted(
      stated, evaluation.held_out, config.task.unknown
    )
    # All processes use the fit of process 0, because fits on different hosts
    # may differ in the last bits.
    values = processes.broadcast_from_process_0(dataclasses.asdict(fitted))
    kinds[name] = schema.build(TaskKind, values, "kind", TrainingError)
    logger.info(
      "%s: temperature %.3g, from %d images", name, kinds[name].temperature,
      len(evaluation.held_out.targets),
    )  # fmt: skip
  for name, kind in kinds.items():
    if config.task.unknown and kind.unknown is None:
      logger.warning(
        "%s: config.task.unknown is %g, but no images are held out to "
        "choose the threshold on: no image is rejected as unknown",
        name, config.task.unknown,
      )  # fmt: skip
  return kinds


def _held_out(
  inputs: RunInputs, began: Start, params: Mapping[str, Any]
) -> Iterator[tuple[str, Evaluation]]:
  """Yield (trial name, evaluation with outputs for held-out images).

  The held-out images are the validation split. Without this split, heads in
  closed form are cross-validated, and other trials are left out.
  """
  split = inputs.splits.get("validation")
  if split:
    per_trial = split.size * inputs.splits["train"].num_classes
    names, count = [*params], max(1, MOST_HELD_OUT // per_trial)
    for i in range(0, len(names), count):
      tasks = {name: began.tasks[name] for name in names[i : i + count]}
      yield from validate(inputs, tasks, params, ["held_out"]).items()
  elif isinstance(began.step, ClosedFormStep):
    yield from began.step.cross_validation.items()
