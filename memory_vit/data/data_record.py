"""A record of the data of a run, to notice later that they have changed.

A saved state holds one digest for each split; WORKDIR/inventory/SHA256.json is
the table of files behind a digest, which says what differs.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

from memory_vit.data import data_files
from memory_vit.data.data_files import DataFiles, Table
from memory_vit.runtime import files, processes

# The data of the original outputs may be others when a run goes on: they are
# evaluated before and after training in one process.
_COMPARED = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecord:
  """The data of a run as process 0 sees them now.

  Attributes:
    directory: of the tables.
    by: `config.data.digest`.
    inventories: {"train": of that split, ..., "upstream": ...}.
  """

  directory: Path = Path()
  by: str = "files"
  inventories: Mapping[str, DataFiles] = dataclasses.field(default_factory=dict)

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
    """The `digests` that a continued run must share."""
    return {key: self.digests[key] for key in _COMPARED if key in self.digests}

  def differences(
    self, found: Mapping[str, Mapping[str, str]]
  ) -> dict[str, list[str]]:
    """{split: what differs}, where anything does; all processes must call.

    `found` is what `compared` was in an earlier process, which decides whether
    files or contents are compared.
    """
    return processes.on_process_0(
      lambda: {
        split: lines
        for split in _COMPARED
        if (split in found or split in self.inventories)
        and (lines := self.difference(split, found.get(split)))
      }
    )

  def keep(self) -> None:
    """Write the tables that are not there yet; all processes must call."""
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
      split: found.table(self.by) for split, found in self.inventories.items()
    }

  def difference(
    self, split: str, found: Mapping[str, str] | None
  ) -> list[str]:
    """Describe what differs in a split, on process 0 alone.

    `found` is its entry in `digests` of an earlier process, where it had one.
    """
    if found is None:
      return ["which files it was is not known: an earlier version saved this"]
    if split not in self.inventories:
      return ["there was such a split, and is none now"]
    table = (
      self._tables[split]
      if found["by"] == self.by
      else self.inventories[split].table(found["by"])
    )
    if data_files.digest(table) == found["sha256"]:
      return []
    before = self._kept(found["sha256"])
    if before is None:
      return [f"which files differ is not known: {self.directory} lacks them"]
    return data_files.differences(before, table)

  def _kept(self, sha256: str) -> Table | None:
    """A table that was kept; None where it is not there any more."""
    try:
      table = json.loads(self._file(sha256).read_text(encoding="utf-8"))
    except (OSError, ValueError):
      return None
    return table if data_files.digest(table) == sha256 else None

  def _file(self, sha256: str) -> Path:
    return self.directory / f"{sha256}.json"
