"""A directory that is replaced as a whole, and only over an earlier one.

Which files an earlier one has its index says, a JSON file in it with the mark
of its kind. Whatever else lies there is somebody else's, and the directory
is then left as it is; but for what desktops, Jupyter and the like put beside
the files of an earlier one that are looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import brief

# Of an index that is read back.
_MAX_BYTES = 64 * 2**20
# Its key that says what it is of.
_MARK = "kind"
# Whoever looks at a directory leaves these: macOS, Windows, LibreOffice, and
# NFS where a file is open.
_BY_THE_WAY = (".DS_Store", "Thumbs.db", ".~lock.*#", ".nfs*")
# And Jupyter a copy of each file, in a folder.
_COPIES = ".ipynb_checkpoints"


@dataclasses.dataclass(frozen=True)
class OutputDirectory:
  """What a command writes to a directory, and how it knows it again.

  A link to a directory stays one: what it points to is replaced.

  Attributes:
    option: that names the directory, such as "--out".
    index: the name of the JSON file that is in each.
    kind: of directory, such as "memory_vit evaluation report".
    listed: what the index holds -> the names of all other files, as
      "folder/file"; may raise LookupError, TypeError, ValueError or
      AttributeError where it is the index of something else.
  """

  option: str
  index: str
  kind: str
  listed: Callable[[Any], Iterable[str]]

  @property
  def mark(self) -> dict[str, str]:
    """What an index holds among other things, to be known by."""
    return {_MARK: self.kind}

  def require_own(self, text: str) -> Path:
    """The directory of that name, before anything is computed.

    Raises:
      ConfigError: where something else is there, or it cannot be made or
        replaced.
    """
    path = paths.local(text, self.option).absolute()
    paths.require_replaceable(path, self.option)
    self.require(path)
    place = path.resolve()
    paths.make_directory(place.parent, self.option)
    files.tidy(place.parent, place.name)
    self.require(path)  # it may have been put back just now
    return path

  def require(self, path: Path) -> None:
    """Refuse a directory in which anything else lies: nothing is lost.

    Raises:
      ConfigError: also for what is no directory, or cannot be read.
    """
    try:
      foreign_file = self._foreign_file(path)
    except (OSError, RuntimeError) as error:  # a link may lead to itself
      reason = getattr(error, "strerror", None) or error
      raise ConfigError(
        f"{self.option} {brief(str(path))} cannot be read ({reason}). Give "
        "another directory."
      ) from error
    if foreign_file is not None:
      raise ConfigError(
        f"{self.option} {brief(str(path))} is there and holds something else "
        f"({brief(foreign_file)}): expected a new or empty directory, or one "
        "that this command wrote, which is replaced."
      )

  @contextlib.contextmanager
  def replacing(self, path: Path) -> Iterator[Path]:
    """Yield a new directory, which takes the place of `path` at the end.

    Raises:
      ConfigError: for a directory that another one cannot take the place of.
      TrainingError: where something else is at `path` by then. It is left as it
        is, and the new directory lies beside it, where the message says.
    """
    paths.require_replaceable(path, self.option)
    place = path.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing_directory(place, self._foreign_file) as new:
      new.mkdir()
      yield new

  def _foreign_file(self, path: Path) -> str | None:
    """The first thing that is of something else; None where there is none."""
    if not path.exists():
      return path.name if path.is_symlink() else None
    if not path.is_dir():
      return path.name
    known = self._known(path / self.index)
    known |= {str(_copy(PurePosixPath(name))) for name in known}
    folders = {
      str(parent) for name in known for parent in PurePosixPath(name).parents
    }
    return _first_unknown(path, "", known, folders)

  def _known(self, index: Path) -> set[str]:
    """The files of an earlier one; none where there is no index of one."""
    try:
      if index.is_symlink() or index.stat().st_size > _MAX_BYTES:
        return set()
      values = json.loads(index.read_text(encoding="utf-8"))
      if values[_MARK] != self.kind:
        return set()
      names = {*map(str, self.listed(values))}
      return {self.index, *names} if names else set()
    except (
      OSError, ValueError, LookupError, TypeError, AttributeError,
      RecursionError,
    ):  # fmt: skip
      return set()


def _first_unknown(
  folder: Path, below: str, known: set[str], folders: set[str]
) -> str | None:
  """The first name that is not known; nothing behind it is looked at."""
  with os.scandir(folder) as entries:
    for entry in entries:
      name = f"{below}{entry.name}"
      if entry.is_dir(follow_symlinks=False):
        if name not in folders:
          return name
        if found := _first_unknown(
          folder / entry.name, f"{name}/", known, folders
        ):
          return found
      elif known and is_by_the_way(entry.name):
        continue
      elif entry.is_symlink() or name not in known:
        return name
  return None


def is_by_the_way(name: str) -> bool:
  """Whether nobody put a file of that name there on purpose."""
  return any(fnmatch.fnmatchcase(name, each) for each in _BY_THE_WAY)


def _copy(name: PurePosixPath) -> PurePosixPath:
  """The copy that Jupyter makes of a file that is opened there."""
  return name.parent / _COPIES / f"{name.stem}-checkpoint{name.suffix}"
