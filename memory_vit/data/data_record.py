"""A record of the data of a run, to notice later that they have changed.

A saved state holds one digest for each split; WORKDIR/inventory/SHA256.json is
the table of files behind a digest, which says what differs.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from memory_vit.config import Config
from memory_vit.data import data_files, datasets
from memory_vit.data.data_files import DataFiles, Table
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import DataError
from memory_vit.runtime import files, processes

logger = logging.getLogger(__name__)

# The data of the original outputs may be others when a run resumes: they are
# evaluated before and after training in one process.
_COMPARED = ("train", "validation", "test")
# {split: {"by": kind, "sha256": of its table}}, as `RunResult.data`.
Digests = Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecord:
  """The data of a run as process 0 sees them now.

  Attributes:
    directory: of the tables.
    by: `config.data.digest`.
    data_files: {"train": of that split, ..., "upstream": ...}.
  """

  directory: Path = Path()
  by: str = "files"
  data_files: Mapping[str, DataFiles] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def digests(self) -> dict[str, dict[str, str]]:
    """{split: {"by": kind, "sha256": of its table}}; all must call."""
    return processes.on_process_0(
      lambda: {
        split: {"by": self.by, "sha256": data_files.digest(table)}
        for split, table in self._tables.items()
      }
    )

  @property
  def compared(self) -> dict[str, dict[str, str]]:
    """The `digests` that a resumed run must share."""
    return {key: self.digests[key] for key in _COMPARED if key in self.digests}

  def differences(self, found: Digests) -> dict[str, list[str]]:
    """{split: what differs} from an earlier `compared`; all must call."""
    return processes.on_process_0(
      lambda: {
        split: lines
        for split in _COMPARED
        if (split in found or split in self.data_files)
        and (lines := self.difference(split, found.get(split)))
      }
    )

  def keep(self) -> None:
    """Write the tables that do not exist yet; all processes must call."""
    compared = self.compared

    def write() -> None:
      for split in compared:
        file = self._file(compared[split]["sha256"])
        if not file.exists():
          with files.writing(file):
            self.directory.mkdir(parents=True, exist_ok=True)
          files.write_text(file, data_files.text_of(self._tables[split]))

    processes.on_process_0(write)

  @functools.cached_property
  def _tables(self) -> dict[str, Table]:
    return {
      split: found.table(self.by) for split, found in self.data_files.items()
    }

  def difference(
    self, split: str, found: Mapping[str, str] | None
  ) -> list[str]:
    """Differences from the digest of an earlier process; on process 0 alone.

    That digest decides whether files or contents are compared.
    """
    if found is None:
      return ["there was no such split, and there is one now"]
    if split not in self.data_files:
      return ["there was such a split, and there is none now"]
    table = (
      self._tables[split]
      if found["by"] == self.by
      else self.data_files[split].table(found["by"])
    )
    if data_files.digest(table) == found["sha256"]:
      return []
    before = self._kept(found["sha256"])
    if before is None:
      return [f"which files differ is not known: {self.directory} lacks them"]
    return data_files.differences(before, table)

  def _kept(self, sha256: str) -> Table | None:
    """A table that was written; None if it is missing or damaged."""
    try:
      table = json.loads(self._file(sha256).read_text(encoding="utf-8"))
    except (OSError, ValueError):
      return None
    return table if data_files.digest(table) == sha256 else None

  def _file(self, sha256: str) -> Path:
    return self.directory / f"{sha256}.json"


def record_data(
  config: Config, directory: Path, roles: Sequence[str]
) -> dict[str, dict[str, str]]:
  """Write which files there are, as a run does; all processes must call.

  Args:
    config: that names the data.
    directory: in whose inventory/ their tables are written.
    roles: "train", "validation" or "test".

  Returns:
    {role: digest}, for `data_differences`.
  """
  record = run_record(
    directory,
    config.data.digest,
    {role: datasets.open_run_split(config, role).data_files for role in roles},
  )
  record.keep()
  return record.digests


def data_differences(
  config: Config, directory: Path, digests: Digests
) -> list[str]:
  """Differences of data from those of a finished run; all processes must call.

  Data that do not exist any more are named in the log: whether they have
  changed cannot be known.

  Args:
    config: that names the data.
    directory: of the run.
    digests: of the data then, `RunResult.data`, or from `record_data`.

  Returns:
    Lines; none if nothing differs.
  """
  return processes.on_process_0(
    lambda: _differences(config, directory, digests)
  )


def run_record(
  directory: Path, by: str, found: Mapping[str, DataFiles]
) -> DataRecord:
  """The record of a run in a directory."""
  return DataRecord(directory=directory / "inventory", by=by, data_files=found)


def _differences(
  config: Config, directory: Path, digests: Digests
) -> list[str]:
  refs, lines = configured_splits(config), []
  for role in _COMPARED:
    if role not in digests or role not in refs:
      continue
    try:
      found = datasets.find_data_files(refs[role])
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      continue
    record = run_record(directory, digests[role]["by"], {role: found})
    first, *more = record.difference(role, digests[role]) or [""]
    lines += [f"{role}: {first}", *more] if first else []
  return lines
