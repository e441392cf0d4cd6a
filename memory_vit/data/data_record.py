"""Record the data of a run, to notice later that they have changed.

A saved state holds one digest for each split. The table of files behind a
digest, WORKDIR/inventory/SHA256.json, shows which files differ.
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

# Splits that must be unchanged when a run resumes. The split "upstream" may
# change, because a resumed run repeats all evaluations on this split.
_COMPARED = ("train", "validation", "test")
# Digests of splits, as in `RunResult.data`: {split: {"by": "files" or
# "contents", "sha256": digest of the `Table` of the split}}.
Digests = Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecord:
  """The data of a run as process 0 sees them now.

  Attributes:
    directory: where tables are stored.
    by: "files" or "contents", as `config.data.digest`.
    data_files: {split: its files}; splits are "train", ..., "upstream".
  """

  directory: Path = Path()
  by: str = "files"
  data_files: Mapping[str, DataFiles] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def digests(self) -> dict[str, dict[str, str]]:
    """The `Digests` of all splits; all processes must call this property."""
    return processes.on_process_0(
      lambda: {
        split: {"by": self.by, "sha256": data_files.digest(table)}
        for split, table in self._tables.items()
      }
    )

  @property
  def compared(self) -> dict[str, dict[str, str]]:
    """The `digests` that must be the same when the run resumes."""
    return {key: self.digests[key] for key in _COMPARED if key in self.digests}

  def differences(self, found: Digests) -> dict[str, list[str]]:
    """Return {split: changes since `found`}; all processes must call."""
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
      split: listed.table(self.by) for split, listed in self.data_files.items()
    }

  def difference(
    self, split: str, found: Mapping[str, str] | None
  ) -> list[str]:
    """Describe changes since the digest `found`; call on process 0 only.

    `found["by"]` decides whether files or contents are compared.
    """
    if found is None:
      return ["this split was added"]
    if split not in self.data_files:
      return ["this split was removed"]
    table = (
      self._tables[split]
      if found["by"] == self.by
      else self.data_files[split].table(found["by"])
    )
    if data_files.digest(table) == found["sha256"]:
      return []
    before = self._kept(found["sha256"])
    if before is None:
      return [f"the changes are unknown: {self.directory} has no earlier table"]
    return data_files.differences(before, table)

  def _kept(self, sha256: str) -> Table | None:
    """Return the table with digest `sha256`; None if missing or corrupt."""
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
  """Record the files of splits, as a run does; all processes must call.

  Args:
    config: the configuration that names the data.
    directory: tables of files are written to `directory`/inventory/.
    roles: splits to record: "train", "validation" or "test".

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
  """Compare data with the data of a finished run; all processes must call.

  A split that cannot be found is not compared, and a warning says so.

  Args:
    config: the configuration that names the data.
    directory: the directory of the run.
    digests: the `RunResult.data` of the run, or the result of `record_data`.

  Returns:
    Lines that name the changes; none if nothing differs.
  """
  return processes.on_process_0(
    lambda: _differences(config, directory, digests)
  )


def run_record(
  directory: Path, by: str, found: Mapping[str, DataFiles]
) -> DataRecord:
  """Return the record of a run whose working directory is `directory`."""
  return DataRecord(directory=directory / "inventory", by=by, data_files=found)


def _differences(
  config: Config, directory: Path, digests: Digests
) -> list[str]:
  refs, lines = configured_splits(config), []
  for role in _COMPARED:
    if role not in digests or role not in refs:
      continue
    try:
      current = datasets.find_data_files(refs[role])
    except DataError as error:
      logger.warning("cannot check whether data changed: %s", error)
      continue
    record = run_record(directory, digests[role]["by"], {role: current})
    first, *more = record.difference(role, digests[role]) or [""]
    lines += [f"{role}: {first}", *more] if first else []
  return lines
