"""Plan the runs of a study, given the trials of the finished ones.

Which learning rate further seeds use is known once the first seed has tried all
of them (see `Study.search`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.model import get_regime
from studies.paper.runs import PaperRun
from studies.paper.selection import best, best_parent
from studies.paper.study import Study
from studies.paper.trials import (
  StudyTrial,
  Trials,
  diverged_trials,
  trials_of,
)
from studies.record import directory_of


def plan(study: Study, parts: Sequence[str], trials: Trials) -> list[PaperRun]:
  """All runs of some parts, each once."""
  runs = [run for part in parts for run in runs_of(study, part, trials)]
  return list(dict.fromkeys(runs))


def known_trials(
  study: Study,
  parts: Sequence[str],
  results: Mapping[str, mv.RunResult],
  workdir: Path,
) -> dict[str, list[StudyTrial]]:
  """The trials of finished runs; a run without a parent has diverged."""
  trials: dict[str, list[StudyTrial]] = {}
  seen: set[PaperRun] = set()
  while new := [
    run
    for run in plan(study, parts, trials)
    if run.learning_rates and run not in seen
  ]:
    for run in new:
      seen.add(run)
      if run.name in results:
        directory = directory_of(workdir, run.name)
        trials[run.name] = trials_of(run, results[run.name], directory)
      elif lacks_parent(study, run, trials):
        trials[run.name] = diverged_trials(run)
  return trials


def lacks_parent(study: Study, run: PaperRun, trials: Trials) -> bool:
  """Whether all tasks that a run could attend to have diverged."""
  if not run.reads or run.reads.name not in trials:
    return False
  parent = best_parent(run.reads, trials, study.task.cells)
  return parent is None or parent.task is None


def runs_of(study: Study, part: str, trials: Trials) -> list[PaperRun]:
  """The runs of a part; a run comes after the one that it attends to.

  Runs of further seeds have no learning rate until it is chosen, and do not
  exist if the first seed diverged at all of them.
  """
  first = study.data.name
  if part == "costs":
    return []
  if part == "interference":
    return _interference(study, trials)
  if part == "extension":
    return _extension(study, trials)
  # If one run trains all numbers of cells, it always does: it costs little more
  # than one task.
  varies = part in ("table2", "cells")
  runs = []
  for regime in study.regimes_of(part):
    everything = varies or get_regime(regime).shares_pass
    cells = study.cells if everything else (study.task.cells,)
    seeds = study.seeds
    # If one seed searches alone, its sensitivity is shown.
    if part == "sensitivity" and study.search_seed(regime) is not None:
      seeds = seeds[:1]
    runs += _runs(study, regime, first, trials, cells=cells, seeds=seeds)
  return runs


def _interference(study: Study, trials: Trials) -> list[PaperRun]:
  """Tasks of one seed, on all data sets."""
  cells, seeds = (study.task.cells,), study.seeds[:1]
  runs = []
  for i, data in enumerate(study.data_sets):
    # Others may have no test split, except the one of extension.
    runs += _runs(
      study, "memory", data, trials, cells=cells, seeds=seeds, tested=i == 0
    )
    masked = cells if i else study.cells
    runs += _runs(
      study, "memory_masked", data, trials, cells=masked, seeds=seeds,
      tested=i < 2,
    )  # fmt: skip
  return runs


def _extension(study: Study, trials: Trials) -> list[PaperRun]:
  """A task on the second data set, alone and attending to the first."""
  cells = (study.task.cells,)
  regime, first, other = "memory_masked", *list(study.data_sets)[:2]
  seeds = study.seeds
  read = _runs(study, regime, first, trials, cells=study.cells, seeds=seeds)
  alone = _runs(study, regime, other, trials, cells=cells, seeds=seeds)
  reading = [
    dataclasses.replace(run, reads=parent)
    for run, parent in zip(alone, read, strict=True)
  ]
  return [*read, *alone, *reading]


def _runs(
  study: Study,
  regime: str,
  data: str,
  trials: Trials,
  *,
  cells: tuple[int, ...],
  seeds: tuple[int, ...],
  tested: bool = True,
) -> list[PaperRun]:
  """The runs of a regime on a data set, the first seed first."""
  rates = study.learning_rates
  cells = cells if get_regime(regime).has("memory") else ()

  run = functools.partial(PaperRun, regime=regime, data=data, tested=tested)
  if get_regime(regime).shares_pass:
    return [run(seed=s, learning_rates=rates, cells=cells) for s in seeds]
  first, *further = seeds
  runs = []
  each: list[tuple[int, ...]] = [(count,) for count in cells]
  for some in each or [()]:
    search = [run(seed=first, learning_rates=(r,), cells=some) for r in rates]
    runs += search
    tried: list[tuple[float, ...]]
    if study.search_seed(regime) is None:
      tried = [(rate,) for rate in rates]
    elif any(one.name not in trials for one in search):
      tried = [()]  # not known yet
    else:
      found = best([t for one in search for t in trials[one.name]])
      tried = [(found.learning_rate,)] if found else []
    runs += [
      run(seed=seed, learning_rates=one, cells=some)
      for seed in further
      for one in tried
    ]
  return runs
