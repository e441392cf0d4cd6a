"""The files of a split of a data set, to recognise changes later.

A table holds of every file its name, its size and a mark: by "files" the time
of its last change, by "contents" the SHA-256 of its bytes. Nothing is decoded.
"""

import collections
import dataclasses
import hashlib
import json
import multiprocessing.pool
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from memory_vit.runtime import checksums, messages
from memory_vit.runtime.messages import escaped

# The fact that holds a digest of a file list: there the folder of a file is not
# its class.
LISTED = "listed paths and labels"
# Files that a message names of a split.
_SHOWN = 5
# File systems over a network answer several at once.
_THREADS = 8
# What stands in place of the size of what is no file.
_NO_SIZE = -1

# {"by": `config.data.digest`, "facts": as in `Inventory`,
#  "files": {name: [size, mark]}}
Table = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFiles:
  """The files of a split, before any is looked at.

  Attributes:
    facts: what is recorded of the data set besides its files, as JSON values.
    files: {name, which is the same wherever the data set lies: path}.
  """

  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def table(self, by: str) -> Table:
    """Look at all files; `by` is "files", or "contents" to read every byte."""
    look = _contents if by == "contents" else _file
    return {"by": by, "facts": dict(self.facts), "files": self._each(look)}

  def sizes(self) -> str:
    """A digest of names and sizes, which copies on several hosts share."""
    sizes = {name: size for name, (size, _) in self._each(_file).items()}
    return digest({"facts": dict(self.facts), "files": sizes})

  def _each(self, look: Callable[[str], list[Any]]) -> dict[str, list[Any]]:
    """{name: what `look` finds at its path}, some files at a time."""
    with multiprocessing.pool.ThreadPool(_THREADS) as pool:
      # In chunks: to look at a file takes less time than to hand it out.
      found = list(pool.imap(look, list(self.files.values()), chunksize=64))
    return dict(zip(self.files, found, strict=True))


def text_of(table: Table) -> str:
  """A table as JSON, equal for equal tables; names that are not UTF-8 too."""
  return json.dumps(table, sort_keys=True, separators=(",", ":"))


def digest(table: Table) -> str:
  """The SHA-256 of a table."""
  return hashlib.sha256(text_of(table).encode()).hexdigest()


def differences(before: Table, now: Table) -> list[str]:
  """Describe what differs between two tables of the same kind.

  Returns:
    A line with the number of files, and then some of them, beginning with those
    whose class has changed; nothing where the tables are equal.
  """
  in_folders = LISTED not in now["facts"]
  changes = _changes(before["files"], now["files"], in_folders)
  lines = [
    f"{key}: {messages.brief(before['facts'].get(key))}, now "
    f"{messages.brief(now['facts'].get(key))}"
    for key in sorted(before["facts"].keys() | now["facts"].keys())
    if before["facts"].get(key) != now["facts"].get(key)
  ]
  if changes:
    counts = ", ".join(f"{len(n):,} {kind}" for kind, n in changes.items())
    lines.insert(0, f"{counts} (of {len(before['files']):,} files)")
  files = [line for found in changes.values() for line in found]
  more = len(files) - _SHOWN
  lines += [f"  {escaped(line)}" for line in files[:_SHOWN]]
  return lines + ([f"  and {more:,} more"] if more > 0 else [])


def _changes(
  before: Mapping[str, Sequence[Any]],
  now: Mapping[str, Sequence[Any]],
  in_folders: bool,
) -> dict[str, list[str]]:
  """{what happened: a line per file}, between two {file: [size, mark]}.

  `in_folders` says whether the folder of a file is its class.
  """
  old = {name: tuple(e) for name, e in before.items() if e != now.get(name)}
  new = {name: tuple(e) for name, e in now.items() if e != before.get(name)}
  moved = _moved(old, new)
  arrived = {*moved.values()}
  changes: dict[str, list[str]] = {
    "of another class": [], "renamed": [], "changed": [], "gone": [], "new": [],
  }  # fmt: skip
  for name, place in moved.items():
    # Of an image folder, SPLIT/CLASS/...
    first, second = (
      "".join(PurePosixPath(n).parts[1:2]) for n in (name, place)
    )
    if first == second or not in_folders:
      changes["renamed"].append(f"{name}: now {place}")
    else:
      changes["of another class"].append(
        f"{name}: class {first!r}, now {second!r} ({place})"
      )
  # A place from which a file moved away, or to which one came, is explained.
  for name in old.keys() - moved.keys() - arrived:
    if name in new:
      changes["changed"].append(f"{name}: {_change(old[name], new[name])}")
    else:
      changes["gone"].append(f"{name}: gone")
  for name in new.keys() - old.keys() - arrived:
    changes["new"].append(f"{name}: new")
  return {kind: sorted(found) for kind, found in changes.items() if found}


def _moved(
  old: Mapping[str, Sequence[Any]], new: Mapping[str, Sequence[Any]]
) -> dict[str, str]:
  """{name of a file before: its name now}, known by size and mark."""
  moved: dict[str, str] = {}
  # Where several have the same size and mark, equal file names belong together.
  for key in (lambda name, entry: (PurePosixPath(name).name, *entry),
              lambda name, entry: tuple(entry)):  # fmt: skip
    places = collections.defaultdict(list)
    arrived = {*moved.values()}
    for name in sorted(new.keys() - arrived, reverse=True):
      places[key(name, new[name])].append(name)
    for name in sorted(old.keys() - moved.keys()):
      if found := places[key(name, old[name])]:
        moved[name] = found.pop()
  return moved


def _change(old: Sequence[Any], new: Sequence[Any]) -> str:
  """Say how a file changed."""
  if old[0] != new[0]:
    return f"{_size(old)}, now {_size(new)}"
  if isinstance(old[1], str):
    return "other contents"
  return "the time of its last change is another"


def _size(entry: Sequence[Any]) -> str:
  size, mark = entry
  return mark if size == _NO_SIZE else f"{size:,} bytes"


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
