"""Options of the study, its data sets and its parts."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from memory_vit.commands import CommandLine
from memory_vit.config import LEARNING_RATES, DataConfig, TaskConfig
from memory_vit.model import REGIMES, get_regime
from studies.command import between_commas

# Parts in the order of the report, and the regimes of each.
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
# A part needs all of these regimes, and at least one of its others.
_INDISPENSABLE = {
  "placement": ("memory",),
  "adapters": ("adapter",),
  "interference": ("memory", "memory_masked"),
  "extension": ("memory_masked",),
  "regimes": ("cls_masked",),
}
_NEED_OTHERS = ("interference", "extension")
_DEFAULT_SEARCH, _SEARCHES = "first", ("first", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A study on the data set of a configuration; refuses invalid options."""

  config: mv.Config
  # Each regime is reported at the one that is best on validation.
  learning_rates: tuple[float, ...] = LEARNING_RATES
  seeds: tuple[int, ...] = (0, 1, 2)
  # In regimes that need a run for each learning rate, "first" tries all of them
  # with the first seed, and the best one with further seeds; "all" tries all
  # learning rates with all seeds.
  search: str = _DEFAULT_SEARCH
  regimes: tuple[str, ...] = ()  # to run; () for all that the parts need
  # Per layer, `config.task.cells` among them, which parts use that do not vary
  # the number.
  cells: tuple[int, ...] = (1, 5, 10, 20)
  # Further data sets, for interference and extension: names, or options of
  # `data` in place of those of `config.data`.
  others: tuple[str | dict[str, Any], ...] = ()

  def __post_init__(self) -> None:
    for problem in self._problems():
      raise mv.MemoryVitError(problem)

  @property
  def data(self) -> DataConfig:
    return self.config.data

  @property
  def task(self) -> TaskConfig:
    return self.config.task

  @property
  def options(self) -> dict[str, Any]:
    """The options other than the configuration, as JSON values."""
    names = [field.name for field in dataclasses.fields(self)]
    return {name: getattr(self, name) for name in names if name != "config"}

  @classmethod
  def of(cls, config: mv.Config, options: Any) -> "Study":
    """Make a study from `options`, also after a round trip through JSON."""
    values: dict[str, Any] = {
      key: tuple(value) if isinstance(value, list) else value
      for key, value in options.items()
    }
    return cls(config=config, **values)

  @functools.cached_property
  def data_sets(self) -> dict[str, DataConfig]:
    """The data sets by name, the first one first."""
    found = {self.data.name: self.data}
    for i, given in enumerate(self.others):
      changes = {"name": given} if isinstance(given, str) else given
      where = f"--others, number {i}"
      values = {f"data.{key}": value for key, value in changes.items()}
      try:
        other = self.config.replaced({"data.name": "", **values}).data
      except mv.MemoryVitError as error:
        raise mv.MemoryVitError(f"{where}: {error}") from error
      # "folder" and "list" do not identify a data set; their directory does.
      name = other.name
      if name in ("folder", "list"):
        name = f"{name}:{Path(other.dir).name}"
      if slug(name) in {slug(known) for known in found}:
        raise mv.MemoryVitError(
          f"{where} is {name!r}, the name of an earlier data set: expected "
          "another one."
        )
      found[name] = other
    return found

  def regimes_of(self, part: str) -> list[str]:
    """The regimes that a part compares, restricted to --regimes."""
    wanted = self.regimes
    return [name for name in _PARTS[part] if not wanted or name in wanted]

  def search_seed(self, regime: str) -> int | None:
    """The seed that chooses a learning rate; None if all seeds do."""
    everything = self.search == "all" or get_regime(regime).shares_pass
    return None if everything else self.seeds[0]

  def parts(self, only: Sequence[str] = ()) -> list[str]:
    """The parts, or those in `only`, that have their regimes and data."""
    if unknown := sorted({*only} - {*PARTS}):
      raise mv.MemoryVitError(
        f"--only={str(unknown)[:200]}: expected some of {list(PARTS)}."
      )
    reasons = self.missing()
    for part in only:
      if reasons[part]:
        raise mv.MemoryVitError(f"--only={part} {reasons[part]}.")
    return [p for p in PARTS if p in (only or PARTS) and not reasons[p]]

  def missing(self) -> dict[str, str]:
    """What each part lacks; "" for a possible one."""
    return {part: self._why_not(part) for part in PARTS}

  def _why_not(self, part: str) -> str:
    if part in _NEED_OTHERS and not self.others:
      return "needs further data sets: expected some in --others"
    regimes = self.regimes_of(part)
    missing = [r for r in _INDISPENSABLE.get(part, ()) if r not in regimes]
    if missing:
      return f"needs {missing}: expected them in --regimes"
    return (
      "" if regimes else f"needs one of {list(_PARTS[part])}: see --regimes"
    )

  def _problems(self) -> list[str]:
    config, lines = self.config, []
    for key in ("learning_rates", "seeds", "cells", "regimes"):
      values = getattr(self, key)
      if len(set(values)) < len(values) or not (values or key == "regimes"):
        lines.append(
          f"--{key} is {values}, expected values that differ, at least one."
        )
    if unknown := [name for name in self.regimes if name not in REGIMES]:
      lines.append(f"--regimes has {unknown}, expected some of {[*REGIMES]}.")
    if self.search not in _SEARCHES:
      lines.append(f"--search is {self.search!r}, expected one of {_SEARCHES}.")
    if 0 in self.cells:
      lines.append("--cells has 0, expected at least 1.")
    if config.task.cells not in self.cells:
      lines.append(
        f"config.task.cells is {config.task.cells}, expected one of --cells "
        f"{self.cells}."
      )
    # The paper's configurations vary the learning rate by default.
    if config.sweep.learning_rate not in ((), LEARNING_RATES) or (
      dataclasses.replace(config.sweep, learning_rate=()).is_on
    ):
      lines.append("config.sweep is for one run: expected --learning_rates.")
    if config.task.attends_to or config.task.indirect:
      lines.append(
        "config.task.attends_to and config.task.indirect are for one run: "
        "expected none, as a study makes its own tasks."
      )
    return lines or self._problems_of_data()

  def _problems_of_data(self) -> list[str]:
    """Missing splits, which a study cannot do without."""
    lines = []
    for i, (name, data) in enumerate(self.data_sets.items()):
      where = f"of {name!r} in --others" if i else "of config.data"
      for key in ("name", "train", "validation", "test"):
        # Only the first data set and the one of extension are tested.
        if not getattr(data, key) and (key != "test" or i < 2):
          lines.append(
            f"{key!r} {where} is empty: a study trains, chooses on validation, "
            "and reports on test."
          )
    return lines


