"""Which runs a study needs, as far as what was measured says.

At which rate further seeds are run is known once the first seed has tried them
all (`StudyConfig.search`): what is finished goes in, and what is to be done
comes out, until there is nothing new.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from memory_vit.config import Config
from memory_vit.model.regimes import REGIMES
from memory_vit.study import execute
from memory_vit.study.execute import Finished
from memory_vit.study.runs import (
  Run,
  config_of,
  data_sets,
  other_names,
  regimes_of,
  search_seed,
)
from memory_vit.study.selection import Point, best

# {name of a finished run: what it measured}.
Points = Mapping[str, Sequence[Point]]


def plan(config: Config, parts: Sequence[str], points: Points) -> list[Run]:
  """All runs of some parts, each once; see `runs_of`."""
  runs = [run for part in parts for run in runs_of(config, part, points)]
  return list(dict.fromkeys(runs))


def next_run(config: Config, part: str, points: Points) -> Run | None:
  """The next run that a part needs; None where all are finished."""
  left = [r for r in runs_of(config, part, points) if r.name not in points]
  return next((run for run in left if run.learning_rates), None)


def runs_of(config: Config, part: str, points: Points) -> list[Run]:
  """The runs that a part needs; one that is read comes before its reader.

  Args:
    config: of the study.
    part: of it.
    points: of the runs that are finished.

  Returns:
    The runs; those of further seeds have no learning rate as long as the runs
    that choose it are not finished. Where all of these diverged there are no
    further seeds.
  """
  study, first = config.study, config.data.name
  if part == "costs":
    return []
  if part == "interference":
    return _interference(config, points)
  if part == "extension":
    return _extension(config, points)
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
    runs += _runs(config, regime, first, points, cells=cells, seeds=seeds)
  return runs


def _interference(config: Config, points: Points) -> list[Run]:
  """Tasks of one seed, on all data sets."""
  study, first, cells = config.study, config.data.name, (config.task.cells,)
  seeds = study.seeds[:1]
  runs = _runs(config, "memory", first, points, cells=cells, seeds=seeds)
  runs += _runs(
    config, "memory_masked", first, points, cells=study.cells, seeds=seeds
  )
  for i, other in enumerate(other_names(config)):
    for regime in ("memory", "memory_masked"):
      # Only what the part on extension shares is tested: the others may have
      # no split of that name.
      tested = i == 0 and regime == "memory_masked"
      runs += _runs(
        config, regime, other, points, cells=cells, seeds=seeds, tested=tested
      )
  return runs


def _extension(config: Config, points: Points) -> list[Run]:
  """A task on the first of the other data sets, alone and reading."""
  study, cells = config.study, (config.task.cells,)
  regime, first, other = "memory_masked", *list(data_sets(config))[:2]
  seeds = study.seeds
  read = _runs(config, regime, first, points, cells=study.cells, seeds=seeds)
  alone = _runs(config, regime, other, points, cells=cells, seeds=seeds)
  reading = [
    dataclasses.replace(run, reads=parent)
    for run, parent in zip(alone, read, strict=True)
  ]
  return [*read, *alone, *reading]


def _runs(
  config: Config,
  regime: str,
  data: str,
  points: Points,
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
  for some in [(count,) for count in cells] or [()]:
    search = [run(seeds[0], (rate,), some) for rate in rates]
    runs += search
    if search_seed(config, regime) is None:
      runs += [run(s, (rate,), some) for s in seeds[1:] for rate in rates]
    elif any(one.name not in points for one in search):
      runs += [run(seed, (), some) for seed in seeds[1:]]
    else:
      found = best([p for one in search for p in points[one.name]])
      if found is not None:
        rate = (found.learning_rate,)
        runs += [run(seed, rate, some) for seed in seeds[1:]]
  return runs


def directory_of(workdir: Path, name: str) -> Path:
  """Where a run of the study in `workdir` lies."""
  return workdir / "runs" / name


def config_for(
  config: Config, run: Run, backbone: str, points: Points
) -> Config | None:
  """The configuration of a run; None where all that it could read diverged.

  Args:
    config: of the study.
    run: its learning rate is known, and what it reads is finished.
    backbone: file or name, as `config.backbone`.
    points: of the runs that are finished.
  """
  read = execute.read_by(run, points, config.task.cells)
  return None if read is None else config_of(config, run, backbone, read)


def finished_runs(
  config: Config,
  parts: Sequence[str],
  workdir: Path,
  backbone: str,
  fingerprint: str,
) -> dict[str, Finished]:
  """What earlier calls have finished, by the names of the runs.

  Args:
    config: of the study.
    parts: of it.
    workdir: of it.
    backbone: file or name, as `config.backbone`.
    fingerprint: of the backbone.

  Raises:
    ConfigError: where their data are not those that are there now.
  """
  found: dict[str, Finished] = {}
  checked: set[Run] = set()
  # What is finished says what else may be.
  while new := [
    run
    for run in plan(config, parts, _points(found))
    if run.learning_rates and run not in checked
  ]:
    for run in new:
      checked.add(run)
      if run.reads and run.reads.name not in found:
        continue
      made = config_for(config, run, backbone, _points(found))
      ended = made and execute.finished(
        made, run, directory_of(workdir, run.name), fingerprint
      )
      if ended:
        found[run.name] = ended
  runs = directory_of(workdir, "")
  execute.require_same_data(
    data_sets(config), found, runs, trust_data_code=config.trust_data_code
  )
  return found


def _points(found: Mapping[str, Finished]) -> Points:
  return {name: ended.points for name, ended in found.items()}
