"""Section of the report that holds every regime against the class token alone.

Of every regime, with each number of cells and start of memory: its accuracy at
the rate that is best on validation, and how far that is from the baseline,
image by image and seed by seed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.evaluation import (
  Hits,
  PairedDifference,
  paired_difference,
  read_hits,
)
from memory_vit.model import get_regime
from studies.paper import costs
from studies.paper.section import Row, Section, label, rate_columns
from studies.paper.selection import BestRate, choose, select
from studies.paper.study import Study
from studies.paper.trials import StudyTrial
from studies.record import directory_of


@dataclasses.dataclass(frozen=True)
class _Setting:
  """A regime with a number of cells, 0 without memory: a row of the table."""

  regime: str
  cells: int = 0

  @property
  def label(self) -> str:
    """The regime, with its cells."""
    return label(self.regime, self.cells)


_BASELINE = _Setting("cls_masked")


def section(
  study: Study,
  trials: Sequence[StudyTrial],
  workdir: Path,
  vit: mv.ViTConfig,
) -> Section:
  """Make the section from the finished runs of a study.

  Raises:
    MemoryVitError: for runs that were not tested on the same images.
  """
  table = _Table(study, trials, _read_hits(trials, workdir))
  settings = _settings(study, vit)
  return Section(
    title=f"All regimes on {study.data.name}, against {_BASELINE.label}",
    rows=[table.row(setting, vit) for setting in settings],
    comparisons=[
      table.comparison(one, other)
      for one, other in _pairs(study, settings)
      if one in settings and other in settings
    ],
    notes=(
      "`without head` counts the parameters beside the head; the regimes are "
      "sorted by it. `difference` is that of the test accuracies of the same "
      f"seeds, from `{_BASELINE.label}` or from what stands beside; its errors "
      "are standard errors, as the images of the test split are a sample, and "
      "as the seeds are one: differences are taken image by image and seed by "
      "seed. It is `clear` where it exceeds two of both errors together. "
      "`paired seeds`: of how many seeds both sides are there.",
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Table:
  """What the rows are made of; `hits` are {run: {trial: hits}}."""

  study: Study
  trials: Sequence[StudyTrial]
  hits: Mapping[str, Mapping[str, Hits]]

  def row(self, setting: _Setting, vit: mv.ViTConfig) -> Row:
    """A regime at its best rate, and its difference from the baseline."""
    pair = None if setting == _BASELINE else self.pair(setting, _BASELINE)
    return {
      "regime": setting.regime,
      "cells": setting.cells or None,
      "without head": _parameters(self.study, vit, setting),
      **rate_columns(self.study, setting.regime, self.best_rate(setting)),
      **_columns(pair),
    }

  def comparison(self, one: _Setting, other: _Setting) -> Row:
    """The difference of two settings, each at its best rate."""
    return {
      "regime": one.label,
      "compared to": other.label,
      **_columns(self.pair(one, other)),
    }

  def pair(self, one: _Setting, other: _Setting) -> PairedDifference | None:
    """Compare two settings over the seeds of both, each at its best rate.

    None where there is no such seed.
    """
    first, second = self.best_hits(one), self.best_hits(other)
    seeds = [seed for seed in first if seed in second]
    try:
      return paired_difference(
        [first[seed] for seed in seeds], [second[seed] for seed in seeds]
      )
    except ValueError as error:
      raise mv.MemoryVitError(
        f"{one.label} and {other.label} were tested on other images "
        f"({error}). Move the runs of one of them away to make them again."
      ) from error

  def trials_of(self, setting: _Setting) -> list[StudyTrial]:
    """Trials of a setting, on the first data set."""
    values = dataclasses.asdict(setting)
    return select(self.trials, data=self.study.data.name, **values)

  def best_rate(self, setting: _Setting) -> BestRate | None:
    """The rate of a setting, chosen on validation."""
    seed = self.study.search_seed(setting.regime)
    return choose(self.trials_of(setting), seed)

  def best_hits(self, setting: _Setting) -> dict[int, Hits]:
    """Hits of every seed at the best rate, {seed: hits}."""
    rate = self.best_rate(setting)
    if rate is None:
      return {}
    found: dict[int, Hits] = {}
    for trial in self.trials_of(setting):
      if trial.learning_rate == rate.learning_rate and trial.name:
        hits = self.hits[trial.run].get(trial.name)
        found |= {trial.seed: hits} if hits else {}
    return found


def _read_hits(
  trials: Sequence[StudyTrial], workdir: Path
) -> dict[str, Mapping[str, Hits]]:
  """Read the hits of all runs."""
  names = dict.fromkeys(trial.run for trial in trials)
  return {name: read_hits(directory_of(workdir, name)) or {} for name in names}


def _settings(study: Study, vit: mv.ViTConfig) -> list[_Setting]:
  """What is compared, by the number of parameters."""
  found: list[_Setting] = []
  for regime in study.regimes_of("regimes"):
    kind = get_regime(regime)
    counts: tuple[int, ...] = (0,)
    if kind.has_memory:
      every = kind.shares_pass
      counts = study.cells if every else (study.task.cells,)
    found += [_Setting(regime, count) for count in counts]
  return sorted(found, key=lambda setting: _parameters(study, vit, setting))


def _pairs(
  study: Study, settings: Sequence[_Setting]
) -> list[tuple[_Setting, _Setting]]:
  """What is compared beside the baseline.

  Parts alone and together, what reads frozen features alone, other
  numbers of cells of the same, and memory with and without the mask.
  """
  count = study.task.cells
  masked, norms = _Setting("memory_masked", count), _Setting("norms_masked")
  layers, both = _Setting("layers_masked"), _Setting("norms_layers_masked")
  memory = _Setting("memory", count)
  pairs = [(norms, masked), (layers, masked), (both, norms), (both, layers)]
  probe = _Setting("probe")
  pairs += [(probe, _Setting("head")), (both, probe)]
  pairs += [(memory, masked), (memory, _Setting("head_cls"))]
  for one in settings:
    if one.cells > count:
      pairs.append((one, dataclasses.replace(one, cells=count)))
  return pairs


def _parameters(study: Study, vit: mv.ViTConfig, setting: _Setting) -> int:
  """Number of trained parameters beside the head."""
  task = study.task
  return costs.parameters(
    vit, setting.regime, setting.cells, task.bottleneck, task.side
  )


def _columns(pair: PairedDifference | None) -> Row:
  """Columns of a paired difference."""
  return {
    "difference": pair and pair.difference,
    "error over images": pair and pair.over_images,
    "error over seeds": pair and pair.over_seeds,
    "clear": pair and pair.is_clear,
    "paired seeds": pair and pair.seeds,
  }
