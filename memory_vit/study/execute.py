"""Trains the runs of a study, or finds that they were trained before."""

import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import Config, to_dict
from memory_vit.data import datasets, inventory
from memory_vit.data.data_record import DataRecord
from memory_vit.data.inventory import Inventory
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import ConfigError, DataError, DivergedError
from memory_vit.run_result import RunResult, read_result
from memory_vit.runtime import files, processes, schema
from memory_vit.runtime.preemption import StopSignal
from memory_vit.study import plan
from memory_vit.study.runs import Run, config_of, data_sets
from memory_vit.study.selection import best_parent
from memory_vit.study.trials import (
  DIVERGED,
  StudyTrial,
  Trials,
  directory_of,
  diverged_trials,
  trials_of,
)
from memory_vit.training import resume, run

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRun:
  """A finished run.

  Attributes:
    trials: their results.
    data: digests of its data, from `DataRecord.digests`; empty of a run all of
      whose trials diverged, and of an earlier version.
  """

  trials: list[StudyTrial]
  data: Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Executor:
  """Trains and finds the runs of one study.

  Attributes:
    config: of the study.
    workdir: of the study.
    backbone: file or name, as `config.backbone`.
    fingerprint: of the backbone.
    stop: see `run.train_and_evaluate`.
  """

  config: Config
  workdir: Path
  backbone: str
  fingerprint: str
  stop: StopSignal | None = None

  def finished(self, parts: Sequence[str]) -> dict[str, list[StudyTrial]]:
    """Finds the runs of some parts that earlier calls have finished.

    Raises:
      ConfigError: where their data are not those that are there now.
    """
    found: dict[str, StudyRun] = {}
    trials: dict[str, list[StudyTrial]] = {}
    checked: set[Run] = set()
    # What is finished says what else may be.
    while new := [
      planned
      for planned in plan.plan(self.config, parts, trials)
      if planned.learning_rates and planned not in checked
    ]:
      for planned in new:
        checked.add(planned)
        if planned.reads and planned.reads.name not in trials:
          continue
        if ended := self._find(planned, trials):
          found[planned.name] = ended
          trials[planned.name] = ended.trials
    require_same_data(self.config, found, self.workdir / "runs")
    return trials

  def train(self, planned: Run, trials: Trials) -> list[StudyTrial]:
    """Trains a run, or goes on with it; a finished one is only read.

    A run all of whose trials diverge is finished as well: that is a result,
    and is kept in `lost.json`.

    Args:
      planned: the run; its learning rates are known.
      trials: of the finished runs, that which it reads among them.

    Raises:
      ConfigError: where another configuration has finished the run there.
    """
    if found := self._find(planned, trials):
      return found.trials
    config = self._config_of(planned, trials)
    directory = directory_of(self.workdir, planned.name)
    self._require_unfinished(config, directory)
    logger.info("run %s", directory)
    began = time.perf_counter()
    try:
      run.train_and_evaluate(config, directory, self.stop)
    except DivergedError as error:
      logger.warning("%s", error)
      diverged = {
        "backbone": {"fingerprint": self.fingerprint},
        "message": str(error),
        "wall_seconds": round(time.perf_counter() - began, 2),
      }
      files.write_json(directory / DIVERGED, diverged)
    remove_checkpoints(directory)
    return trials_of(planned, _ending(directory), directory)

  def _find(self, planned: Run, trials: Trials) -> StudyRun | None:
    """Reads a run of this configuration; None where it is not finished."""
    config = self._config_of(planned, trials)
    if config is None:
      logger.warning("run %s: what it would read diverged", planned.name)
      return StudyRun(trials=diverged_trials(planned), data={})
    directory = directory_of(self.workdir, planned.name)
    ending = _ending(directory)
    if not ending or self._differences(config, directory, ending):
      return None
    found = trials_of(planned, ending, directory)
    return StudyRun(trials=found, data=ending.data)

  def _config_of(self, planned: Run, trials: Trials) -> Config | None:
    """Configures a run; None where all that it could read diverged."""
    read = []
    if planned.reads:
      parent = best_parent(planned, trials, self.config.task.cells)
      if parent is None:
        return None
      read = [parent.task]
    return config_of(self.config, planned, self.backbone, read)

  def _require_unfinished(self, config: Config, directory: Path) -> None:
    """Refuses to train over the result of another configuration."""
    ending = _ending(directory)
    if ending is not None:
      raise ConfigError(
        f"the run in {directory} was finished with another configuration. Give "
        "that one, or another --workdir.\n  "
        + "\n  ".join(self._differences(config, directory, ending))
      )

  def _differences(
    self, config: Config, directory: Path, ending: RunResult
  ) -> list[str]:
    """Lists the options that matter and differ from those of a finished run."""
    made_by = files.read_object(directory / "config.json")
    found, now = (
      {**resume.what_matters(values), **_epochs(values), "backbone": mark}
      for values, mark in (
        (made_by, ending.backbone.fingerprint),
        (to_dict(config), self.fingerprint),
      )
    )
    return schema.differences(found, now)


