"""What a study of the paper consists of: its parts, and the runs they need.

A run is named by what it is. Parts that need the same run share it.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from memory_vit.config import (
  Config,
  PretrainConfig,
  StudyConfig,
  SweepConfig,
  UpstreamConfig,
)
from memory_vit.errors import ConfigError
from memory_vit.regimes import REGIMES

# What --only names, in the order of the report.
PARTS = ("table2", "sensitivity", "cells", "adapters", "costs", "interference",
         "extension")  # fmt: skip
_NEED_OTHERS = ("interference", "extension")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of a study, in a directory of its own.

  A masked regime learns all its rates and cells in one sweep; a run of the
  others is one variant.

  Attributes:
    regime: see `regimes`.
    data: name of the data set.
    seed: of first values and batches.
    learning_rates: one, or those of the sweep.
    cells: as `learning_rates`; empty in a regime without memory.
    tested: whether it is evaluated on the test split.
    reads: the run whose best task it attends to (extension).
  """

  regime: str
  data: str
  seed: int
  learning_rates: tuple[float, ...]
  cells: tuple[int, ...] = ()
  tested: bool = True
  reads: "Run | None" = None

  @property
  def name(self) -> str:
    """Says what it is; good as a directory."""
    parts = [self.regime, slug(self.data)]
    if self.reads:
      parts.append(f"reading-{slug(self.reads.data)}")
    if not REGIMES[self.regime].composes:
      parts += [f"cells{self.cells[0]}"] if self.cells else []
      parts.append(f"rate{self.learning_rates[0]}")
    return "-".join([*parts, f"seed{self.seed}"])

  @property
  def variants(self) -> list[tuple[float, int]]:
    """(learning rate, cells) of each task that it learns."""
    return list(itertools.product(self.learning_rates, self.cells or (0,)))


def slug(name: str) -> str:
  """Part of a file's name, "sun397/tfds" -> "sun397-tfds"."""
  return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def possible_parts(config: Config, only: Sequence[str] = ()) -> list[str]:
  """The parts of a study; without the names of other data sets, fewer.

  Args:
    config: of the study.
    only: parts that are asked for; none: all that are possible.

  Raises:
    ConfigError: for a configuration that no study can have, or parts that are
      not possible.
  """
  for problem in _problems(config):
    raise ConfigError(problem)
  unknown = sorted({*only} - {*PARTS})
  if unknown:
    raise ConfigError(f"--only={unknown}: expected some of {list(PARTS)}.")
  if config.study.others:
    return [part for part in PARTS if part in (only or PARTS)]
  refused = sorted({*only} & {*_NEED_OTHERS})
  if refused:
    raise ConfigError(
      f"--only={refused} needs further data sets: expected their names in "
      "config.study.others."
    )
  possible = [part for part in PARTS if part not in _NEED_OTHERS]
  return [part for part in possible if part in (only or possible)]


def runs_of(config: Config, part: str) -> list[Run]:
  """The runs that a part needs; one that is read comes before its reader."""
  study, first = config.study, config.data.name
  all_cells, cells = study.cells, (config.task.cells,)
  runs = []
  # On the first data set masked memory is always learned with all cells: one
  # run serves every part, for little more than the price of one task.
  if part in ("table2", "cells"):
    regimes = ("full", "head") if part == "table2" else ()
    for regime in (*regimes, "head_cls", "memory", "memory_masked",
                   "cls_masked"):  # fmt: skip
      runs += _runs(config, regime, first, cells=all_cells)
  elif part == "sensitivity":
    runs += _runs(config, "full", first)
    runs += _runs(config, "memory", first, cells=cells)
    runs += _runs(config, "memory_masked", first, cells=all_cells)
  elif part == "adapters":
    for regime in ("adapter", "memory", "adapter_memory"):
      runs += _runs(config, regime, first, cells=cells)
  elif part == "interference":
    seeds = study.seeds[:1]
    runs += _runs(config, "memory", first, cells=cells, seeds=seeds)
    runs += _runs(config, "memory_masked", first, cells=all_cells, seeds=seeds)
    for i, other in enumerate(study.others):
      for regime in ("memory", "memory_masked"):
        # Only what the part on extension shares is tested: the others may have
        # no split of that name.
        tested = i == 0 and regime == "memory_masked"
        runs += _runs(
          config, regime, other, cells=cells, seeds=seeds, tested=tested
        )
  elif part == "extension":
    read = _runs(config, "memory_masked", first, cells=all_cells)
    alone = _runs(config, "memory_masked", study.others[0], cells=cells)
    runs += [*read, *alone]
    runs += [
      dataclasses.replace(run, reads=parent)
      for run, parent in zip(alone, read, strict=True)
    ]
  return runs


