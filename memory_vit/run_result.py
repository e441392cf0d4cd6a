"""Result of a run: the fields of `result.json`, in their order."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError
from memory_vit.kinds.scores import Scores
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import brief

with epy.lazy_imports():  # a report of results is made without jax
  from memory_vit.runtime import processes

RESULT = "result.json"
# Of `result.json`; it changes with the names and meanings of its fields.
FORMAT = 2
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
    val: on the validation split, at `best_step`, with thresholds of 0.5 and a
      temperature of 1; of a head in closed form without such a split, of its
      cross-validation.
    test: on the test split, with the thresholds and temperature of the task.
    chance: of classes, the accuracy of guessing uniformly.
    majority: of classes, the accuracy of always predicting the most frequent
      one, on the test split.
    exported: directory of the task in the workdir; None if it is not exported.
    best_step: at which the parameters were taken.
    skipped_updates: the number of updates that were not finite.
    temperature: of the task, fitted on images that did not train it; None if
      there were none, and for values.
    uncalibrated: "loss" and "calibration_error" on the test split at a
      temperature of 1; `test` has those of the task.
    rejection: of a task that rejects images, on the test split: the share
      "rejected", and the "accuracy" of the others.
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
  val: Scores = Scores()
  test: Scores = Scores()
  chance: float | None = None
  majority: float | None = None
  exported: str | None = None
  best_step: int = 0
  skipped_updates: int = 0
  temperature: float | None = None
  uncalibrated: Mapping[str, float | None] = dataclasses.field(
    default_factory=dict
  )
  rejection: Mapping[str, float | None] = dataclasses.field(
    default_factory=dict
  )


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
    trials: their number.
    passes: number of packs in which they were trained.
    lost: {trial: the step at which it diverged}.
    training_seconds: time of all timed steps.
    training_seconds_per_trial: the same, divided by the number of trials.
    bytes_of_one: estimated memory of a pack with one trial; None if all trials
      fit into one pack.
    bytes_per_trial: the same of each further trial.
  """

  task: str = ""
  trials: int = 0
  passes: int = 0
  lost: Mapping[str, int] = dataclasses.field(default_factory=dict)
  training_seconds: float = 0.0
  training_seconds_per_trial: float = 0.0
  bytes_of_one: int | None = None
  bytes_per_trial: int | None = None


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
    config_changes: options and data that changed when the run was resumed,
      each {"step", "key", "from", "to"}.
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
    values = {"format": FORMAT, **dataclasses.asdict(self)}
    values = json.loads(json.dumps(values))
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
    parts["tasks"] = tuple(map(_trial, parts["tasks"]))
    return _known(cls, parts)


def _trial(values: Mapping[str, Any]) -> TrialResult:
  scores = {
    split: _known(Scores, values[split])
    for split in ("val", "test")
    if split in values
  }
  found: TrialResult = _known(TrialResult, {**values, **scores})
  return found


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


def _require_format(file: Path, found: Any) -> None:
  if found != FORMAT:
    raise ConfigError(
      f"{file} has the format {brief(found)}, this version of memory_vit reads "
      f"{FORMAT}: train again in another --workdir, or use the version that "
      "wrote it."
    )


def _parse(file: Path, values: Mapping[str, Any] | None) -> RunResult | None:
  if values is None:
    return None
  _require_format(file, values.get("format"))
  try:
    return RunResult.from_json(values)
  except (AttributeError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{file} is not the result of a run ({error}). Restore it, or give "
      "another --workdir."
    ) from error


def _known(cls: type, values: Mapping[str, Any]) -> Any:
  """Build a dataclass from the values that are its fields."""
  names = {field.name for field in dataclasses.fields(cls)}
  return cls(**{key: v for key, v in values.items() if key in names})
