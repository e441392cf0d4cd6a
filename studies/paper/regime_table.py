"""The section that compares all regimes with the class token alone."""

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
from memory_vit.model import SideKind, get_regime
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
  """Compare image by image and seed by seed; refuse other test images."""
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
      "`without head` counts the parameters without those of the head; the "
      "regimes are sorted by it. `difference` is that of the test accuracies "
      f"of the same seeds, from `{_BASELINE.label}` or from the regime in the "
      "column `compared to`. It is taken image by image and seed by seed; its "
      "two standard errors are due to the finite samples of test images and of "
      "seeds. It is `clear` if it exceeds two standard errors of both "
      "together. `paired seeds` is the number of seeds that both sides have.",
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Table:
  """The input of rows; `hits` are {run: {trial: hits}}."""

  study: Study
  trials: Sequence[StudyTrial]
  hits: Mapping[str, Mapping[str, Hits]]

  def row(self, setting: Setting, vit: mv.ViTConfig) -> Row:
    """A regime at its best learning rate, against the baseline."""
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
    """Compare the seeds of both settings; None if there are none."""
    first, second = self.best_hits(one), self.best_hits(other)
    seeds = [seed for seed in first if seed in second]
    try:
      return paired_difference(
        [first[seed] for seed in seeds], [second[seed] for seed in seeds]
      )
    except ValueError as error:
      raise mv.MemoryVitError(
        f"{one.label} and {other.label} were tested on other images "
        f"({error}). Move the runs of one of them away to repeat them."
      ) from error

  def best_hits(self, setting: Setting) -> dict[int, Hits]:
    """{seed: hits} at the best learning rate."""
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
  names = dict.fromkeys(trial.run for trial in trials)
  return {name: read_hits(directory_of(workdir, name)) or {} for name in names}


def _settings(study: Study, vit: mv.ViTConfig) -> list[Setting]:
  """Settings by the number of parameters."""
  found: list[Setting] = []
  for regime in study.regimes_of("regimes"):
    kind = get_regime(regime)
    counts: tuple[int, ...] = (0,)
    if kind.has("memory"):
      every = kind.shares_pass
      counts = study.cells if every else (study.task.cells,)
    found += [Setting(regime, count) for count in counts]
  return sorted(found, key=lambda setting: _parameters(study, vit, setting))


def _pairs(
  study: Study, settings: Sequence[Setting]
) -> list[tuple[Setting, Setting]]:
  """Comparisons other than with the baseline."""
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
  """The number of trained parameters without the head."""
  task = study.task
  side = SideKind(task.side_width, task.side_mixing)
  return costs.parameters(
    vit, setting.regime, setting.cells, task.bottleneck, side
  )


def _columns(pair: PairedDifference | None) -> Row:
  return {
    "difference": pair and pair.difference,
    "error over images": pair and pair.over_images,
    "error over seeds": pair and pair.over_seeds,
    "clear": pair and pair.is_clear,
    "paired seeds": pair and pair.seeds,
  }