def remove_checkpoints(directory: Path) -> None:
  """Removes the saved states of a finished run.

  With its two states, each with the best so far, a run of the regime `full`
  holds a backbone many times over; its result and its exported task stay.

  Args:
    directory: of the run.
  """
  states = directory / "checkpoints"
  if jax.process_index() == 0 and states.exists():
    shutil.rmtree(states)


def require_data(config: Config, runs: Sequence[Run], finished: Trials) -> None:
  """Opens what runs will read: a wrong split must not cost those before it."""
  sets, splits = data_sets(config), {}
  for planned in runs:
    if planned.name not in finished:
      where = sets[planned.data]
      tested = [where.test] if planned.tested else []
      for split in (where.train, where.validation, *tested):
        splits[where, split] = None
  for where, split in splits:
    datasets.open_split(
      where, split, config.stall_timeout, config.trust_data_code
    )


def require_same_data(
  config: Config, done: Mapping[str, StudyRun], runs: Path
) -> None:
  """Refuses finished runs whose data are others now; all processes must call.

  Data that are not there any more are named in the log: what is finished does
  not need them.

  Args:
    config: of the study.
    done: {name: what a finished run left}.
    runs: the directory of the runs.

  Raises:
    ConfigError: with what differs.
  """
  other = processes.on_process_0(lambda: _other_data(config, done, runs))
  if other:
    names, lines = other
    raise ConfigError(
      f"the data are not those of the finished runs {names}. Put those back, "
      "or give another --workdir.\n  " + "\n  ".join(lines)
    )


def _other_data(
  config: Config, done: Mapping[str, StudyRun], runs: Path
) -> tuple[list[str], list[str]] | None:
  """The runs whose data are others now, and what differs for the first."""
  sets = data_sets(config)

  @functools.cache
  def inventory_of(data_set: str, role: str) -> Inventory | None:
    where = sets[data_set]
    split = getattr(where, role)
    try:
      return datasets.take_inventory(
        SplitRef.of(where, split, trust_code=config.trust_data_code)
      )
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      return None

  @functools.cache
  def digest_now(data_set: str, role: str, by: str) -> str | None:
    found = inventory_of(data_set, role)
    return found and inventory.digest(found.table(by))

  names, lines = [], []
  for name, ended in done.items():
    of = ended.trials[0].data
    for role in ("train", "validation", "test"):
      known = ended.data.get(role)
      now = known and digest_now(of, role, known["by"])
      if not now or now == known["sha256"]:
        continue
      names.append(name)
      if names[0] == name:
        record = DataRecord(
          directory=runs / name / "inventory",
          by=known["by"],
          inventories={role: inventory_of(of, role)},
        )
        first, *more = record.difference(role, known)
        lines += [f"{role}: {first}", *more]
  return (list(dict.fromkeys(names)), lines) if names else None


def _ending(directory: Path) -> RunResult | None:
  """Reads how a run ended, on all processes."""
  return read_result(directory, DIVERGED) or read_result(directory)


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
  """Length in epochs, where it is given so, in place of steps.

  How many steps these are the run itself finds out, in its own data.
  """
  epochs = values.get("epochs")  # earlier versions had no such option
  return {"config.total_steps": f"{epochs} epochs"} if epochs else {}
