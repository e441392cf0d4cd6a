"""Output directories that are replaced as a whole, and only by their own kind.

A directory with any other file is refused. Hidden files, which desktops leave,
are no obstacle beside those of an earlier output, and are deleted with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Set
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.runtime import bucket, files, paths
from memory_vit.runtime.messages import brief


@dataclasses.dataclass(frozen=True)
class OutputDirectory:
  """An output directory; `known` lists all files of an earlier one."""

  option: str
  known: Callable[[Path], Collection[str]]
  error: type[Exception] = ConfigError

  def require_own(self, text: str | os.PathLike[str]) -> Path:
    """Check the directory of that name before anything is computed."""
    path = (
      text
      if bucket.is_in(text)
      else paths.local(text, self.option, self.error).absolute()
    )
    place = self._place(path)
    paths.make_directory(place.parent, self.option, self.error)
    files.tidy(place.parent, place.name)
    try:
      found = self._foreign_file(place)
    except OSError as error:
      raise self.error(
        f"{self.option} {brief(str(path))} cannot be read "
        f"({error.strerror or error}). Give another directory."
      ) from error
    if found is not None:
      raise self.error(
        f"{self.option} {brief(str(path))} holds something else "
        f"({brief(found)}), and is left as it is: expected a new or empty "
        "directory, or one that was written here before, which is replaced."
      )
    return path

  @contextlib.contextmanager
  def replacing(self, path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yield a new directory, which replaces `path` unless it is foreign."""
    place = self._place(path)
    with files.writing(path, *errors):
      place.parent.mkdir(parents=True, exist_ok=True)
      with files.replacing_directory(place, self._foreign_file) as new:
        new.mkdir()
        yield new

  def _place(self, path: Path) -> Path:
    """The directory itself, if `path` may be a link to it."""
    paths.require_replaceable(path, self.option, self.error)
    return paths.followed(path)

  def _foreign_file(self, place: Path) -> str | None:
    if not place.is_dir():
      return place.name if place.exists() else None
    known = {place / name for name in self.known(place)}
    for entry in _foreign_files(place, known):
      return entry.relative_to(place).as_posix()
    return None


def listed_in(index: str, kind: str) -> Callable[[Path], Collection[str]]:
  """Recognize a directory by a JSON file with its "kind" and "files"."""

  def known(directory: Path) -> Collection[str]:
    try:
      values = json.loads((directory / index).read_text(encoding="utf-8"))
      return {index, *values["files"]} if values["kind"] == kind else ()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
      return ()

  return known


def list_files(directory: Path) -> list[str]:
  """The sorted names of all files below a directory, as "folder/file"."""
  found = (path for path in directory.rglob("*") if path.is_file())
  return sorted(path.relative_to(directory).as_posix() for path in found)


def _foreign_files(folder: Path, known: Set[Path]) -> Iterator[Path]:
  """Yield files below a folder that are not known; a link is a file."""
  for entry in sorted(folder.iterdir()):
    if entry.is_dir() and not entry.is_symlink():
      yield from _foreign_files(entry, known)
    elif entry not in known and not (known and entry.name.startswith(".")):
      yield entry
