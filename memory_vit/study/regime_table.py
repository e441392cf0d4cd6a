"""Section of the report that holds every regime against the class token alone.

Of every regime, with each number of cells: its accuracy at the rate that is
best on validation, and its paired difference from `cls_masked`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.evaluation.hits import Hits, read_hits
from memory_vit.model.regimes import REGIMES
from memory_vit.model.vit_config import ViTConfig
from memory_vit.study import costs, runs
from memory_vit.study.pairing import PairedDifference, paired_difference
from memory_vit.study.section import (
  Row,
  Section,
  Setting,
  best_rate,
  label,
  on_first_data,
  rate_columns,
)
from memory_vit.study.trials import StudyTrial, directory_of

_BASELINE: Setting = ("cls_masked", 0)


def section(
  config: Config,
  trials: Sequence[StudyTrial],
  workdir: Path,
  vit: ViTConfig,
) -> Section:
  """Make the section from the finished runs of a study.

  Raises:
    ConfigError: for runs that were not tested on the same images.
  """
  study = _Study(config, trials, _read_hits(trials, workdir))
  settings = _settings(config, vit)
  rows = [study.row(setting, vit) for setting in settings]
  return Section(
    title=f"All regimes on {config.data.name}, against {label(*_BASELINE)}",
    rows=rows,
    comparisons=[
      study.comparison(one, other)
      for one, other in _pairs(config)
      if one in settings and other in settings
    ],
    notes=(
      "`without head` counts the parameters beside the head; the regimes are "
      "sorted by it. `difference` is that of the test accuracies of the same "
      f"seeds, from `{_BASELINE[0]}` or from what stands beside; its errors "
      "are standard errors, as the images of the test split are a sample, and "
      "as the seeds are one: differences are taken image by image and seed by "
      "seed. It is `clear` where it exceeds two of both errors together.",
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Study:
  """What the rows are made of; `hits` are {run: {trial: hits}}."""

  config: Config
  trials: Sequence[StudyTrial]
  hits: Mapping[str, Mapping[str, Hits]]

  def row(self, setting: Setting, vit: ViTConfig) -> Row:
    """A regime at its best rate, and its difference from the baseline."""
    regime, cells = setting
    rate = best_rate(self.config, self.trials, setting)
    pair = None if setting == _BASELINE else self.pair(setting, _BASELINE)
    return {
      "regime": regime,
      "cells": cells or None,
      "without head": _parameters(self.config, vit, setting),
      **rate_columns(self.config, regime, rate),
      **_columns(pair),
    }

  def comparison(self, one: Setting, other: Setting) -> Row:
    """The difference of two regimes, each at its best rate."""
    return {
      "regime": label(*one),
      "compared to": label(*other),
      **_columns(self.pair(one, other)),
    }

  def pair(self, one: Setting, other: Setting) -> PairedDifference | None:
    """Compare two settings over the seeds of both, each at its best rate.

    None where there is no such seed, as in runs of an earlier version, which
    kept no hits.
    """
    first, second = self.best_hits(one), self.best_hits(other)
    seeds = [seed for seed in first if seed in second]
    try:
      return paired_difference(
        [first[seed] for seed in seeds], [second[seed] for seed in seeds]
      )
    except ValueError as error:
      raise ConfigError(
        f"{label(*one)} and {label(*other)} were tested on other images "
        f"({error}). Move the runs of one of them away to make them again."
      ) from error

  def best_hits(self, setting: Setting) -> dict[int, Hits]:
    """Hits of every seed at the best rate, {seed: hits}."""
    rate = best_rate(self.config, self.trials, setting)
    if rate is None:
      return {}
    found: dict[int, Hits] = {}
    for trial in on_first_data(self.config, self.trials, setting):
      if trial.learning_rate == rate.learning_rate and trial.name:
        hits = self.hits[trial.run].get(trial.name)
        found |= {trial.seed: hits} if hits else {}
    return found


def _read_hits(
  trials: Sequence[StudyTrial], workdir: Path
) -> dict[str, Mapping[str, Hits]]:
  """Read the hits of all runs; of an earlier version there are none."""
  names = dict.fromkeys(trial.run for trial in trials)
  return {name: read_hits(directory_of(workdir, name)) or {} for name in names}


def _settings(config: Config, vit: ViTConfig) -> list[Setting]:
  """Regimes with their numbers of cells, by the number of parameters."""
  found: list[Setting] = []
  for regime in runs.regimes_of(config, "regimes"):
    kind = REGIMES[regime]
    counts: tuple[int, ...] = (0,)
    if kind.has_memory:
      every = kind.shares_pass
      counts = config.study.cells if every else (config.task.cells,)
    found += [(regime, count) for count in counts]
  return sorted(found, key=lambda setting: _parameters(config, vit, setting))


def _pairs(config: Config) -> list[tuple[Setting, Setting]]:
  """What is compared beside the baseline."""
  count = config.task.cells
  masked: Setting = ("memory_masked", count)
  return [
    (("norms_masked", 0), masked),
    (("memory", count), masked),
    (("memory", count), ("head_cls", 0)),
    *[
      (("memory_masked", more), masked)
      for more in config.study.cells
      if more > count
    ],
  ]


def _parameters(config: Config, vit: ViTConfig, setting: Setting) -> int:
  """Number of trained parameters beside the head."""
  regime, cells = setting
  return costs.parameters(vit, regime, cells, config.task.bottleneck)


def _columns(pair: PairedDifference | None) -> Row:
  """Columns of a paired difference."""
  return {
    "difference": pair and pair.difference,
    "error over images": pair and pair.over_images,
    "error over seeds": pair and pair.over_seeds,
    "clear": pair and pair.is_clear,
  }