def plan(config: Config, parts: Sequence[str]) -> list[Run]:
  """All runs of some parts, each once."""
  return list(dict.fromkeys(r for part in parts for r in runs_of(config, part)))


def config_of(
  config: Config, run: Run, backbone: str, attends_to: Sequence[str] = ()
) -> Config:
  """The configuration of a run.

  Args:
    config: of the study.
    run: one of it.
    backbone: file or name, as `config.backbone`.
    attends_to: directory of the task that it reads.
  """
  sweeps = REGIMES[run.regime].composes
  first = run.data == config.data.name
  data = dataclasses.replace(
    config.data, name=run.data, test=config.data.test if run.tested else ""
  )
  task = dataclasses.replace(
    config.task,
    name=config.task.name if first else "",
    cells=run.cells[0] if run.cells else config.task.cells,
    attends_to=tuple(attends_to),
  )
  sweep = SweepConfig()
  if sweeps:
    # All of them: which one another part needs is known afterwards.
    sweep = SweepConfig(
      learning_rate=run.learning_rates,
      cells=run.cells,
      export="all",
      memory_gib=config.sweep.memory_gib,
    )
  return dataclasses.replace(
    config,
    backbone=backbone,
    regime=run.regime,
    seed=run.seed,
    learning_rate=run.learning_rates[0],
    data=data,
    task=task,
    sweep=sweep,
    # The backbone is there, and its own task is not what is studied.
    pretrain=PretrainConfig(),
    upstream=UpstreamConfig(),
    study=StudyConfig(),
  )


def _runs(
  config: Config,
  regime: str,
  data: str,
  *,
  cells: tuple[int, ...] = (),
  seeds: tuple[int, ...] = (),
  tested: bool = True,
) -> list[Run]:
  """The runs of a regime on a data set: all learning rates, all seeds."""
  rates = config.study.learning_rates
  kind = REGIMES[regime]
  cells = cells if "memory" in kind.trained else ()
  runs = []
  for seed in seeds or config.study.seeds:
    if kind.composes:
      split = [(rates, cells)]
    else:
      each = [(m,) for m in cells] or [()]
      split = [((rate,), some) for some in each for rate in rates]
    runs += [
      Run(
        regime=regime,
        data=data,
        seed=seed,
        learning_rates=some_rates,
        cells=some_cells,
        tested=tested,
      )
      for some_rates, some_cells in split
    ]
  return runs


def _problems(config: Config) -> list[str]:
  """Why a configuration cannot be that of a study."""
  study = config.study
  lines = []
  for key in ("learning_rates", "seeds", "cells", "others"):
    values = getattr(study, key)
    if len(set(values)) < len(values) or not (values or key == "others"):
      lines.append(
        f"config.study.{key} is {values}, expected values that differ, at "
        "least one."
      )
  if study.learning_rates and min(study.learning_rates) <= 0:
    lines.append(
      f"config.study.learning_rates is {study.learning_rates}, expected "
      "positive numbers."
    )
  if min(study.cells, default=1) < 1:
    lines.append(f"config.study.cells is {study.cells}, expected at least 1.")
  if min(study.seeds, default=0) < 0:
    lines.append(f"config.study.seeds is {study.seeds}, expected at least 0.")
  if config.task.cells not in study.cells:
    lines.append(
      f"config.task.cells is {config.task.cells}, expected one of "
      f"config.study.cells {study.cells}."
    )
  for key in ("name", "train", "validation", "test"):
    if not getattr(config.data, key):
      lines.append(
        f"config.data.{key} is empty: a study trains, chooses on validation, "
        "and reports on test."
      )
  if config.data.name in study.others:
    lines.append(
      f"config.study.others names {config.data.name!r}, which is "
      "config.data.name: expected other data sets."
    )
  if config.sweep.is_on:
    lines.append("config.sweep is for one run: expected config.study instead.")
  if config.task.attends_to or config.task.indirect:
    lines.append(
      "config.task.attends_to and config.task.indirect are for one run: "
      "expected none, a study makes its own tasks."
    )
  return lines
