"""Evaluate, rank and export the trained tasks of a run; build its result."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.backbones.save import save_backbone
from memory_vit.config import Config, to_dict
from memory_vit.evaluation import hits as test_hits
from memory_vit.evaluation.hits import Hits
from memory_vit.exports import orbax_checkpoint
from memory_vit.kinds import KINDS
from memory_vit.kinds.predictions import (
  LabelPredictions,
  SplitPredictions,
  ValuePredictions,
)
from memory_vit.kinds.scores import Also, Evaluation, Scores
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, fingerprint_of
from memory_vit.model.task import Task
from memory_vit.run_result import (
  BackboneResult,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime import files, processes
from memory_vit.tasks import store
from memory_vit.train import sweep
from memory_vit.train.evaluate import evaluate, uncalibrated
from memory_vit.train.fit import PackResult
from memory_vit.train.inputs import RunInputs
from memory_vit.train.passes import packs_by_group
from memory_vit.train.sweep import PassPlan, Trial

# Names of the temporary files that `files.replacing`,
# `processes.require_shared`, `bucket` and `lease` make in the workdir. A killed
# run may leave such files.
_BEGUN = re.compile(
  r"\..+\.(?:npz|png)\.[0-9a-f]{8}\.part"
  r"|\.(?:seen-by-all|written|lock)-[0-9a-f]{16}"
)


AnyPredictions = SplitPredictions | LabelPredictions | ValuePredictions


@dataclasses.dataclass(frozen=True)
class TrainedTrial:
  """A trial after training; `task` has the parameters best on validation."""

  trial: Trial
  task: Task
  result: TrialResult
  hits: Hits | None = None  # which test examples the task gets right
  predictions: AnyPredictions | None = None

  def exported_as(self, name: str) -> "TrainedTrial":
    """Return a copy that records that the task is exported as tasks/NAME."""
    result = dataclasses.replace(self.result, exported=f"tasks/{name}")
    return dataclasses.replace(self, result=result)

  def to_task(self, name: str) -> Task:
    """Return the task under a name, with its configuration and metrics."""
    result = dataclasses.replace(self.exported_as(name).result, name=name)
    provenance = {
      "config": to_dict(self.trial.config),
      "metrics": dataclasses.asdict(result),
    }
    spec = dataclasses.replace(self.task.spec, name=name)
    return Task(spec, self.task.params, provenance)


def evaluate_trained(
  inputs: RunInputs, plan: PassPlan, packs: Sequence[PackResult]
) -> list[TrainedTrial]:
  """Evaluate all trained trials on the test split, if there is one.

  Only the trial that is best on validation keeps its predictions, for plots:
  the predictions of hundreds of trials would fill the memory.
  """
  split = inputs.splits.get("test")
  has_hits = KINDS[inputs.config.task.kind].one_is_right
  best = _best_on_validation(packs) if inputs.config.log_images else None
  trained = []
  for group, numbered in packs_by_group(inputs, plan):
    for number, trials in numbered:
      pack, tests = packs[number], {}
      if split and pack.tasks:
        also: tuple[Also, ...] = ("hits",) if has_hits else ()
        if best in pack.tasks:
          also += ("predictions",)
        tests = evaluate(
          group,
          list(pack.tasks.values()),
          split,
          also=also,
          predictions_of=best,
        )
      trained += [
        _trained(trial, pack, tests)
        for trial in trials
        if trial.name in pack.tasks
      ]
  return trained


def _trained(
  trial: Trial, pack: PackResult, tests: Mapping[str, Evaluation]
) -> TrainedTrial:
  test = tests.get(trial.name)
  task, validated = pack.tasks[trial.name], pack.best[trial.name]
  result = dataclasses.replace(
    _result(trial, task, test),
    steps=pack.steps,
    best_step=validated.step,
    val=validated.scores,
    skipped_updates=pack.skipped.get(trial.name, 0),
    **_calibration(task, test, tests.get(uncalibrated(trial.name))),
  )
  if test is None:
    return TrainedTrial(trial, task, result)
  return TrainedTrial(trial, task, result, test.hits, test.predictions)


def _calibration(
  task: Task, test: Evaluation | None, plain: Evaluation | None
) -> dict[str, Any]:
  """Return the `TrialResult` fields about temperature and unknown images."""
  kind = task.spec.kind
  fields: dict[str, Any] = {}
  if kind.temperature != 1:
    fields["temperature"] = kind.temperature
  if plain:
    key = "calibration_error"
    fields["uncalibrated"] = {
      "loss": plain.scores.loss, key: plain.scores.metrics[key]
    }  # fmt: skip
  if test and test.rejection:
    fields["rejection"] = dataclasses.asdict(test.rejection)
  return fields


def _best_on_validation(packs: Sequence[PackResult]) -> str | None:
  """Return the name of the trial that is best on validation.

  Return None if no trial has a task.
  """
  places = {
    name: _place(pack.best[name].scores)
    for pack in packs
    for name in pack.tasks
  }
  return min(places, key=places.__getitem__, default=None)


def _place(scores: Scores) -> tuple[float, float]:
  """Return the sort key of a trial: highest score first, then lowest loss."""
  return (
    math.inf if scores.score is None else -scores.score,
    math.inf if scores.loss is None else scores.loss,
  )


def _result(trial: Trial, task: Task, test: Evaluation | None) -> TrialResult:
  """Return the result of a trial, without its validation scores."""
  config, kind = trial.config, trial.config.task.kind
  return TrialResult(
    name=task.spec.name,
    kind=kind,
    regime=config.regime,
    cells=task.spec.cells,
    learning_rate=config.learning_rate,
    seed=config.seed,
    varied=dict(trial.varied),
    trainable_params=trees.count(task.params),
    test=test.scores if test else Scores(),
    chance=KINDS[kind].chance(task.spec.num_classes),
    majority=test.majority if test else None,
  )


def rank(
  trained: Sequence[TrainedTrial], config: Config, name: str
) -> list[TrainedTrial]:
  """Sort trials, best on validation first; record which are exported."""
  best, *rest = sorted(trained, key=lambda t: _place(t.result.val))
  ranked, regimes = [best.exported_as(name)], {best.result.regime}
  for trial in rest:
    regime = trial.result.regime
    if _exports_all(config):
      trial = trial.exported_as(trial.result.name)
    elif config.sweep.regime and regime not in regimes:
      trial = trial.exported_as(sweep.best_of_regime(name, regime))
    regimes.add(regime)
    ranked.append(trial)
  return ranked


def export(
  inputs: RunInputs, name: str, ranked: Sequence[TrainedTrial], workdir: Path
) -> list[Task]:
  """Write the new tasks, and the tasks that they attend to, to `tasks/`.

  Also write parameters to `orbax/` with `config.export_orbax`, the whole model
  to NAME.npz in the regime `full`, and `hits.json` with a test split. All
  processes must call; process 0 writes. Return the new tasks, read from files.
  """
  tasks = [ranked[0].to_task(name)]
  if _exports_all(inputs.config):
    tasks += [trial.to_task(trial.result.name) for trial in ranked]
  else:
    tasks += [
      trial.to_task(Path(trial.result.exported).name)
      for trial in ranked[1:]
      if trial.result.exported
    ]
  directory = workdir / "tasks"
  for task in (*inputs.parents, *tasks):
    processes.on_process_0(
      functools.partial(store.save_task, task, directory / task.spec.name)
    )
  if tasks[0].spec.learned.holds_backbone:
    model = workdir / f"{name}.npz"
    with files.writing(model):
      save_model(tasks[0], inputs.backbone, model)
  if hits := {t.result.name: t.hits for t in ranked if t.hits is not None}:
    test_hits.write_hits(workdir, hits)
  if inputs.config.export_orbax:
    _export_orbax(tasks, workdir / orbax_checkpoint.DIRECTORY)
  return [
    store.load_task(directory / task.spec.name, inputs.backbone)
    for task in tasks
  ]


def run_result(
  inputs: RunInputs,
  name: str,
  plan: PassPlan,
  packs: Sequence[PackResult],
  ranked: Sequence[TrainedTrial],
  backbone: BackboneResult,
  seconds: float,
) -> RunResult:
  """Return the content of `result.json`; all processes must call."""
  splits = inputs.splits.values()
  unreadable = [
    split.describe(index)
    for split in splits
    for index in split.sync_unreadable()
  ]
  # Splits may overlap, so the same line may occur several times in this list.
  left_out = [line for split in splits for line in split.left_out]
  changes: list[Mapping[str, Any]] = []
  for pack in packs:
    changes += [change for change in pack.changes if change not in changes]
  timed = sum(pack.seconds for pack in packs)
  examples = sum(pack.examples for pack in packs)
  return RunResult(
    tasks=tuple(trial.result for trial in ranked),
    backbone=backbone,
    data=inputs.record.digests,
    left_out=(*unreadable, *dict.fromkeys(left_out)),
    wall_seconds=round(seconds, 2),
    images_per_second=round(examples / timed, 1) if timed else 0.0,
    config_changes=tuple(changes),
    sweep=(
      _sweep_result(packs, name, plan) if inputs.config.sweep.is_on else None
    ),
  )


def _sweep_result(
  packs: Sequence[PackResult], name: str, plan: PassPlan
) -> SweepResult:
  seconds = sum(pack.seconds for pack in packs)
  count = sum(len(pack.best) for pack in packs)
  return SweepResult(
    task=name,
    trials=count,
    passes=len(packs),
    lost={name: at for pack in packs for name, at in pack.lost.items()},
    training_seconds=round(seconds, 2),
    training_seconds_per_trial=round(seconds / count, 2),
    bytes_of_one=plan.bytes_of_one,
    bytes_per_trial=plan.bytes_per_trial,
  )


def _exports_all(config: Config) -> bool:
  return config.sweep.is_on and config.sweep.export == "all"


def tidy(workdir: Path) -> None:
  """Remove files that killed runs left half-written.

  No other run may use `workdir`. `Checkpoints` tidies its own directory.
  """
  with files.writing(workdir):
    files.tidy(workdir / "tasks")
    files.tidy(workdir / orbax_checkpoint.DIRECTORY)
    for path in workdir.glob(".*"):
      if _BEGUN.fullmatch(path.name) and path.is_file():
        path.unlink()


def _export_orbax(tasks: Sequence[Task], directory: Path) -> None:
  """Write tasks as orbax checkpoints, except tasks that train a backbone."""
  for task in tasks:
    if not task.spec.learned.holds_backbone:
      write = functools.partial(_write_orbax, task, directory / task.spec.name)
      processes.on_process_0(write)


def _write_orbax(task: Task, path: Path) -> None:
  with files.writing(path, ValueError):  # orbax raises ValueError
    orbax_checkpoint.write(task.params, path.absolute())


def save_model(task: Task, backbone: Backbone, path: Path) -> None:
  """Write a task of the regime `full` as a ViT in the published layout."""
  config = dataclasses.replace(
    backbone.config, num_classes=task.spec.num_classes, representation_size=0
  )
  params = {**task.params["backbone"], "head": task.params["head"]}
  fingerprint = fingerprint_of(config, params)
  model = Backbone(config, params, fingerprint, task.spec.preprocessing)
  processes.on_process_0(functools.partial(save_backbone, model, path))
