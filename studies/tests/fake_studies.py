"""Studies without training: a configuration, and runs that are pretended."""

import dataclasses
import functools

from conftest import tiny_backbone

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.kinds.scores import Scores
from memory_vit.model.regimes import REGIMES
from memory_vit.run_result import (
  BackboneResult,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime import files
from memory_vit.train import sweep
from studies.paper import plan, report, runner
from studies.paper.section import Section
from studies.paper.study import Study
from studies.paper.trials import diverged_trials


def small_study(backbone_file) -> Study:
  """Two rates, seeds, cells and other data sets, on the embedded digits."""
  values = digits.get_config()
  values.upstream.name = ""
  values.backbone, values.gelu = str(backbone_file), "tanh"
  values.batch_size, values.batch_size_eval = 16, 64
  values.total_steps, values.eval_every, values.checkpoint_every = 2, 2, 2
  return Study(
    config=config_lib.from_dict(values.to_dict()),
    learning_rates=(0.3, 0.1),
    seeds=(0, 4),
    cells=(1, 5),
    others=("digits:0-4", "digits:2-6"),
  )


def configured(study, **values):
  """A study with other options of its configuration."""
  config = dataclasses.replace(study.config, **values)
  return dataclasses.replace(study, config=config)


def run_study(study, workdir, parts):
  runner.run_study(study, workdir, parts, command="studies.paper")


@functools.cache
def fingerprint():
  return tiny_backbone(num_classes=5).fingerprint


def scores_of(accuracy, examples=0) -> Scores:
  """Those of a task of classes; None if there is no such split."""
  if accuracy is None:
    return Scores()
  return Scores(score=accuracy, metrics={"top1": accuracy}, examples=examples)


class FakeRuns:
  """Stands for `mv.train_and_evaluate`: accuracies without training."""

  def __init__(self, accuracy, stops_at=0):
    self.accuracy, self.stops_at = accuracy, stops_at
    self.calls = []

  def install(self, monkeypatch):
    monkeypatch.setattr(mv, "train_and_evaluate", self)
    return self

  def __call__(self, config, directory, stop=None):
    self.calls.append(directory.name)
    if len(self.calls) == self.stops_at:
      raise KeyboardInterrupt
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for trial in sweep.trials_of(config, "t"):
      own = trial.config
      validation, test = self.accuracy(own)
      trained = REGIMES[own.regime].trained
      entries.append(
        TrialResult(
          name=trial.name,
          cells=own.task.cells if "memory" in trained else 0,
          learning_rate=own.learning_rate,
          val=scores_of(validation),
          test=scores_of(test if own.data.test else None, 200),
          trainable_params=100,
          exported=f"tasks/{trial.name}",
        )
      )
    return self.write(config, directory, entries)

  def write(self, config, directory, entries):
    (directory / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
    files.write_json(directory / "config.json", config_lib.to_dict(config))
    result = RunResult(
      tasks=tuple(entries),
      backbone=BackboneResult(fingerprint=fingerprint()),
      wall_seconds=32.0,
      sweep=SweepResult() if config.sweep.is_on else None,
    )
    files.write_json(directory / "result.json", result.to_json())
    return result


def accuracies(config):
  """On validation the higher rate is better, on test the lower one."""
  return config.learning_rate, 0.5 - config.learning_rate / 10


def follow(study, parts, accuracy, diverges=lambda run, rate: False):
  """Plans until there is nothing new, as if every run was finished at once."""
  trials, order = {}, []
  for part in parts:
    while left := [
      run
      for run in plan.runs_of(study, part, trials)
      if run.learning_rates and run.name not in trials
    ]:
      run = left[0]
      order.append(run)
      trials[run.name] = [
        t if diverges(run, t.learning_rate) else dataclasses.replace(
          t, validation=accuracy(run, t.learning_rate), test=0.5,
          parameters=9, task="t", examples=100,
        )
        for t in diverged_trials(run)
      ]  # fmt: skip
  return order, trials


def sections(workdir) -> dict[str, Section]:
  """What the report of a study is made of."""
  return report.sections(report.read_content(workdir))
