"""Trials of a sweep, which train side by side, and how they share passes.

Masked training costs a forward pass, and one token for each task. Trials are
ordinary tasks: they share the pass and its images, and nothing else.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import psutil

from memory_vit import config as config_lib
from memory_vit.config import OPTIONS, Config, SweepConfig
from memory_vit.errors import ConfigError
from memory_vit.model.parts import PARTS
from memory_vit.model.regimes import get_regime
from memory_vit.model.vit_config import RANDOM

_AXES = {
  "regime": "regime",
  "learning_rate": "learning_rate",
  "cells": "task.cells",
  "seed": "seed",
}


@dataclasses.dataclass(frozen=True)
class Trial:
  """One of the tasks that a run trains.

  `config` is the configuration of a run that trains this trial alone.
  """

  name: str
  varied: Mapping[str, Any]
  config: Config

  @property
  def label(self) -> str:
    """Readable name of a directory, such as "learning_rate=0.1,cells=5"."""
    return ",".join(f"{k.split('.')[-1]}={v}" for k, v in self.varied.items())


def logdir_of(trial: Trial, workdir: Path) -> Path:
  """Return the directory of a trial, which TensorBoard shows as a run."""
  return workdir / "sweep" / trial.label if trial.label else workdir


def trials_of(config: Config, name: str) -> list[Trial]:
  """Return the trials of a run; without a sweep, a single one called `name`."""
  if not config.sweep.is_on:
    return [Trial(name, {}, config)]
  chosen = config.data.validation or config.optim.in_closed_form
  if not chosen and config.sweep.export != "all":
    raise ConfigError(
      "config.sweep needs config.data.validation, on which the best trial is "
      'chosen, or config.sweep.export="all", which exports each trial after '
      "its last step."
    )
  if config.sweep.seed and config.backbone.startswith(RANDOM):
    raise ConfigError(
      "config.sweep.seed would change the backbone as well, because this run "
      "initializes the backbone at random: give the backbone as a file."
    )
  combinations = _combinations(config.sweep)
  digits = len(str(len(combinations) - 1))
  trials = [
    Trial(f"{name}-{i:0{max(2, digits)}}", varied, _changed(config, varied))
    for i, varied in enumerate(combinations)
  ]
  _require_distinct(trials)
  _require_one_way(config, trials)
  return trials


def _require_distinct(trials: Sequence[Trial]) -> None:
  """Refuse two trials with equal values of all varied options."""
  keys = {key: operator.attrgetter(key) for t in trials for key in t.varied}
  seen: dict[tuple[Any, ...], Trial] = {}
  for trial in trials:
    values = tuple(value_of(trial.config) for value_of in keys.values())
    if values in seen:
      raise ConfigError(
        "config.sweep has trials that are the same: "
        f"{dict(seen[values].varied)} and {dict(trial.varied)}."
      )
    seen[values] = trial


def _require_one_way(config: Config, trials: Sequence[Trial]) -> None:
  """Refuse a sweep that mixes heads in closed form with trained tasks."""
  base = config.optim.in_closed_form
  names = {t.config.optim.name for t in trials}
  if any(t.config.optim.in_closed_form != base for t in trials):
    raise ConfigError(
      f"config.sweep has trials with optim.name {sorted(names)}: heads in "
      "closed form need a run of their own, for example with --config=closed."
    )


def by_pass_group(trials: Sequence[Trial]) -> list[list[Trial]]:
  """Group trials by `pass_group`."""
  groups: dict[str, list[Trial]] = {}
  for trial in trials:
    groups.setdefault(pass_group(trial.config), []).append(trial)
  return [*groups.values()]


def pass_group(config: Config) -> str:
  """Return the pass group of a trial; all masked regimes form one group."""
  return "masked" if config.learned.has_token else config.regime


def size(trial: Trial) -> tuple[tuple[int, ...], ...]:
  """Return a sort key: the costs of a trial's parts, in reverse order."""
  regime, options = trial.config.learned, trial.config.task
  return tuple(
    part.cost(options) if regime.has(part.name) else ()
    for part in reversed(PARTS.values())
  )


def exported_names(
  config: Config, name: str, trials: Sequence[Trial]
) -> set[str]:
  """Return the names under which tasks of a run may be exported."""
  names = {name, *(trial.name for trial in trials)}
  if config.sweep.regime:
    names |= {best_of_regime(name, trial.config.regime) for trial in trials}
  return names


