"""Benchmarks without training: a configuration, and runs that are pretended."""

import dataclasses

import vtab_miniature
from fake_studies import fingerprint

from memory_vit import config as config_lib
from memory_vit.benchmark import layout
from memory_vit.benchmark.protocol import Benchmark
from memory_vit.benchmark.tasks import choose
from memory_vit.configs import vtab
from memory_vit.run_result import (
  BackboneResult,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime import files
from memory_vit.training import sweep

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
    workdir=tmp_path / "run",
    **values,
  )


def accuracies(config):
  """On validation the middle rate is best, on test the lowest one."""
  rate = config.learning_rate
  seed = 0.01 * config.seed
  return 0.6 - abs(rate - 0.1) / 2 + seed, 0.5 - rate / 10 - seed


class FakeRuns:
  """Stands for `run.train_and_evaluate`: accuracies without training."""

  def __init__(self, accuracy=accuracies, stops_at=0, diverges=None):
    self.accuracy, self.stops_at = accuracy, stops_at
    self.diverges = diverges or (lambda config: False)
    self.configs, self.directories = [], []

  def __call__(self, config, directory, stop=None):
    self.configs.append(config)
    self.directories.append(directory)
    if len(self.configs) == self.stops_at:
      raise KeyboardInterrupt
    directory.mkdir(parents=True)
    entries, lost = [], {}
    for trial in sweep.trials_of(config, config.task.name):
      own = trial.config
      validation, test = self.accuracy(own)
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
          val_accuracy=validation if own.data.validation else None,
          test_accuracy=test if own.data.test else None,
          test_examples=4 if own.data.test else 0,
          trainable_params=100,
        )
      )
    result = RunResult(
      tasks=tuple(entries),
      backbone=BackboneResult(fingerprint=fingerprint()),
      wall_seconds=8.0,
      sweep=SweepResult(passes=1, training_seconds=2.0, lost=lost),
    )
    files.write_json(directory / "config.json", config_lib.to_dict(config))
    files.write_json(directory / "result.json", result.to_json())
    return result
