"""Specification of a study: its parts, the regimes of each, and its runs.

A run is named by what it is. Parts that need the same run share it.
"""

import dataclasses
import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from memory_vit.config import (
  Config,
  DataConfig,
  PretrainConfig,
  StudyConfig,
  SweepConfig,
  UpstreamConfig,
  what_can_be_kept,
)
from memory_vit.data.split_ref import OF_A_DIRECTORY
from memory_vit.errors import ConfigError
from memory_vit.model.regimes import REGIMES, get_regime
from memory_vit.runtime import messages, options, schema

logger = logging.getLogger(__name__)

# What --only names, in the order of the report, and the regimes of each.
_PARTS = {
  "table2": ("full", "head", "head_cls", "memory", "memory_masked",
             "cls_masked", "norms_masked"),
  "sensitivity": ("full", "memory", "memory_masked"),
  "cells": ("head_cls", "memory", "memory_masked", "cls_masked"),
  "placement": ("memory", "memory_propagated", "memory_additive"),
  "adapters": ("adapter", "memory", "adapter_memory"),
  "costs": tuple(REGIMES),
  "interference": ("memory", "memory_masked"),
  "extension": ("memory_masked",),
  "regimes": (
    *(name for name, kind in REGIMES.items() if kind.shares_pass),
    "head_cls", "memory", "full",
  ),
}  # fmt: skip
PARTS = tuple(_PARTS)
# Of these regimes a part needs every one, of others at least one.
_INDISPENSABLE = {
  "placement": ("memory",),
  "adapters": ("adapter",),
  "interference": ("memory", "memory_masked"),
  "extension": ("memory_masked",),
  "regimes": ("cls_masked",),
}
_NEED_OTHERS = ("interference", "extension")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of a study, in a directory of its own.

  A regime whose trials share a pass learns all its rates and cells in one
  sweep; a run of the others is one trial.
  """

  regime: str
  data: str  # a name in `data_sets`
  seed: int  # of first values and batches
  learning_rates: tuple[float, ...]  # empty until the best one is known
  cells: tuple[int, ...] = ()  # empty in a regime without memory
  tested: bool = True  # whether it is evaluated on the test split
  reads: "Run | None" = None  # whose best task it attends to (extension)

  @property
  def name(self) -> str:
    """Regime, data, seed and what else varies; good as a directory."""
    parts = [self.regime, slug(self.data)]
    if self.reads:
      parts.append(f"reading-{slug(self.reads.data)}")
    if not get_regime(self.regime).shares_pass:
      parts += [f"cells{self.cells[0]}"] if self.cells else []
      rates = self.learning_rates or ("-of-the-best",)
      parts.append(f"rate{rates[0]}")
    return "-".join([*parts, f"seed{self.seed}"])

  @property
  def trials(self) -> list[tuple[float, int]]:
    """(learning rate, cells) of each task that it learns."""
    return list(itertools.product(self.learning_rates, self.cells or (0,)))


def slug(name: str) -> str:
  """Make a name safe for files, "sun397/tfds" -> "sun397-tfds"."""
  return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def possible_parts(config: Config, only: Sequence[str] = ()) -> list[str]:
  """Return the parts, or those in `only`, that have their regimes and data.

  Raises:
    ConfigError: for a configuration that no study can have, or parts that are
      asked for and not possible.
  """
  for problem in _problems(config):
    raise ConfigError(problem)
  if unknown := sorted({*only} - {*PARTS}):
    raise ConfigError(
      f"--only={messages.brief(unknown)}: expected some of {list(PARTS)}."
    )
  reasons = {part: _why_not(config, part) for part in PARTS}
  for part in PARTS:
    if part in only and reasons[part]:
      raise ConfigError(f"--only={part} {reasons[part]}.")
  return [p for p in PARTS if p in (only or PARTS) and not reasons[p]]


def log_missing_parts(config: Config) -> None:
  """Log which parts are not possible, and why."""
  for part in PARTS:
    if reason := _why_not(config, part):
      logger.info("the part %r is left out: it %s", part, reason)


def regimes_of(config: Config, part: str) -> list[str]:
  """The regimes that a part compares, without those that are not to be run."""
  wanted = config.study.regimes
  return [name for name in _PARTS[part] if not wanted or name in wanted]


def data_sets(config: Config) -> dict[str, DataConfig]:
  """The data sets of a study by their names, the first one coming first.

  Raises:
    ConfigError: for options that a data set does not have, or equal names.
  """
  found = {config.data.name: config.data}
  for i, given in enumerate(config.study.others):
    changes = {"name": given} if isinstance(given, str) else given
    where = f"config.study.others[{i}]"
    values = {**dataclasses.asdict(config.data), "name": "", **changes}
    other = schema.build(DataConfig, values, where, ConfigError)
    options.require(other, f"{where}.")
    # Folders and lists have no names of their own.
    name = other.name
    if name in OF_A_DIRECTORY:
      name = f"{name}:{Path(other.dir).name}"
    if slug(name) in {slug(known) for known in found}:
      raise ConfigError(
        f"{where} is {name!r}, a name that an earlier data set has as well: "
        "expected another data set."
      )
    found[name] = other
  return found


def search_seed(config: Config, regime: str) -> int | None:
  """The seed whose validation alone chooses a rate; None where all do."""
  everything = config.study.search == "all" or get_regime(regime).shares_pass
  return None if everything else config.study.seeds[0]


def _why_not(config: Config, part: str) -> str:
  """Return what a part lacks; "" where it is possible."""
  if part in _NEED_OTHERS and not config.study.others:
    return "needs further data sets: expected some in config.study.others"
  regimes = regimes_of(config, part)
  missing = [r for r in _INDISPENSABLE.get(part, ()) if r not in regimes]
  if missing:
    return f"needs {missing}: expected them in config.study.regimes"
  if not regimes:
    return f"needs one of {list(_PARTS[part])}: see config.study.regimes"
  return ""


def config_of(
  config: Config, run: Run, backbone: str, attends_to: Sequence[str] = ()
) -> Config:
  """Configure a run whose learning rate is known.

  `attends_to` is the directory of the task that it reads.
  """
  first = run.data == config.data.name
  data = data_sets(config)[run.data]
  if not run.tested:
    data = dataclasses.replace(data, test="")
  task = dataclasses.replace(
    config.task,
    name=config.task.name if first else "",
    cells=run.cells[0] if run.cells else config.task.cells,
    attends_to=tuple(attends_to),
  )
  keep = config.keep
  if keep.what in ("contexts", "features"):
    keep = dataclasses.replace(keep, what=what_can_be_kept(run.regime))
  sweep = SweepConfig()
  if get_regime(run.regime).shares_pass:
    sweep = SweepConfig(
      learning_rate=run.learning_rates,
      cells=run.cells,
      # All of them: which one another part needs is known afterwards.
      export="all" if _is_read(run) else "best",
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
    keep=keep,
    # The backbone is there, and its own task is not what is studied.
    pretrain=PretrainConfig(),
    upstream=UpstreamConfig(),
    study=StudyConfig(),
    wandb=config.wandb.of_many(),
    log_images=0,
    export_orbax=False,
  )


def _is_read(run: Run) -> bool:
  """Whether the parts on interference and extension read tasks of a run."""
  return run.regime == "memory_masked"


def _problems(config: Config) -> list[str]:
  """List what keeps a configuration from being that of a study."""
  study = config.study
  lines = []
  for key in ("learning_rates", "seeds", "cells", "regimes"):
    values = getattr(study, key)
    may_be_empty = key == "regimes"
    if len(set(values)) < len(values) or not (values or may_be_empty):
      lines.append(
        f"config.study.{key} is {values}, expected values that differ, at "
        "least one."
      )
  if config.task.cells not in study.cells:
    lines.append(
      f"config.task.cells is {config.task.cells}, expected one of "
      f"config.study.cells {study.cells}."
    )
  for i, (name, data) in enumerate(data_sets(config).items()):
    where = f"of {name!r} in config.study.others" if i else "of config.data"
    for key in ("name", "train", "validation", "test"):
      # What is tested: the first, and what is extended by it.
      if not getattr(data, key) and (key != "test" or i < 2):
        lines.append(
          f"{key!r} {where} is empty: a study trains, chooses on validation, "
          "and reports on test."
        )
  # Configurations of the paper's data sets vary for one run what is ours here.
  if config.sweep.learning_rate not in ((), StudyConfig().learning_rates) or (
    dataclasses.replace(config.sweep, learning_rate=()).is_on
  ):
    lines.append("config.sweep is for one run: expected config.study instead.")
  if config.task.attends_to or config.task.indirect:
    lines.append(
      "config.task.attends_to and config.task.indirect are for one run: "
      "expected none, a study makes its own tasks."
    )
  return lines
