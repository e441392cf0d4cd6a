"""Walk a folder of images: one rule for training, checks, predict and embed.

Folders are walked recursively. Links are followed, except for a link to a
folder that it lies in. Names that begin with a dot are hidden.
"""

import dataclasses
import os
from collections.abc import Callable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


@dataclasses.dataclass(frozen=True)
class Walk:
  """The paths below a folder, each list sorted.

  Attributes:
    images: of files with a suffix of an image.
    irregular: of these, what is no regular file, such as a pipe.
    others: of files with another suffix.
    hidden: of files and folders.
    loops: of links to a folder that they lie in.
    closed: {folder that cannot be listed: why}.
  """

  images: list[str]
  irregular: list[str]
  others: list[str]
  hidden: list[str]
  loops: list[str]
  closed: dict[str, str]


def walk(folder: str) -> Walk:
  """Find all files below a folder; their paths begin with it."""
  found = Walk([], [], [], [], [], {})
  left: list[tuple[str, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
  while left:
    path, above = left.pop()
    try:
      status = os.stat(path)
      identity = (status.st_dev, status.st_ino)
      if identity in above:
        found.loops.append(path)
        continue
      with os.scandir(path) as entries:
        for entry in entries:
          if entry.name.startswith("."):
            found.hidden.append(entry.path)
          elif holds(entry.is_dir):
            left.append((entry.path, above | {identity}))
          else:
            _add_file(found, entry)
    except OSError as error:
      found.closed[path] = error.strerror or str(error)
  for paths in vars(found).values():
    if paths is not found.closed:
      paths.sort()
  return found


def _add_file(found: Walk, entry: os.DirEntry[str]) -> None:
  if not entry.name.lower().endswith(SUFFIXES):
    found.others.append(entry.path)
    return
  found.images.append(entry.path)
  if not holds(entry.is_file):
    found.irregular.append(entry.path)


def holds(kind: Callable[[], bool]) -> bool:
  """Test the type of an entry; False for a link to itself."""
  try:
    return kind()
  except OSError:
    return False
