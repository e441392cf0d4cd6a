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
from studies.paper.section import (
  Row,
  Section,
  Setting,
  best_rate,
  on_first_data,
  rate_columns,
)
from studies.paper.study import Study
from studies.paper.trials import StudyTrial
from studies.record import directory_of

_BASELINE = Setting("cls_masked")


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

  def row(self, setting: Setting, vit: mv.ViTConfig) -> Row:
    """A regime at its best rate, and its difference from the baseline."""
    pair = None if setting == _BASELINE else self.pair(setting, _BASELINE)
    rate = best_rate(self.study, self.trials, setting)
    return {
      **setting.columns,
      "without head": _parameters(self.study, vit, setting),
      **rate_columns(self.study, setting.regime, rate),
      **_columns(pair),
    }

  def comparison(self, one: Setting, other: Setting) -> Row:
    """The difference of two settings, each at its best rate."""
    return {
      "regime": one.label,
      "compared to": other.label,
      **_columns(self.pair(one, other)),
    }

  def pair(self, one: Setting, other: Setting) -> PairedDifference | None:
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

  def best_hits(self, setting: Setting) -> dict[int, Hits]:
    """Hits of every seed at the best rate, {seed: hits}."""
    rate = best_rate(self.study, self.trials, setting)
    if rate is None:
      return {}
    found: dict[int, Hits] = {}
    for trial in on_first_data(self.study, self.trials, setting):
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


def _settings(study: Study, vit: mv.ViTConfig) -> list[Setting]:
  """What is compared, by the number of parameters."""
  found: list[Setting] = []
  for regime in study.regimes_of("regimes"):
    kind = get_regime(regime)
    counts: tuple[int, ...] = (0,)
    if kind.has_memory:
      every = kind.shares_pass
      counts = study.cells if every else (study.task.cells,)
    found += [Setting(regime, count) for count in counts]
  return sorted(found, key=lambda setting: _parameters(study, vit, setting))


def _pairs(
  study: Study, settings: Sequence[Setting]
) -> list[tuple[Setting, Setting]]:
  """What is compared beside the baseline.

  Parts alone and together, what reads frozen features alone, other
  numbers of cells of the same, and memory with and without the mask.
  """
  count = study.task.cells
  masked, norms = Setting("memory_masked", count), Setting("norms_masked")
  layers, both = Setting("layers_masked"), Setting("norms_layers_masked")
  memory = Setting("memory", count)
  pairs = [(norms, masked), (layers, masked), (both, norms), (both, layers)]
  probe = Setting("probe")
  pairs += [(probe, Setting("head")), (both, probe)]
  pairs += [(memory, masked), (memory, Setting("head_cls"))]
  for one in settings:
    if one.cells > count:
      pairs.append((one, one._replace(cells=count)))
  return pairs


def _parameters(study: Study, vit: mv.ViTConfig, setting: Setting) -> int:
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
