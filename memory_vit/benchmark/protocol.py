"""The protocol of VTAB-1k: a search on 800 and 200 images, then all 1,000.

The search learns every trial of `config.sweep` with every seed, in one pass
where the regime allows it, and looks at the 200 once, at its end. What is best
in the mean over seeds is learned again from the 1,000, with all seeds in one
pass; its last step is tested, once.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.benchmark.layout import TaskData
from memory_vit.config import (
  Config,
  DataConfig,
  SweepConfig,
  what_can_be_kept,
)
from memory_vit.errors import ConfigError
from memory_vit.model.regimes import REGIMES
from memory_vit.model.vit_config import RANDOM
from memory_vit.run_result import RunResult, TrialResult

# What is compared where --regimes does not say it: all that read the frozen
# backbone once for every trial, and the head that everybody begins with.
REGIMES_COMPARED = (
  "head",
  "cls_masked",
  "memory_masked",
  "norms_masked",
  "layers_masked",
  "norms_layers_masked",
)
# Evaluated at the last step alone: more than any run has.
_NEVER = 2**31 - 1
# Of all tasks, within their runs: programs that know the names of their tasks
# are then shared by all runs of the process.
NAME_IN_RUNS = "task"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
  """What is measured.

  Attributes:
    config: of all runs, but for what `search_config` and `final_config` set.
    tasks: with their data.
    missing: {task: why its data are not there}.
    regimes: how every task is learned.
    seeds: of first values.
    workdir: of all runs.
  """

  config: Config
  tasks: tuple[TaskData, ...]
  missing: Mapping[str, str]
  regimes: tuple[str, ...]
  seeds: tuple[int, ...]
  workdir: Path

  @property
  def pairs(self) -> list[tuple[TaskData, str]]:
    """Every task with every regime, in the order in which they are learned."""
    return [(data, regime) for data in self.tasks for regime in self.regimes]


def require_possible(config: Config, regimes: Sequence[str]) -> None:
  """Refuse what contradicts the protocol, before anything is read.

  Raises:
    ConfigError: for data, seeds or tasks that the protocol itself names, and
      for a regime that does not exist or is named twice.
  """
  for name in regimes:
    if name not in REGIMES or regimes.count(name) > 1:
      raise ConfigError(
        f"--regimes={','.join(regimes)}: {name!r} is "
        f"{'there twice' if name in REGIMES else 'none'}; expected some of "
        f"{', '.join(REGIMES)}, with commas between them."
      )
  default = DataConfig()
  said = {
    "data.name": config.data.name,
    "data.dir": config.data.dir,
    "data.label": config.data.label,
    "task.name": config.task.name,
    "task.attends_to": config.task.attends_to,
    "sweep.seed": config.sweep.seed,
    "pretrain.variant": config.pretrain.variant,
    "upstream.name": config.upstream.name,
  }
  for key in ("train", "validation", "test"):
    if getattr(config.data, key) != getattr(default, key):
      said[f"data.{key}"] = getattr(config.data, key)
  for key, value in said.items():
    if value:
      raise ConfigError(
        f"config.{key} is {value!r}: the benchmark sets it for every run; "
        "expected nothing there (see --dir, --seeds, --backbone)."
      )
  if config.backbone.startswith(RANDOM):
    raise ConfigError(
      f"config.backbone is {config.backbone!r}: every run would draw another "
      "one; expected the backbone as a file, or its short name."
    )


def search_config(bench: Benchmark, data: TaskData, regime: str) -> Config:
  """Configure the run that tries all settings, on 800 and 200 images."""
  config, kind = bench.config, REGIMES[regime]
  # Where trials do not share a pass, further seeds would cost as much again.
  seeds = bench.seeds if kind.shares_pass else bench.seeds[:1]
  sweep = dataclasses.replace(
    config.sweep,
    seed=seeds,
    cells=config.sweep.cells if kind.has_memory else (),
    export="best",
  )
  found = _configured(config, data, regime)
  return dataclasses.replace(
    found,
    sweep=sweep,
    data=dataclasses.replace(
      found.data, train=data.train, validation=data.held_out, test=""
    ),
  )


def final_config(
  bench: Benchmark, data: TaskData, regime: str, chosen: Mapping[str, Any]
) -> Config:
  """Configure the run that is tested, with the settings that were chosen."""
  found = _configured(bench.config, data, regime)
  overrides = (dict(chosen),) if chosen else ()
  return dataclasses.replace(
    found,
    sweep=SweepConfig(
      seed=bench.seeds,
      overrides=overrides,
      export="all",
      memory_gib=bench.config.sweep.memory_gib,
    ),
    data=dataclasses.replace(
      found.data, train=data.both, validation="", test=data.test
    ),
  )


def _configured(config: Config, data: TaskData, regime: str) -> Config:
  """What search and final run share."""
  # Whether a frozen pass is kept is said of all regimes; each keeps its own.
  what = config.keep.what
  if what != "none":
    what = what_can_be_kept(regime)
  return dataclasses.replace(
    config,
    regime=regime,
    seed=0,  # the batches are the same for all trials, and in all regimes
    eval_every=_NEVER,
    keep=dataclasses.replace(config.keep, what=what),
    task=dataclasses.replace(config.task, name=NAME_IN_RUNS),
    data=dataclasses.replace(
      config.data, name=data.name, dir=data.dir, label=data.label
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The settings that are best on the 200 images.

  Attributes:
    settings: {"learning_rate": 0.1, ...}; empty where nothing was varied.
    validation: mean accuracy over seeds.
    at_edge: of these, the settings that are the least or the greatest tried.
    tried: how many there were.
    diverged: of how many some seed diverged; they are not chosen.
  """

  settings: Mapping[str, Any]
  validation: float
  at_edge: tuple[str, ...]
  tried: int
  diverged: int


