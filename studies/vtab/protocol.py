"""The protocol of VTAB-1k: a search on 800 and 200 images, then all 1,000.

The search learns every trial of `config.sweep` with the first seed, in one pass
where the regime allows it, and looks at the 200 once, at its end. What is best
is learned again from the 1,000, by a run for each seed, which orders the images
and draws the first values; its last step is tested, once.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import memory_vit as mv
from memory_vit.config import DataConfig, SweepConfig, cacheable_part
from memory_vit.model import REGIMES, get_regime
from studies.vtab.layout import TaskData

# What is compared where --regimes does not say it: what reads the frozen
# backbone once for all trials. `head` is what everybody begins with; `probe` is
# the best on features alone, for one more pass over the test images.
REGIMES_COMPARED = (
  "head",
  "probe",
  "cls_masked",
  "memory_masked",
  "norms_masked",
  "layers_masked",
  "norms_layers_masked",
)
# Evaluated at the last step alone: more than any run has.
_NEVER = 2**31 - 1
_SET_BY_PROTOCOL = (
  "seed", "sweep.regime", "sweep.seed", "task.name", "task.attends_to",
  "pretrain.variant", "upstream.name", "data.name", "data.dir", "data.label",
  "data.seed", "data.train", "data.validation", "data.test",
)  # fmt: skip
# Of all tasks, within their runs: programs that know the names of their tasks
# are then shared by all runs of the process.
NAME_IN_RUNS = "task"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
  """A benchmark to run: tasks, regimes, seeds.

  Attributes:
    config: of all runs, but for what `search_config` and `final_config` set.
    tasks: with their data.
    missing: {task: why its data are not there}.
    regimes: how every task is learned.
    seeds: of the final runs; the search is of the first.
  """

  config: mv.Config
  tasks: tuple[TaskData, ...]
  missing: Mapping[str, str]
  regimes: tuple[str, ...]
  seeds: tuple[int, ...]

  @property
  def pairs(self) -> list[tuple[TaskData, str]]:
    """Every task with every regime, in the order in which they are learned."""
    return [(data, regime) for data in self.tasks for regime in self.regimes]


def require_possible(config: mv.Config, regimes: Sequence[str]) -> None:
  """Refuse what contradicts the protocol, before anything is read.

  Raises:
    MemoryVitError: for data, seeds or tasks that the protocol itself names, and
      for a regime that does not exist or is named twice.
  """
  for name in regimes:
    if name not in REGIMES or regimes.count(name) > 1:
      raise mv.MemoryVitError(
        f"--regimes={','.join(regimes)}: {name!r} is "
        f"{'there twice' if name in REGIMES else 'none'}; expected some of "
        f"{', '.join(REGIMES)}, with commas between them."
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
      f"config.backbone is {config.backbone!r}: every run would draw another "
      "one; expected the backbone as a file, or its short name."
    )


def search_config(bench: Benchmark, data: TaskData, regime: str) -> mv.Config:
  """Configure the run that tries all settings, on 800 and 200 images."""
  config, first = bench.config, bench.seeds[0]
  sweep = dataclasses.replace(
    config.sweep,
    seed=(first,),
    cells=config.sweep.cells if get_regime(regime).has_memory else (),
    export="best",
  )
  found = _configured(config, data, regime, first)
  return dataclasses.replace(
    found,
    sweep=sweep,
    data=dataclasses.replace(
      found.data, train=data.train, validation=data.held_out, test=""
    ),
  )


def final_config(
  bench: Benchmark,
  data: TaskData,
  regime: str,
  chosen: Mapping[str, Any],
  seed: int,
) -> mv.Config:
  """Configure the run of a seed, with the settings that were chosen.

  It evaluates nothing: the task that it exports is tested beside others.
  """
  found = _configured(bench.config, data, regime, seed)
  overrides = (dict(chosen),) if chosen else ()
  return dataclasses.replace(
    found,
    sweep=SweepConfig(
      seed=(seed,),
      overrides=overrides,
      export="all",
      memory_gib=bench.config.sweep.memory_gib,
    ),
    data=dataclasses.replace(
      found.data, train=data.both, validation="", test=""
    ),
  )


def test_config(bench: Benchmark, data: TaskData) -> mv.Config:
  """Name the split on which tasks are tested, of no run."""
  found = final_config(bench, data, bench.regimes[0], {}, bench.seeds[0])
  return dataclasses.replace(
    found, data=dataclasses.replace(found.data, test=data.test)
  )


def _data_of(config: mv.Config, data: TaskData) -> DataConfig:
  """The options of the data of a task, without splits."""
  return dataclasses.replace(
    config.data, name=data.name, dir=data.dir, label=data.label
  )


def _configured(
  config: mv.Config, data: TaskData, regime: str, seed: int
) -> mv.Config:
  """Set the options that search and final runs share."""
  # Whether a frozen pass is kept is said of all regimes; each keeps its own.
  what = config.keep.what
  if what in ("contexts", "features"):
    what = cacheable_part(regime)
  return dataclasses.replace(
    config,
    regime=regime,
    seed=seed,  # of the order of the images, too: the same in all regimes
    eval_every=_NEVER,
    wandb=config.wandb.of_many(),
    log_images=0,
    export_orbax=False,
    keep=dataclasses.replace(config.keep, what=what),
    task=dataclasses.replace(config.task, name=NAME_IN_RUNS),
    data=_data_of(config, data),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSettings:
  """The settings that are best on the 200 images.

  Attributes:
    settings: {"learning_rate": 0.1, ...}; empty where nothing was varied.
    validation: accuracy on them.
    at_edge: of these, the settings that are the least or the greatest tried.
    tried: how many there were.
    diverged: how many of these did; they are not chosen.
  """

  settings: Mapping[str, Any]
  validation: float
  at_edge: tuple[str, ...]
  tried: int
  diverged: int


def choose(config: mv.Config, result: mv.RunResult) -> ChosenSettings | None:
  """Choose the best settings; None where all diverged.

  Of equals the first is chosen, in the order of the sweep.

  Args:
    config: of the search.
    result: of the search.
  """
  lost = result.sweep.lost if result.sweep else {}
  well = {
    trial.name: trial.val_accuracy
    for trial in result.tasks
    if trial.name not in lost and trial.val_accuracy is not None
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
