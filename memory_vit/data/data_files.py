"""The files of a split of a data set, to recognise changes later.

A table holds the name, the size and a mark of every file: by "files" the time
of its last change, by "contents" the SHA-256 of its bytes. Nothing is decoded.
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

# The fact that holds a digest of paths and labels.
LISTED = "listed paths and labels"
# Files of a kind of change that a message names.
_SHOWN = 5
# File systems over a network answer several at once.
_THREADS = 8
# In place of the size of what is no regular file.
_NO_SIZE = -1

# {"by": `config.data.digest`, "facts": as in `DataFiles`,
#  "files": {name: [size, mark]}}
Table = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFiles:
  """The names and paths of the files of a split; nothing of them is read.

  Attributes:
    facts: what is recorded of the data set besides its files, as JSON values.
    files: {name, which is the same wherever the data set lies: path}.
  """

  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def table(self, by: str) -> Table:
    """Examine all files; `by` is "files", or "contents" to read every byte."""
    examine = _contents if by == "contents" else _file
    return {"by": by, "facts": dict(self.facts), "files": self._each(examine)}

  def sizes(self) -> str:
    """A digest of names and sizes, which copies on several hosts share."""
    sizes = {name: size for name, (size, _) in self._each(_file).items()}
    return digest({"facts": dict(self.facts), "files": sizes})

  def _each(self, examine: Callable[[str], list[Any]]) -> dict[str, list[Any]]:
    with multiprocessing.pool.ThreadPool(_THREADS) as pool:
      # In chunks: to examine a file takes less time than to hand it out.
      found = list(pool.imap(examine, list(self.files.values()), chunksize=64))
    return dict(zip(self.files, found, strict=True))


def text_of(table: Table) -> str:
  """A table as JSON, equal for equal tables; names need not be UTF-8."""
  return json.dumps(table, sort_keys=True, separators=(",", ":"))


def digest(table: Table) -> str:
  """The SHA-256 of a table."""
  return hashlib.sha256(text_of(table).encode()).hexdigest()


def differences(before: Table, now: Table) -> list[str]:
  """Lines: the number of files that differ, facts, and some names of files."""
  old, new = before["files"], now["files"]
  changes = {
    "missing": old.keys() - new.keys(),
    "new": new.keys() - old.keys(),
    "changed": {n for n in old.keys() & new.keys() if old[n] != new[n]},
  }
  found = {kind: sorted(names) for kind, names in changes.items() if names}
  counts = ", ".join(f"{len(names):,} {kind}" for kind, names in found.items())
  lines = [f"{counts} (of {len(old):,} files)"] if found else []
  lines += [
    f"{key}: {messages.brief(before['facts'].get(key))}, now "
    f"{messages.brief(now['facts'].get(key))}"
    for key in sorted(before["facts"].keys() | now["facts"].keys())
    if before["facts"].get(key) != now["facts"].get(key)
  ]
  for kind, names in found.items():
    named = messages.name_list([*map(messages.escaped, names)], _SHOWN)
    lines.append(f"  {kind}: {named}")
  return lines


def _file(path: str) -> list[Any]:
  """[size in bytes, time of the last change in ns], or [-1, why not]."""
  try:
    found = os.stat(path)
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
  if not stat.S_ISREG(found.st_mode):
    return [_NO_SIZE, "no regular file"]
  return [found.st_size, found.st_mtime_ns]


def _contents(path: str) -> list[Any]:
  """[size in bytes, SHA-256], or [-1, why not]."""
  entry = _file(path)
  if entry[0] == _NO_SIZE:
    return entry
  try:
    return [entry[0], checksums.file_digest(Path(path))]
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
