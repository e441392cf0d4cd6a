"""Plans the runs of a study, as far as the finished ones allow.

At which rate further seeds are run is known once the first seed has tried them
all (`StudyConfig.search`): what is finished goes in, and what is to be done
comes out, until there is nothing new.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from memory_vit.config import Config
from memory_vit.model.regimes import get_regime
from studies.paper.runs import (
  Run,
  data_sets,
  regimes_of,
  search_seed,
)
from studies.paper.selection import best
from studies.paper.trials import StudyTrial, Trials


def plan(config: Config, parts: Sequence[str], trials: Trials) -> list[Run]:
  """All runs of some parts, each once; see `runs_of`."""
  runs = [run for part in parts for run in runs_of(config, part, trials)]
  return list(dict.fromkeys(runs))


def next_run(config: Config, part: str, trials: Trials) -> Run | None:
  """The next run that a part needs; None where all are finished."""
  left = [r for r in runs_of(config, part, trials) if r.name not in trials]
  return next((run for run in left if run.learning_rates), None)


def finished_trials(
  config: Config,
  parts: Sequence[str],
  find: Callable[[Run, Trials], list[StudyTrial] | None],
) -> dict[str, list[StudyTrial]]:
  """Collect the trials of finished runs, which say what else may be finished.

  `find` gets a run and the trials before it; None stands for an unfinished run.
  """
  trials: dict[str, list[StudyTrial]] = {}
  seen: set[Run] = set()
  while new := [
    run
    for run in plan(config, parts, trials)
    if run.learning_rates and run not in seen
  ]:
    for run in new:
      seen.add(run)
      possible = not run.reads or run.reads.name in trials
      if possible and (found := find(run, trials)):
        trials[run.name] = found
  return trials


def runs_of(config: Config, part: str, trials: Trials) -> list[Run]:
  """The runs that a part needs; one that is read comes before its reader.

  Those of further seeds have no learning rate as long as the runs that choose
  it are not finished. Where all of these diverged there are no further seeds.
  """
  study, first = config.study, config.data.name
  if part == "costs":
    return []
  if part == "interference":
    return _interference(config, trials)
  if part == "extension":
    return _extension(config, trials)
  # On the first data set memory is learned with all cells where one run serves
  # them all, for little more than the price of one task.
  varies = part in ("table2", "cells")
  runs = []
  for regime in regimes_of(config, part):
    everything = varies or get_regime(regime).shares_pass
    cells = study.cells if everything else (config.task.cells,)
    seeds = study.seeds
    # A sensitivity of one seed is shown where that seed searches alone.
    if part == "sensitivity" and search_seed(config, regime) is not None:
      seeds = seeds[:1]
    runs += _runs(config, regime, first, trials, cells=cells, seeds=seeds)
  return runs


def _interference(config: Config, trials: Trials) -> list[Run]:
  """Tasks of one seed, on all data sets."""
  cells, seeds = (config.task.cells,), config.study.seeds[:1]
  runs = []
  for i, data in enumerate(data_sets(config)):
    # Of the others only what the part on extension shares is tested: they may
    # have no split of that name.
    runs += _runs(
      config, "memory", data, trials, cells=cells, seeds=seeds, tested=i == 0
    )
    masked = cells if i else config.study.cells
    runs += _runs(
      config, "memory_masked", data, trials, cells=masked, seeds=seeds,
      tested=i < 2,
    )  # fmt: skip
  return runs


def _extension(config: Config, trials: Trials) -> list[Run]:
  """A task on the first of the other data sets, alone and reading."""
  study, cells = config.study, (config.task.cells,)
  regime, first, other = "memory_masked", *list(data_sets(config))[:2]
  seeds = study.seeds
  read = _runs(config, regime, first, trials, cells=study.cells, seeds=seeds)
  alone = _runs(config, regime, other, trials, cells=cells, seeds=seeds)
  reading = [
    dataclasses.replace(run, reads=parent)
    for run, parent in zip(alone, read, strict=True)
  ]
  return [*read, *alone, *reading]


def _runs(
  config: Config,
  regime: str,
  data: str,
  trials: Trials,
  *,
  cells: tuple[int, ...],
  seeds: tuple[int, ...],
  tested: bool = True,
) -> list[Run]:
  """The runs of a regime on a data set, the first of the seeds coming first."""
  rates = config.study.learning_rates
  cells = cells if get_regime(regime).has_memory else ()

  run = functools.partial(Run, regime=regime, data=data, tested=tested)
  if get_regime(regime).shares_pass:
    return [run(seed=s, learning_rates=rates, cells=cells) for s in seeds]
  first, *further = seeds
  runs = []
  each: list[tuple[int, ...]] = [(count,) for count in cells]
  for some in each or [()]:
    search = [run(seed=first, learning_rates=(r,), cells=some) for r in rates]
    runs += search
    tried: list[tuple[float, ...]]
    if search_seed(config, regime) is None:
      tried = [(rate,) for rate in rates]
    elif any(one.name not in trials for one in search):
      tried = [()]  # it is not known yet which
    else:
      found = best([t for one in search for t in trials[one.name]])
      tried = [(found.learning_rate,)] if found else []
    runs += [
      run(seed=seed, learning_rates=one, cells=some)
      for seed in further
      for one in tried
    ]
  return runs
