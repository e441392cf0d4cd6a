"""Temperatures and thresholds of tasks, from images that they did not see."""

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
  """What each trained task states; all processes must call.

  It takes one more pass over the validation split, or several if the outputs of
  all trials would take too much memory. A head in closed form without such a
  split is cross-validated.

  Args:
    inputs: of the run.
    began: the pack.
    params: the best of each trial.
  """
  stated, config = inputs.kind, inputs.config
  found = dict.fromkeys(params, stated)
  if not stated.kind.fits:
    return found
  for name, evaluation in _held_out(inputs, began, params):
    if not len(evaluation.held_out.targets):
      continue
    fitted = stated.kind.fitted(
      stated, evaluation.held_out, config.task.unknown
    )
    # The hosts may differ in the last bits.
    values = processes.broadcast_from_process_0(dataclasses.asdict(fitted))
    found[name] = schema.build(TaskKind, values, "kind", TrainingError)
    logger.info(
      "%s: temperature %.3g, from %d images", name, found[name].temperature,
      len(evaluation.held_out.targets),
    )  # fmt: skip
  for name, kind in found.items():
    if config.task.unknown and kind.unknown is None:
      logger.warning(
        "%s: config.task.unknown is %g, but no outputs to choose the threshold "
        "on: no image is taken for unknown", name, config.task.unknown,
      )  # fmt: skip
  return found


def _held_out(
  inputs: RunInputs, began: Start, params: Mapping[str, Any]
) -> Iterator[tuple[str, Evaluation]]:
  """Evaluations with outputs, of the trials that have any."""
  split = inputs.splits.get("validation")
  if split:
    each = split.size * inputs.splits["train"].num_classes
    names, count = [*params], max(1, MOST_HELD_OUT // each)
    for i in range(0, len(names), count):
      tasks = {name: began.tasks[name] for name in names[i : i + count]}
      yield from validate(inputs, tasks, params, ["held_out"]).items()
  elif isinstance(began.step, ClosedFormStep):
    yield from began.step.cross_validation.items()
