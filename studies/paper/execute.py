"""Trains the runs of a study, or finds that they were trained before."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from memory_vit.config import Config
from memory_vit.data import data_files, datasets
from memory_vit.data.data_files import DataFiles
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split_ref import (
  SplitRef,
  configured_splits,
  training_split,
)
from memory_vit.errors import (
  ConfigError,
  DataError,
)
from memory_vit.runtime import processes
from memory_vit.runtime.preemption import StopSignal
from studies.paper import finished_runs, plan
from studies.paper.runs import Run, config_of, data_sets
from studies.paper.selection import best_parent
from studies.paper.trials import (
  StudyTrial,
  Trials,
  directory_of,
  diverged_trials,
  load_ending,
  trials_of,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Executor:
  """Trains and finds the runs of one study, on a backbone from a file."""

  config: Config
  workdir: Path
  backbone: str
  fingerprint: str
  stop: StopSignal | None = None

  def finished(self, parts: Sequence[str]) -> dict[str, list[StudyTrial]]:
    """Find the runs of some parts that earlier calls have finished.

    Raises:
      ConfigError: where their data are not those that are there now.
    """
    trials = plan.finished_trials(self.config, parts, self._recall)
    require_same_data(self.config, trials, self.workdir)
    return trials

  def train(self, planned: Run, trials: Trials) -> list[StudyTrial]:
    """Train a run, or go on with it; a finished one is only read.

    A run all of whose trials diverge is finished as well: that is a result,
    and is kept in `lost.json`. What a run reads is finished before it.

    Raises:
      ConfigError: where another configuration has finished the run there.
      TrainingError: where its result is gone at once.
    """
    config = self._config_of(planned, trials)
    if config is None:
      return _lost(planned)
    directory = directory_of(self.workdir, planned.name)
    ending = finished_runs.finish(
      config, directory, self.fingerprint, self.stop
    )
    return trials_of(planned, ending, directory)

  def _recall(self, planned: Run, trials: Trials) -> list[StudyTrial] | None:
    """Read a run, which cannot be trained where what it reads diverged."""
    config = self._config_of(planned, trials)
    return self._find(planned, config) if config else _lost(planned)

  def _find(self, planned: Run, config: Config) -> list[StudyTrial] | None:
    """Read a run of this configuration; None where it is not finished."""
    directory = directory_of(self.workdir, planned.name)
    ending = finished_runs.find(config, directory, self.fingerprint)
    return trials_of(planned, ending, directory) if ending else None

  def _config_of(self, planned: Run, trials: Trials) -> Config | None:
    """Configure a run; None where all that it could read diverged."""
    read = []
    if planned.reads:
      parent = best_parent(planned.reads, trials, self.config.task.cells)
      if parent is None or parent.task is None:
        return None
      read = [parent.task]
    return config_of(self.config, planned, self.backbone, read)


def _lost(planned: Run) -> list[StudyTrial]:
  """The trials of a run that cannot be trained."""
  logger.warning("run %s: what it would read diverged", planned.name)
  return diverged_trials(planned)


def require_data(config: Config, runs: Sequence[Run], finished: Trials) -> None:
  """Open what runs will read: a wrong split must not cost those before it."""
  for ref in splits_to_read(config, runs, finished):
    datasets.open_on_all_processes(ref)


def splits_to_read(
  config: Config, runs: Sequence[Run], finished: Trials
) -> Sequence[SplitRef]:
  """The splits that unfinished runs read, each once."""
  sets = data_sets(config)
  refs: dict[SplitRef, None] = {}
  for planned in runs:
    if planned.name not in finished:
      there = dataclasses.replace(
        config, data=sets[planned.data], seed=planned.seed
      )
      splits = configured_splits(there)
      for role in ("train", "validation", *["test"] * planned.tested):
        refs[splits[role]] = None
  return list(refs)


def require_same_data(config: Config, done: Trials, workdir: Path) -> None:
  """Refuse finished runs whose data are others now; all processes must call.

  Data that are not there any more are named in the log: what is finished does
  not need them.

  Raises:
    ConfigError: with what differs.
  """
  other = processes.on_process_0(lambda: _other_data(config, done, workdir))
  if other:
    names, lines = other
    raise ConfigError(
      f"the data are not those of the finished runs {names}. Put those back, "
      "or give another --workdir.\n  " + "\n  ".join(lines)
    )


def _other_data(
  config: Config, done: Trials, workdir: Path
) -> tuple[list[str], list[str]] | None:
  """The runs whose data are others now, and what differs for the first."""
  sets = data_sets(config)

  @functools.cache
  def inventory_of(data_set: str, role: str, seed: int) -> DataFiles | None:
    there = dataclasses.replace(config, data=sets[data_set], seed=seed)
    ref = SplitRef.of(
      there.data,
      getattr(there.data, role),
      trust_code=config.trust_data_code,
    )
    try:
      return datasets.take_inventory(
        training_split(ref, there) if role == "train" else ref
      )
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      return None

  @functools.cache
  def digest_now(data_set: str, role: str, seed: int, by: str) -> str | None:
    found = inventory_of(data_set, role, seed)
    return data_files.digest(found.table(by)) if found else None

  names, lines = [], []
  for name, trials in done.items():
    directory = directory_of(workdir, name)
    of = trials[0].data
    # Only where it chooses the images: each look takes time.
    chosen = sets[of].per_class or sets[of].first
    seed = trials[0].seed if chosen else config.seed
    # What diverged has none; nor has a run of an earlier version.
    learned = any(trial.task for trial in trials)
    ending = load_ending(directory) if learned else None
    digests = ending.data if ending else {}
    for role in ("train", "validation", "test"):
      known = digests.get(role)
      found = inventory_of(of, role, seed) if known else None
      if not known or not found:
        continue
      if digest_now(of, role, seed, known["by"]) == known["sha256"]:
        continue
      if name not in names:
        names.append(name)
      if names == [name]:
        record = DataRecord(
          directory=directory / "inventory",
          by=known["by"],
          inventories={role: found},
        )
        first, *more = record.difference(role, known)
        lines += [f"{role}: {first}", *more]
  return (names, lines) if names else None
