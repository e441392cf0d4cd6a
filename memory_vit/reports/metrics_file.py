"""`metrics.json`: the numbers of an evaluation, for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.runtime.messages import utf8

# Version of the format. Removing or redefining a key needs a new version, but
# adding a key does not.
SCHEMA = 1


def to_values(evaluation: TaskEvaluation) -> dict[str, Any]:
  """Return the content of `metrics.json` as strict JSON: NaN becomes None."""
  calibration = evaluation.calibration
  values = {
    "schema": SCHEMA,
    **evaluation.details,
    "data": {
      "name": evaluation.data,
      "directory": evaluation.directory,
      "split": evaluation.split,
      "digest": evaluation.data_digest,
    },
    "kind": evaluation.kind,
    "metrics": evaluation.summary,
    "calibration": calibration
    and {"edges": calibration.edges, **_arrays_of(calibration)},
    "class_names": evaluation.class_names,
    "per_class": _arrays_of(evaluation.each),
    "alone": evaluation.alone,
  }
  return {key: _as_json(value) for key, value in values.items()}


def headline(evaluation: TaskEvaluation) -> dict[str, Any]:
  """Return the most important values of a task, for `report.json`."""
  return {
    "task": evaluation.task,
    "data": utf8(evaluation.data),
    "directory": utf8(evaluation.directory),
    "split": utf8(evaluation.split),
    "kind": evaluation.kind,
    **_as_json(evaluation.summary),
  }


def _arrays_of(values: Any) -> dict[str, Any]:
  """Return {field: value} of a dataclass; `asdict` would copy the arrays."""
  return {
    field.name: getattr(values, field.name)
    for field in dataclasses.fields(values)
  }


def _as_json(value: Any) -> Any:
  """Convert arrays to lists; NaN and infinity to None; text to valid UTF-8."""
  if isinstance(value, np.ndarray | np.generic):
    return _as_json(value.tolist())
  if isinstance(value, dict):
    return {key: _as_json(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_as_json(inner) for inner in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return utf8(value) if isinstance(value, str) else value