def choose(config: Config, result: RunResult) -> Choice | None:
  """Choose by the mean over seeds; None where all diverged.

  Settings at which a seed diverged are not chosen. Of equals the first is, in
  the order of the sweep.

  Args:
    config: of the search.
    result: of the search.
  """
  seeds = max(1, len(config.sweep.seed))
  lost = result.sweep.lost if result.sweep else {}
  well = [trial for trial in result.tasks if trial.name not in lost]
  groups: dict[str, list[float]] = {}
  for trial in sorted(well, key=lambda trial: trial.name):
    accuracies = groups.setdefault(_settings_key(trial), [])
    if trial.val_accuracy is not None:
      accuracies.append(trial.val_accuracy)
  means = {
    key: sum(accuracies) / seeds
    for key, accuracies in groups.items()
    if len(accuracies) == seeds
  }
  if not means:
    return None
  best = max(means, key=lambda key: means[key])
  tried = config.sweep.combinations // seeds
  return Choice(
    settings=json.loads(best),
    validation=means[best],
    at_edge=_edges(json.loads(best), config),
    tried=tried,
    diverged=tried - len(means),
  )


def _settings_key(trial: TrialResult) -> str:
  """What was varied but for the seed, to be compared."""
  settings = {k: v for k, v in trial.varied.items() if k != "seed"}
  return json.dumps(settings)


def _edges(chosen: Mapping[str, Any], config: Config) -> tuple[str, ...]:
  """Settings beyond which a better one may lie: numbers, of several."""
  tried: dict[str, list[Any]] = {
    "learning_rate": [*config.sweep.learning_rate],
    "task.cells": [*config.sweep.cells],
  }
  for overrides in config.sweep.overrides:
    for key, value in overrides.items():
      tried.setdefault(key, []).append(value)
  found = []
  for key, value in chosen.items():
    numbers = {v for v in tried.get(key, ()) if type(v) in (int, float)}
    if len(numbers) > 1 and value in (min(numbers), max(numbers)):
      found.append(key)
  return tuple(found)