def slug(name: str) -> str:
  """Make a name safe for files, "sun397/tfds" -> "sun397-tfds"."""
  return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def declare(line: CommandLine) -> Callable[[mv.Config], Study]:
  """Declare the flags; the result makes the study after parsing."""
  default = {field.name: field.default for field in dataclasses.fields(Study)}
  rates = line.strings(
    "learning_rates", f"Between commas; else {default['learning_rates']}."
  )
  seeds = line.strings("seeds", f"Between commas; else {default['seeds']}.")
  search = line.string(
    "search",
    "Which seeds try all learning rates in regimes that need a run for each: "
    "first (the default) or all.",
  )
  regimes = line.strings(
    "regimes", "To run, between commas; else all that the parts need."
  )
  cells = line.strings("cells", f"Between commas; else {default['cells']}.")
  others = line.strings(
    "others",
    "A further data set, for interference and extension: a name, or JSON such "
    'as {"name": "places365_small", "test": "validation"}; may be given '
    "several times.",
  )

  def make(config: mv.Config) -> Study:
    given: dict[str, Any] = {
      "learning_rates": _numbers("learning_rates", rates(), float),
      "seeds": _numbers("seeds", seeds(), int),
      "cells": _numbers("cells", cells(), int),
      "search": search(),
      "regimes": between_commas(regimes()),
      "others": tuple(map(_data_set, others())),
    }
    return Study(config=config, **{k: v for k, v in given.items() if v})

  return make


def _numbers(
  name: str, values: Sequence[str], kind: type[int] | type[float]
) -> tuple[Any, ...]:
  """Numbers of a flag, within the bounds of the same axis of a sweep."""
  try:
    numbers = tuple(kind(text) for text in between_commas(values))
    axis = {"learning_rates": "learning_rate", "seeds": "seed"}.get(name, name)
    mv.Config().replaced({f"sweep.{axis}": numbers})
  except ValueError as error:  # MemoryVitError is one
    raise mv.MemoryVitError(
      f"--{name}={','.join(values)[:200]}: {error} Expected numbers with "
      "commas between them."
    ) from error
  return numbers


def _data_set(text: str) -> str | dict[str, Any]:
  if not text.startswith("{"):
    return text
  try:
    return dict(json.loads(text))
  except ValueError as error:
    raise mv.MemoryVitError(
      f"--others={text[:200]} is no JSON: {error}"
    ) from error
