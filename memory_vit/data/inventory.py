"""The files of a split of a data set, to know them again later.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from memory_vit.runtime import checksums, messages
from memory_vit.runtime.messages import escaped

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
class Inventory:
  """What a split consists of; its files were not looked at yet.

  Attributes:
    facts: what is recorded of the data set apart from its files, which JSON can
      hold.
    files: {name, which is the same wherever the data set lies: path}.
  """

  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def table(self, by: str) -> Table:
    """Looks at all files.

    Args:
      by: "files" or "contents", which reads every byte.
    """
    look = _contents if by == "contents" else _file
    entries = _in_threads(look, self.files.values())
    return {
      "by": by,
      "facts": dict(self.facts),
      "files": dict(zip(self.files, entries, strict=True)),
    }

  def sizes(self) -> str:
    """A digest of names and sizes, which copies on several hosts share."""
    entries = zip(self.files, _in_threads(_file, self.files.values()),
                  strict=True)  # fmt: skip
    sizes = {name: size for name, (size, _) in entries}
    return digest({"facts": dict(self.facts), "files": sizes})


def text_of(table: Table) -> str:
  """A table as JSON, equal for equal tables; names that are not UTF-8 too."""
  return json.dumps(table, sort_keys=True, separators=(",", ":"))


def digest(table: Table) -> str:
  """The SHA-256 of a table."""
  return hashlib.sha256(text_of(table).encode()).hexdigest()


def differences(before: Table, now: Table) -> list[str]:
  """What differs between two tables of the same kind.

  Returns:
    How many files in a line, and then some of them, those first whose class is
    another; nothing where the tables are equal.
  """
  found = _Differences(before["files"], now["files"])
  lines = [
    f"{key}: {messages.brief(before['facts'].get(key))}, now "
    f"{messages.brief(now['facts'].get(key))}"
    for key in sorted(before["facts"].keys() | now["facts"].keys())
    if before["facts"].get(key) != now["facts"].get(key)
  ]
  if found.counts:
    counts = ", ".join(f"{n:,} {kind}" for kind, n in found.counts.items())
    lines.insert(0, f"{counts} (of {len(before['files']):,} files)")
  more = len(found.lines) - _SHOWN
  lines += [f"  {escaped(line)}" for line in found.lines[:_SHOWN]]
  return lines + ([f"  and {more:,} more"] if more > 0 else [])


class _Differences:
  """How the files {name: [size, mark]} of one table became those of another.

  Attributes:
    counts: {what happened: to how many}.
    lines: one for every file.
  """

  def __init__(
    self, before: Mapping[str, Sequence], now: Mapping[str, Sequence]
  ) -> None:
    was = {name: tuple(e) for name, e in before.items() if e != now.get(name)}
    is_ = {name: tuple(e) for name, e in now.items() if e != before.get(name)}
    moved = _moved(was, is_)
    arrived = {*moved.values()}
    kinds: dict[str, list[str]] = {
      "of another class": [], "renamed": [], "changed": [], "gone": [],
      "new": [],
    }  # fmt: skip
    for name, place in moved.items():
      first, second = _class_of(name), _class_of(place)
      if first == second:
        kinds["renamed"].append(f"{name}: now {place}")
      else:
        kinds["of another class"].append(
          f"{name}: class {first!r}, now {second!r} ({place})"
        )
    # A place from which a file moved away, or to which one came, is explained.
    for name in was.keys() - moved.keys() - arrived:
      if name in is_:
        kinds["changed"].append(f"{name}: {_change(was[name], is_[name])}")
      else:
        kinds["gone"].append(f"{name}: gone")
    for name in is_.keys() - was.keys() - arrived:
      kinds["new"].append(f"{name}: new")
    self.counts = {kind: len(found) for kind, found in kinds.items() if found}
    self.lines = [line for found in kinds.values() for line in sorted(found)]


def _moved(
  was: Mapping[str, Sequence], is_: Mapping[str, Sequence]
) -> dict[str, str]:
  """{name of a file before: its name now}, known by size and mark."""
  moved: dict[str, str] = {}
  # Where several have the same size and mark, equal file names belong together.
  for key in (lambda name, entry: (PurePosixPath(name).name, *entry),
              lambda name, entry: tuple(entry)):  # fmt: skip
    places = collections.defaultdict(list)
    arrived = {*moved.values()}
    for name in sorted(is_.keys() - arrived, reverse=True):
      places[key(name, is_[name])].append(name)
    for name in sorted(was.keys() - moved.keys()):
      if found := places[key(name, was[name])]:
        moved[name] = found.pop()
  return moved


def _class_of(name: str) -> str:
  """The folder in which a file lies: of an image folder, its class."""
  return PurePosixPath(name).parent.name


def _change(was: Sequence, is_: Sequence) -> str:
  """What is another at a file."""
  if was[0] != is_[0]:
    return f"{_size(was)}, now {_size(is_)}"
  if isinstance(was[1], str):
    return "other contents"
  return "the time of its last change is another"


def _size(entry: Sequence) -> str:
  size, mark = entry
  return mark if size == _NO_SIZE else f"{size:,} bytes"


def _in_threads(
  look: Callable[[str], list], paths: Iterable[str]
) -> list[list]:
  """Looks at files, some at a time."""
  with multiprocessing.pool.ThreadPool(_THREADS) as pool:
    # Handed out in chunks: to look at a file takes less than to hand it out.
    return list(pool.imap(look, list(paths), chunksize=64))


def _file(path: str) -> list:
  """[size in bytes, time of the last change in ns], or [-1, why not]."""
  try:
    found = os.stat(path)
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
  if not stat.S_ISREG(found.st_mode):
    return [_NO_SIZE, "no regular file"]
  return [found.st_size, found.st_mtime_ns]


def _contents(path: str) -> list:
  """[size in bytes, SHA-256], or [-1, why not]."""
  entry = _file(path)
  if entry[0] == _NO_SIZE:
    return entry
  try:
    return [entry[0], checksums.file_digest(Path(path))]
  except OSError as error:
    return [_NO_SIZE, f"cannot be read ({error.strerror})"]
