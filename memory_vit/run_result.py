"""Result of a run: the fields of `result.json`, in their order."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError
from memory_vit.runtime import files, paths

with epy.lazy_imports():  # a report of results is made without jax
  from memory_vit.runtime import processes

RESULT = "result.json"
# Plots beside it: accuracies of a sweep; attention, answers of the best task.
SWEEP, ATTENTION, ANSWERS = "sweep.png", "attention.png", "answers.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
  """Metrics of a trial, which are also in the `task.json` of its task.

  Attributes:
    name: of the task.
    kind: "classes", "labels" or "values", see `TaskKind`.
    regime: see `regimes`.
    cells: memory cells per layer.
    learning_rate: the peak.
    seed: of the initialization.
    varied: the options that a sweep varied, {"task.cells": 5}.
    steps: of training.
    trainable_params: the number of trained parameters.
    test_score: accuracy of classes, mean average precision of labels, R2 of
      values; None without a test split, as the other numbers are, and if
      outputs of values are not finite.
    test_metrics: of labels "map", "f1_macro" at the thresholds of the task,
      "calibration_error", "per_class" (average precision of each) and
      "f1_per_class"; of values "r2", "mae" and "rmse" in their units,
      "spearman", and these of each as "per_class". Empty for classes, which
      alone have the accuracies, `chance` and `test_majority` below.
    test_accuracy: in [0, 1].
    test_examples: the number of evaluated examples.
    test_skipped: the number of unreadable examples.
    test_not_finite: the number of examples with outputs that are not finite,
      which count as mistakes.
    test_loss: mean cross-entropy, of labels binary; of values the mean squared
      error in standard deviations. None also if it is not finite.
    test_top5: top-5 accuracy, in [0, 1].
    test_per_class: accuracy of each class; None for a class without examples.
    chance: accuracy of guessing uniformly.
    test_majority: accuracy of always predicting the most frequent class.
    exported: directory of the task in the workdir; None if it is not exported.
    best_step: at which the parameters were taken.
    val_score: at that step; None without a validation split.
    val_metrics: at that step, as `test_metrics`; "f1_macro" and "f1_per_class"
      are at thresholds of 0.5.
    val_accuracy: `val_score` of classes.
    val_loss: at that step, as `test_loss`.
    val_examples: the number of validation examples.
    skipped_updates: the number of updates that were not finite.
  """

  name: str
  kind: str = "classes"
  regime: str = ""
  cells: int
  learning_rate: float
  seed: int = 0
  varied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: int = 0
  trainable_params: int = 0
  test_score: float | None = None
  test_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  test_accuracy: float | None = None
  test_examples: int = 0
  test_skipped: int = 0
  test_not_finite: int = 0
  test_loss: float | None = None
  test_top5: float | None = None
  test_per_class: Sequence[float | None] | None = None
  chance: float | None = None
  test_majority: float | None = None
  exported: str | None = None
  best_step: int = 0
  val_score: float | None = None
  val_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  val_accuracy: float | None = None
  val_loss: float | None = None
  val_examples: int = 0
  skipped_updates: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneResult:
  """The frozen model of a run, and its outputs before and after training.

  Attributes:
    fingerprint: of its weights.
    dtype: compute dtype of the run.
    accuracy_before: on the data of `config.upstream`, without the new tasks;
      None without such data, or if its number of classes is another.
    accuracy_after: the same with the new tasks in the pass.
    outputs_bit_equal: whether all outputs on that data are bitwise identical;
      None without such data.
  """

  fingerprint: str = ""
  dtype: str = ""
  accuracy_before: float | None = None
  accuracy_after: float | None = None
  outputs_bit_equal: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
  """Cost of a sweep, and its diverged trials.

  Attributes:
    task: name under which the best trial is exported.
    variants: number of trials.
    passes: number of packs in which they were trained.
    lost: {trial: the step at which it diverged}.
    training_seconds: time of all timed steps.
    training_seconds_per_variant: the same, divided by the number of trials.
    bytes_of_one: estimated memory of a pack with one trial.
    bytes_per_variant: estimated memory of each further trial; None if all fit,
      even if each took as much as one alone.
  """

  task: str = ""
  variants: int = 0
  passes: int = 0
  lost: Mapping[str, int] = dataclasses.field(default_factory=dict)
  training_seconds: float = 0.0
  training_seconds_per_variant: float = 0.0
  bytes_of_one: int | None = None
  bytes_per_variant: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
  """The content of `result.json`.

  Attributes:
    tasks: the trials that were evaluated before they diverged, if they did; the
      best on validation first.
    backbone: the frozen model.
    data: {split: its digest}, from `DataRecord.digests`.
    left_out: the unreadable examples.
    wall_seconds: time of the run; of a killed run, since it was resumed.
    images_per_second: training speed, over all processes.
    config_changes: from `config_changes.changes`.
    sweep: None without a sweep.
  """

  tasks: tuple[TrialResult, ...] = ()
  backbone: BackboneResult = BackboneResult()
  data: Mapping[str, Mapping[str, str]] = dataclasses.field(
    default_factory=dict
  )
  left_out: tuple[str, ...] = ()
  wall_seconds: float
  images_per_second: float = 0.0
  config_changes: tuple[Mapping[str, Any], ...] = ()
  sweep: SweepResult | None = None

  def to_json(self) -> dict[str, Any]:
    """Return the content of `result.json`.

    Without a sweep it has no such key.
    """
    values = json.loads(json.dumps(dataclasses.asdict(self)))
    if self.sweep is None:
      del values["sweep"]
    return values

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "RunResult":
    """Read the result of `to_json`; unknown keys are ignored.

    Raises:
      TypeError: for values of another form.
    """
    parts = dict(values)
    for key, part in (("backbone", BackboneResult), ("sweep", SweepResult)):
      if key in values:
        parts[key] = _known(part, values[key])
    for key in ("tasks", "left_out", "config_changes"):
      parts[key] = tuple(values.get(key, ()))
    parts["tasks"] = tuple(_known(TrialResult, task) for task in parts["tasks"])
    return _known(cls, parts)


def standard_error(accuracy: float, examples: int) -> float:
  """Standard error of an accuracy; 0 without examples.

  If all or none are right, half an example counts for the other case: it is
  never 0.
  """
  if not examples:
    return 0.0
  share = min(max(accuracy, 0.5 / examples), 1 - 0.5 / examples)
  return math.sqrt(share * (1 - share) / examples)


def load_result(
  workdir: str | os.PathLike[str], name: str = RESULT
) -> RunResult | None:
  """Read the result of a run on this process; None if it has not finished.

  Args:
    workdir: of the run; local, or gs://BUCKET/DIRECTORY.
    name: of the file in it.

  Raises:
    ConfigError: if the file is not the result of a run.
  """
  file = paths.as_path(workdir) / name
  return _parse(file, _read(file))


def read_result(workdir: Path, name: str = RESULT) -> RunResult | None:
  """`load_result` by process 0, for all: others may not see the file yet."""
  file = workdir / name
  return _parse(file, processes.on_process_0(lambda: _read(file)))


def _read(file: Path) -> Mapping[str, Any] | None:
  return files.read_object(file, "wall_seconds") if file.exists() else None


def _parse(file: Path, values: Mapping[str, Any] | None) -> RunResult | None:
  try:
    return None if values is None else RunResult.from_json(values)
  except (AttributeError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{file} is not the result of a run ({error}). Restore it, or give "
      "another --workdir."
    ) from error


def _known(cls: type, values: Mapping[str, Any]) -> Any:
  """Build a dataclass from the values that are its fields."""
  names = {field.name for field in dataclasses.fields(cls)}
  return cls(**{key: v for key, v in values.items() if key in names})
