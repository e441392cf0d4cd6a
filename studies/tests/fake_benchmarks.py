"""Benchmarks without training: a configuration, and runs that are pretended."""

import dataclasses

import vtab_miniature
from fake_studies import fingerprint, scores_of

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.configs import vtab
from memory_vit.run_result import (
  BackboneResult,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime import files
from memory_vit.train import sweep
from studies.vtab import layout, runner, testing
from studies.vtab.protocol import NAME_IN_RUNS, Benchmark
from studies.vtab.tasks import choose

RATES = (0.01, 0.1, 1.0)


def vtab_config(**changes):
  """That of the benchmark, with three rates and small batches."""
  config = config_lib.from_dict(vtab.get_config().to_dict())
  return dataclasses.replace(
    config,
    epochs=2.0,
    batch_size=8,
    batch_size_eval=8,
    sweep=config_lib.SweepConfig(learning_rate=RATES),
    **changes,
  )


def small_benchmark(tmp_path, backbone_file, names, **changes) -> Benchmark:
  """Of a few tasks of the miniature."""
  root = tmp_path / "data"
  if not root.exists():
    vtab_miniature.write_folder(root, names, train=8, held_out=4, test=4)
  found, missing = layout.find(root, choose(names))
  values = {"regimes": ("head",), "seeds": (0, 1), **changes}
  return Benchmark(
    config=vtab_config(backbone=str(backbone_file)),
    tasks=found,
    missing=missing,
    **values,
  )


def run_benchmark(bench, workdir):
  runner.run_benchmark(bench, workdir, command="studies.vtab")


def accuracies(config):
  """On validation the middle rate is best, on test the lowest one."""
  rate = config.learning_rate
  seed = 0.01 * config.seed
  return 0.6 - abs(rate - 0.1) / 2 + seed, 0.5 - rate / 10 - seed


def write_digest(directory, digest):
  """Make as if a run had exported a task."""
  task = directory / "tasks" / NAME_IN_RUNS
  task.mkdir(parents=True, exist_ok=True)
  files.write_json(task / "task.json", {"sha256": digest})


class FakeRuns:
  """Stands for training and testing: accuracies without either."""

  def __init__(self, accuracy=accuracies, stops_at=0, diverges=None):
    self.accuracy, self.stops_at = accuracy, stops_at
    self.diverges = diverges or (lambda config: False)
    self.configs, self.directories = [], []
    self.tested = []  # the runs of every pass

  def install(self, monkeypatch):
    """Take the place of what trains, tests and exports."""
    monkeypatch.setattr(mv, "train_and_evaluate", self)
    monkeypatch.setattr(testing, "measure", self.measure)
    monkeypatch.setattr(runner, "export", lambda *arguments: None)
    return self

  def measure(self, engine, bench, data, runs):
    """Test what was trained by now, here or by another."""
    self.tested.append([(data.task.name, *which) for which in runs])
    found = {}
    for which, directory in runs.items():
      values = files.read_object(directory / "config.json")
      (trial,) = sweep.trials_of(config_lib.from_dict(values), NAME_IN_RUNS)
      found[which] = testing.TaskScore(
        accuracy=self.accuracy(trial.config)[1],
        loss=1.0,
        examples=4,
        skipped=0,
        seconds=0.5,
      )
    return found

  def __call__(self, config, directory, stop=None):
    self.configs.append(config)
    self.directories.append(directory)
    if len(self.configs) == self.stops_at:
      raise KeyboardInterrupt
    directory.mkdir(parents=True)
    entries, lost = [], {}
    for trial in sweep.trials_of(config, config.task.name):
      own = trial.config
      validation, _ = self.accuracy(own)
      if self.diverges(own):
        lost[trial.name] = 1
        continue
      entries.append(
        TrialResult(
          name=trial.name,
          regime=own.regime,
          cells=0,
          learning_rate=own.learning_rate,
          seed=own.seed,
          varied=dict(trial.varied),
          val=scores_of(validation if own.data.validation else None),
          trainable_params=100,
        )
      )
    result = RunResult(
      tasks=tuple(entries),
      backbone=BackboneResult(fingerprint=fingerprint()),
      wall_seconds=8.0,
      sweep=SweepResult(passes=1, training_seconds=2.0, lost=lost),
    )
    if entries:
      write_digest(directory, f"{directory}")
    files.write_json(directory / "config.json", config_lib.to_dict(config))
    files.write_json(directory / "result.json", result.to_json())
    return result