def best_of_regime(name: str, regime: str) -> str:
  """Name the best trial of a regime for export, if it is not best overall."""
  return f"{name}-{regime.replace('+', '-')}"


@dataclasses.dataclass(frozen=True)
class PassPlan:
  """The trials that share each pass of a run, by an estimate of memory."""

  passes: tuple[tuple[str, ...], ...]  # names of the trials of each pack
  # Bytes that a pack of one trial takes; None if no pack was measured.
  bytes_of_one: int | None = None
  # Bytes that each further trial adds to a pack; None if no pack was measured.
  bytes_per_trial: int | None = None

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "PassPlan":
    """Read a plan that went through `dataclasses.asdict` and JSON."""
    passes = tuple(tuple(names) for names in values["passes"])
    return cls(**{**values, "passes": passes})


def packs_of(trials: Sequence[Trial], at_once: int) -> list[list[Trial]]:
  """Distribute trials over as few packs as possible, of about equal size.

  Trials are sorted by their side streams, because equal side streams share
  matrix products, and then by their numbers of cells, because a pack is padded
  to its longest memory.
  """
  count = math.ceil(len(trials) / at_once)
  if count == 1:
    return [list(trials)]
  by_size = sorted(trials, key=size)
  most = math.ceil(len(trials) / count)
  return [by_size[i : i + most] for i in range(0, len(trials), most)]


def at_once(first: int, further: int, free: int) -> int:
  """Return the number of trials that fit into memory, from sizes in bytes."""
  if first > free:
    raise ConfigError(
      f"one trial takes {first / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB "
      "are available: expected a smaller config.batch_size, more "
      "config.optim.accumulation_steps, or a larger config.sweep.memory_gib."
    )
  return 1 + (free - first) // max(1, further)


def free_bytes(memory_gib: float) -> int:
  """Return the bytes that a pack may take; 0 GiB means all free memory.

  A tenth of the free memory stays free on an accelerator, and half on a CPU,
  because compiling takes memory that the estimate does not include.
  """
  if memory_gib:
    return int(memory_gib * 2**30)
  stats = jax.local_devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return int(0.9 * (stats["bytes_limit"] - stats["bytes_in_use"]))
  return psutil.virtual_memory().available // (2 * jax.local_device_count())


def _combinations(sweep: SweepConfig) -> list[dict[str, Any]]:
  """Return {option: value} for each trial: all combinations of the lists."""
  axes = [
    [(_AXES[axis], value) for value in getattr(sweep, axis)]
    for axis in _AXES
    if getattr(sweep, axis)
  ]
  combinations = []
  for overrides, *values in itertools.product(sweep.overrides or ({},), *axes):
    _require_keys(overrides, [pair[0] for pair in values])
    varied = {**overrides, **dict(values)}
    if sweep.regime and "cells" not in get_regime(varied["regime"]).fields:
      varied.pop("task.cells", None)
      if varied in combinations:
        continue
    combinations.append(varied)
  return combinations


def _require_keys(overrides: Mapping[str, Any], axes: Sequence[str]) -> None:
  can_vary = [key for key, option in OPTIONS.items() if option.sweep]
  for key in overrides:
    if key not in can_vary:
      raise ConfigError(
        f"config.sweep.overrides: {key!r} cannot vary within a pass. Options "
        f"that can vary: {can_vary}."
      )
    if key in axes:
      raise ConfigError(
        f"config.sweep.overrides: {key!r} is varied by a list of config.sweep "
        "as well: expected the option in overrides or in a list, not in both."
      )


def _changed(config: Config, varied: Mapping[str, Any]) -> Config:
  """Return the configuration of a run that trains one trial alone."""
  fixed = {f"sweep.{k}": v for k, v in vars(SweepConfig()).items()}
  # All trials train on the same batches, even if a sweep varies the seed.
  fixed["data.seed"] = config_lib.data_seed(config)
  if "regime" in varied and config.cache.has_rows:
    fixed["cache.what"] = config_lib.cacheable_part(varied["regime"])
  # Replace all options at once: a new `cache.what` must suit the new regime.
  return config.replaced({**fixed, **varied})
