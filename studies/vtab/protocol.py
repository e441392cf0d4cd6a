"""The protocol of VTAB-1k: a search on 800 and 200 images, then all 1,000.

The search trains every trial of `config.sweep` with the first seed, in one pass
if the regime allows it, and evaluates once on the 200, at its end. The best
settings are trained on the 1,000 by a run for each seed, which determines the
order of images and the initialization; its last step is tested, once.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import memory_vit as mv
from memory_vit.config import SweepConfig, cacheable_part
from memory_vit.model import REGIMES, get_regime
from studies.vtab.layout import TaskData

# The default of --regimes: those whose trials share a pass of the backbone.
# `head` is the usual baseline; `probe` is the best on features alone, for one
# more pass over the test images.
REGIMES_COMPARED = (
  "head",
  "probe",
  "cls_masked",
  "memory_masked",
  "norms_masked",
  "layers_masked",
  "norms_layers_masked",
)
# More steps than any run has: evaluation happens at the last step only.
_NEVER = 2**31 - 1
_SET_BY_PROTOCOL = (
  "seed", "sweep.regime", "sweep.seed", "task.name", "task.attends_to",
  "upstream.name", "data.name", "data.dir", "data.label",
  "data.seed", "data.train", "data.validation", "data.test",
)  # fmt: skip
# The name of every task within its run, so that all runs of the process share
# compiled programs, which contain the names of tasks.
NAME_IN_RUNS = "task"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
  """A benchmark to run: tasks, regimes, seeds."""

  config: mv.Config
  tasks: tuple[TaskData, ...]
  missing: Mapping[str, str]  # {task: why its data are missing}
  regimes: tuple[str, ...]
  seeds: tuple[int, ...]  # of the final runs; the search has the first one

  @property
  def pairs(self) -> list[tuple[TaskData, str]]:
    """Every task with every regime, in the order of training."""
    return [(data, regime) for data in self.tasks for regime in self.regimes]


def require_possible(config: mv.Config, regimes: Sequence[str]) -> None:
  """Refuse options that contradict the protocol, before reading data."""
  for name in regimes:
    if name not in REGIMES or regimes.count(name) > 1:
      raise mv.MemoryVitError(
        f"--regimes={','.join(regimes)}: {name!r} is "
        f"{'named twice' if name in REGIMES else 'no regime'}; expected some "
        f"of {', '.join(REGIMES)}, separated by commas."
      )
  default = mv.Config()
  for key in _SET_BY_PROTOCOL:
    value_of = operator.attrgetter(key)
    value = value_of(config)
    if value != value_of(default):
      raise mv.MemoryVitError(
        f"config.{key} is {value!r}: the benchmark sets it for every run; "
        "expected nothing there (see --dir, --seeds, --backbone)."
      )
  if config.backbone.startswith("random:"):
    raise mv.MemoryVitError(
      f"config.backbone is {config.backbone!r}: every run would have another "
      "one; expected the backbone as a file, or its short name."
    )


def search_config(bench: Benchmark, data: TaskData, regime: str) -> mv.Config:
  """Configure the run that tries all settings, on 800 and 200 images."""
  config, first = bench.config, bench.seeds[0]
  sweep = dataclasses.replace(
    config.sweep,
    seed=(first,),
    cells=config.sweep.cells if get_regime(regime).has("memory") else (),
    export="best",
  )
  return _configured(
    config, data, regime, sweep, train=data.train, validation=data.held_out
  )


def final_config(
  bench: Benchmark,
  data: TaskData,
  regime: str,
  chosen: Mapping[str, Any],
  seed: int,
) -> mv.Config:
  """Configure the final run of a seed; its task is tested beside others."""
  sweep = SweepConfig(
    seed=(seed,),
    overrides=(dict(chosen),) if chosen else (),
    export="all",
    memory_gib=bench.config.sweep.memory_gib,
  )
  return _configured(
    bench.config, data, regime, sweep, train=data.both, validation=""
  )


def test_config(bench: Benchmark, data: TaskData) -> mv.Config:
  """A configuration with the test split, for no run."""
  found = final_config(bench, data, bench.regimes[0], {}, bench.seeds[0])
  return dataclasses.replace(
    found, data=dataclasses.replace(found.data, test=data.test)
  )


def _configured(
  config: mv.Config,
  data: TaskData,
  regime: str,
  sweep: SweepConfig,
  *,
  train: str,
  validation: str,
) -> mv.Config:
  """Set the options of search and final runs; neither is tested."""
  # Each regime caches its own part of the frozen pass.
  what = config.cache.what
  if what in ("contexts", "features"):
    what = cacheable_part(regime)
  return dataclasses.replace(
    config,
    regime=regime,
    seed=sweep.seed[0],  # also of the order of images, the same in all regimes
    eval_every=_NEVER,
    wandb=config.wandb.of_many(),
    log_images=0,
    export_orbax=False,
    cache=dataclasses.replace(config.cache, what=what),
    task=dataclasses.replace(config.task, name=NAME_IN_RUNS),
    sweep=sweep,
    data=dataclasses.replace(
      config.data,
      name=data.name,
      dir=data.dir,
      label=data.label,
      train=train,
      validation=validation,
      test="",
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSettings:
  """The settings that are best on the 200 images."""

  settings: Mapping[str, Any]  # {"learning_rate": 0.1}; {} if none varied
  validation: float  # accuracy
  at_edge: tuple[str, ...]  # settings that are the lowest or highest tried
  tried: int
  diverged: int


def choose(config: mv.Config, result: mv.RunResult) -> ChosenSettings | None:
  """Choose the best settings, of equals the first; None if all diverged."""
  lost = result.sweep.lost if result.sweep else {}
  well = {
    trial.name: trial.val.accuracy
    for trial in result.tasks
    if trial.name not in lost and trial.val.accuracy is not None
  }
  if not well:
    return None
  best = max(sorted(well), key=lambda name: well[name])
  (varied,) = (trial.varied for trial in result.tasks if trial.name == best)
  settings = {k: v for k, v in varied.items() if k != "seed"}
  tried = config.sweep.combinations
  return ChosenSettings(
    settings=settings,
    validation=well[best],
    at_edge=_edges(settings, config),
    tried=tried,
    diverged=tried - len(well),
  )


def _edges(chosen: Mapping[str, Any], config: mv.Config) -> tuple[str, ...]:
  """Numbers that are the lowest or highest of several that were tried."""
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
