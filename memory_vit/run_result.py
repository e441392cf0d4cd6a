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

with epy.lazy_imports():  # reading a result must not import jax
  from memory_vit.runtime import processes

RESULT = "result.json"
# Version of `result.json`, raised when a field changes its name or meaning.
FORMAT = 2
# Plots beside `result.json`; ATTENTION and ANSWERS show the best task.
SWEEP, ATTENTION, ANSWERS = "sweep.png", "attention.png", "answers.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
  """Metrics of a trial, which are also in the `task.json` of its task.

  Attributes:
    name: name of the task.
    kind: "classes", "labels" or "values", see `TaskKind`.
    regime: see `regimes`.
    cells: memory cells per layer.
    learning_rate: peak learning rate.
    seed: seed of the initialization.
    varied: the options that a sweep varied, {"task.cells": 5}.
    steps: number of training steps.
    trainable_params: number of trained parameters.
    val: scores on the validation split at `best_step`, with thresholds of 0.5
      and a temperature of 1. Without that split, a head in closed form has the
      scores of its cross-validation.
    test: scores on the test split, with the task's thresholds and temperature.
    chance: for classes, the accuracy of guessing uniformly.
    majority: for classes, the accuracy of always predicting the most frequent
      class of the test split.
    exported: directory of the task in the workdir; None if it is not exported.
    best_step: step whose parameters the task has.
    skipped_updates: number of updates that were not finite.
    temperature: temperature of the task, fitted on validation or in
      cross-validation; None without either, and for values.
    uncalibrated: "loss" and "calibration_error" on the test split with a
      temperature of 1; `test` uses the temperature of the task.
    rejection: on the test split, if the task rejects images: the share
      "rejected", and the "accuracy" on all other images.
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
    fingerprint: fingerprint of the weights.
    dtype: compute dtype of the run.
    accuracy_before: accuracy on the data of `config.upstream` without the new
      tasks; None without that data, or if its number of classes differs.
    accuracy_after: the same accuracy, with the new tasks in the pass.
    outputs_bit_equal: whether all outputs on that data are bitwise identical
      before and after; None without that data.
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
    trials: number of trials.
    passes: number of packs in which the trials were trained.
    lost: {trial: the step at which it diverged}.
    training_seconds: time of all timed steps.
    training_seconds_per_trial: `training_seconds` / number of trials.
    bytes_of_one: estimated memory of a pack with one trial; None if all trials
      fit into one pack.
    bytes_per_trial: estimated memory of each further trial in a pack.
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
    tasks: all trials except those that diverged before their first evaluation;
      the best on validation first.
    backbone: the frozen model.
    data: {split: its digest}, from `DataRecord.digests`.
    left_out: lines that name the examples that could not be read.
    wall_seconds: duration of the run, or of its part since the last resume.
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
    """Return the content of `result.json`, which may have no "sweep"."""
    values = {"format": FORMAT, **dataclasses.asdict(self)}
    values = json.loads(json.dumps(values))
    if self.sweep is None:
      del values["sweep"]
    return values

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "RunResult":
    """Parse the dictionary that `to_json` returns; ignore unknown keys.

    Raises:
      TypeError: if values are missing, or have another structure.
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
  trial: TrialResult = _known(TrialResult, {**values, **scores})
  return trial


def load_result(
  workdir: str | os.PathLike[str], name: str = RESULT
) -> RunResult | None:
  """Read the result of a run, on this process; None if it has not finished.

  Args:
    workdir: directory of the run; local, or gs://BUCKET/DIRECTORY.
    name: name of the file in `workdir`.

  Raises:
    ConfigError: if the file is not the result of a run.
  """
  file = paths.as_path(workdir) / name
  return _parse(file, _read(file))


def read_result(workdir: Path, name: str = RESULT) -> RunResult | None:
  """Return a result on all processes; only process 0 needs the file."""
  file = workdir / name
  return _parse(file, processes.on_process_0(lambda: _read(file)))


def _read(file: Path) -> Mapping[str, Any] | None:
  return files.read_object(file, "wall_seconds") if file.exists() else None


def _require_format(file: Path, version: Any) -> None:
  if version != FORMAT:
    raise ConfigError(
      f"{file} has the format {brief(version)}, but this version of memory_vit "
      f"reads {FORMAT}: train again in another --workdir, or use the version "
      "that wrote the file."
    )


def _parse(file: Path, values: Mapping[str, Any] | None) -> RunResult | None:
  if values is None:
    return None
  _require_format(file, values.get("format"))
  try:
    return RunResult.from_json(values)
  except (AttributeError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{file} is not the result of a run: {error}. Restore the file, or give "
      "another --workdir."
    ) from error


def _known(cls: type, values: Mapping[str, Any]) -> Any:
  """Return an instance of `cls`; ignore keys of `values` that are no fields."""
  names = {field.name for field in dataclasses.fields(cls)}
  return cls(**{key: v for key, v in values.items() if key in names})
