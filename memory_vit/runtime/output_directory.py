"""Output directories, replaced as a whole by a new output of the same kind.

A directory that holds any other files is refused. Hidden files, which desktops
create, are allowed among the files of an output, and are deleted with them.
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
  """An output directory; `known` lists the files of an earlier output."""

  option: str
  known: Callable[[Path], Collection[str]]
  error: type[Exception] = ConfigError

  def require_own(self, text: str | os.PathLike[str]) -> Path:
    """Return `text` as a path; raise `error` if it must not be replaced."""
    path = (
      text
      if bucket.is_in(text)
      else paths.local(text, self.option, self.error).absolute()
    )
    place = self._place(path)
    paths.make_directory(place.parent, self.option, self.error)
    files.tidy(place.parent, place.name)
    try:
      foreign = self._foreign_file(place)
    except OSError as error:
      raise self.error(
        f"{self.option} {brief(str(path))} cannot be read "
        f"({error.strerror or error}). Give another directory."
      ) from error
    if foreign is not None:
      raise self.error(
        f"{self.option} {brief(str(path))} holds unknown files "
        f"({brief(foreign)}), and is left as it is: expected a new or empty "
        "directory, or an earlier output of this kind, which is replaced."
      )
    return path

  @contextlib.contextmanager
  def replacing(self, path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yield a directory to replace `path`, if `path` has no foreign files."""
    place = self._place(path)
    with files.writing(path, *errors):
      place.parent.mkdir(parents=True, exist_ok=True)
      with files.replacing_directory(place, self._foreign_file) as new:
        new.mkdir()
        yield new

  def _place(self, path: Path) -> Path:
    """Return `path` with links resolved.

    Raise if the directory there cannot be replaced by another directory.
    """
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
  """Return a `known` function that reads a list of files from a JSON file."""

  def known(directory: Path) -> Collection[str]:
    try:
      values = json.loads((directory / index).read_text(encoding="utf-8"))
      return {index, *values["files"]} if values["kind"] == kind else ()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
      return ()

  return known


def list_files(directory: Path) -> list[str]:
  """Return the sorted names of all files in a directory, as "folder/file"."""
  inside = (path for path in directory.rglob("*") if path.is_file())
  return sorted(path.relative_to(directory).as_posix() for path in inside)


def _foreign_files(folder: Path, known: Set[Path]) -> Iterator[Path]:
  """Yield all files and links below `folder` that are not in `known`."""
  for entry in sorted(folder.iterdir()):
    if entry.is_dir() and not entry.is_symlink():
      yield from _foreign_files(entry, known)
    elif entry not in known and not (known and entry.name.startswith(".")):
      yield entry
