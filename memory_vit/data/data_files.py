"""List the files of a split of a data set, to recognise changes later.

A table holds the name, the size and a mark of every file. The mark is the
modification time (by "files"), or the SHA-256 of all bytes (by "contents").
"""

import dataclasses
import hashlib
import json
import multiprocessing.pool
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memory_vit.runtime import checksums, messages

# Key in `DataFiles.facts` for a digest of paths and labels.
LISTED = "listed paths and labels"
# Maximum number of files that a message names for each kind of change.
_SHOWN = 5
# Use several threads: network file systems answer many requests at once.
_THREADS = 8
# Recorded size of a path that is not a regular file, or cannot be read.
_NO_SIZE = -1

# A table is {"by": value of `config.data.digest`, "facts": `DataFiles.facts`,
# "files": {name of a file: [size, modification time or SHA-256]}}.
Table = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFiles:
  """Names and paths of the files of a split; files may be unreadable.

  Attributes:
    facts: other recorded properties of the data set, as JSON values.
    files: {name: path}; a name does not depend on where the data set lies.
  """

  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def table(self, by: str) -> Table:
    """Examine all files; `by` is "files", or "contents" to read every byte."""
    examine = _contents if by == "contents" else _file
    return {"by": by, "facts": dict(self.facts), "files": self._each(examine)}

  def sizes(self) -> str:
    """Return a digest of names and sizes, equal for copies on several hosts."""
    sizes = {name: size for name, (size, _) in self._each(_file).items()}
    return digest({"facts": dict(self.facts), "files": sizes})

  def _each(self, examine: Callable[[str], list[Any]]) -> dict[str, list[Any]]:
    with multiprocessing.pool.ThreadPool(_THREADS) as pool:
      # Pass 64 paths to a thread at once, because passing a single path takes
      # longer than examining the file by `stat`.
      rows = list(pool.imap(examine, list(self.files.values()), chunksize=64))
    return dict(zip(self.files, rows, strict=True))


def text_of(table: Table) -> str:
  """Return a table as JSON, equal for equal tables; names need not be UTF-8."""
  return json.dumps(table, sort_keys=True, separators=(",", ":"))


def digest(table: Table) -> str:
  """Return the SHA-256 of a table."""
  return hashlib.sha256(text_of(table).encode()).hexdigest()


def differences(before: Table, now: Table) -> list[str]:
  """Describe changes, in lines: counts of files, facts, some file names."""
  old, new = before["files"], now["files"]
  changes = {
    "missing": old.keys() - new.keys(),
    "new": new.keys() - old.keys(),
    "changed": {n for n in old.keys() & new.keys() if old[n] != new[n]},
  }
  kinds = {kind: sorted(names) for kind, names in changes.items() if names}
  counts = ", ".join(f"{len(names):,} {kind}" for kind, names in kinds.items())
  lines = [f"{counts} (of {len(old):,} files)"] if kinds else []
  lines += [
    f"{key}: {messages.brief(before['facts'].get(key))}, now "
    f"{messages.brief(now['facts'].get(key))}"
    for key in sorted(before["facts"].keys() | now["facts"].keys())
    if before["facts"].get(key) != now["facts"].get(key)
  ]
  for kind, names in kinds.items():
    named = messages.name_list([*map(messages.escaped, names)], _SHOWN)
    lines.append(f"  {kind}: {named}")
  return lines


def _file(path: str) -> list[Any]:
  """Return [size in bytes, modification time in ns]; [-1, reason] on error."""
  try:
    status = os.stat(path)
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
  if not stat.S_ISREG(status.st_mode):
    return [_NO_SIZE, "no regular file"]
  return [status.st_size, status.st_mtime_ns]


def _contents(path: str) -> list[Any]:
  """Return [size in bytes, SHA-256]; [-1, reason] on error."""
  entry = _file(path)
  if entry[0] == _NO_SIZE:
    return entry
  try:
    return [entry[0], checksums.file_digest(Path(path))]
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
