"""Plans the runs of a study, as far as the finished ones allow.

At which rate further seeds are run is known once the first seed has tried them
all (`StudyConfig.search`): what is finished goes in, and what is to be done
comes out, until there is nothing new.
"""

import dataclasses
from collections.abc import Sequence

from memory_vit.config import Config
from memory_vit.model.regimes import REGIMES
from memory_vit.study.runs import (
  Run,
  data_sets,
  other_names,
  regimes_of,
  search_seed,
)
from memory_vit.study.selection import best
from memory_vit.study.trials import Trials


def plan(config: Config, parts: Sequence[str], trials: Trials) -> list[Run]:
  """All runs of some parts, each once; see `runs_of`."""
  runs = [run for part in parts for run in runs_of(config, part, trials)]
  return list(dict.fromkeys(runs))


def next_run(config: Config, part: str, trials: Trials) -> Run | None:
  """The next run that a part needs; None where all are finished."""
  left = [r for r in runs_of(config, part, trials) if r.name not in trials]
  return next((run for run in left if run.learning_rates), None)


def runs_of(config: Config, part: str, trials: Trials) -> list[Run]:
  """The runs that a part needs; one that is read comes before its reader.

  Args:
    config: of the study.
    part: of it.
    trials: of the runs that are finished.

  Returns:
    The runs; those of further seeds have no learning rate as long as the runs
    that choose it are not finished. Where all of these diverged there are no
    further seeds.
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
    everything = varies or REGIMES[regime].shares_pass
    cells = study.cells if everything else (config.task.cells,)
    seeds = study.seeds
    # A sensitivity of one seed is shown where that seed searches alone.
    if part == "sensitivity" and search_seed(config, regime) is not None:
      seeds = seeds[:1]
    runs += _runs(config, regime, first, trials, cells=cells, seeds=seeds)
  return runs


def _interference(config: Config, trials: Trials) -> list[Run]:
  """Tasks of one seed, on all data sets."""
  study, first, cells = config.study, config.data.name, (config.task.cells,)
  seeds = study.seeds[:1]
  runs = _runs(config, "memory", first, trials, cells=cells, seeds=seeds)
  runs += _runs(
    config, "memory_masked", first, trials, cells=study.cells, seeds=seeds
  )
  for i, other in enumerate(other_names(config)):
    for regime in ("memory", "memory_masked"):
      # Only what the part on extension shares is tested: the others may have
      # no split of that name.
      tested = i == 0 and regime == "memory_masked"
      runs += _runs(
        config, regime, other, trials, cells=cells, seeds=seeds, tested=tested
      )
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
  cells = cells if REGIMES[regime].has_memory else ()

  def run(seed: int, rates: tuple[float, ...], cells: tuple[int, ...]) -> Run:
    return Run(
      regime=regime,
      data=data,
      seed=seed,
      learning_rates=rates,
      cells=cells,
      tested=tested,
    )

  if REGIMES[regime].shares_pass:
    return [run(seed, rates, cells) for seed in seeds]
  runs = []
  each: list[tuple[int, ...]] = [(count,) for count in cells]
  for some in each or [()]:
    search = [run(seeds[0], (rate,), some) for rate in rates]
    runs += search
    if search_seed(config, regime) is None:
      runs += [run(s, (rate,), some) for s in seeds[1:] for rate in rates]
    elif any(one.name not in trials for one in search):
      runs += [run(seed, (), some) for seed in seeds[1:]]
    else:
      found = best([t for one in search for t in trials[one.name]])
      if found is not None:
        rate = (found.learning_rate,)
        runs += [run(seed, rate, some) for seed in seeds[1:]]
  return runs
