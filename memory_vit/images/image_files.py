"""Find image files: those that a user names, and all in a folder.

Folders are walked recursively, by one rule for training, checks, predict and
embed. Links are followed, but each folder is read once. Names that begin with a
dot are hidden, as are the files of operating systems and of open documents.
"""

import codecs
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
# Of macOS, Synology and Windows; open documents of Excel begin with "~$".
_HIDDEN = ("__macosx", "@eadir", "$recycle.bin", "thumbs.db", "desktop.ini")


@dataclasses.dataclass(frozen=True)
class ImageFile:
  """An image file to read; `reason` says why it cannot be read, or is ""."""

  path: str
  reason: str = ""


def find_images(arguments: Iterable[str]) -> Iterator[ImageFile]:
  """Yield the image files that are asked for.

  Args:
    arguments: files; folders, which stand for all images below them, sorted;
      and "-" for paths on standard input, see `_lines`.
  """
  for argument in arguments:
    if argument == "-":
      for path in filter(None, _lines(sys.stdin.buffer)):
        yield from _below(path)
    else:
      yield from _below(argument)


def _lines(file: Iterable[bytes]) -> Iterator[str]:
  """The lines of a file, read as they are asked for.

  A byte order mark is left out. One of UTF-16, as PowerShell writes it, means
  that the whole file is read and decoded at once.
  """
  lines = iter(file)
  first = next(lines, b"")
  if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    text = b"".join([first, *lines]).decode("utf-16", "replace")
    lines = (line.encode() for line in text.split("\n"))
    first = next(lines, b"")
  for line in itertools.chain([first.removeprefix(codecs.BOM_UTF8)], lines):
    yield os.fsdecode(line.rstrip(b"\r\n"))


def _below(path: str) -> Iterator[ImageFile]:
  """A file itself, or the images in a folder."""
  if not os.path.isdir(path):
    yield ImageFile(path)
    return
  entries = entries_of(walk(path))
  if not entries:
    suffixes = ", ".join(SUFFIXES)
    entries = [ImageFile(path, f"a folder without images ({suffixes})")]
  yield from entries


@dataclasses.dataclass(frozen=True)
class Walk:
  """The paths below a folder, each list sorted.

  Attributes:
    images: files with a suffix of an image.
    irregular: of these, what is no regular file, such as a pipe.
    others: files with another suffix.
    hidden: files and folders.
    loops: links to a folder that is read elsewhere.
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
  seen: set[tuple[int, int]] = set()
  folders, links = [folder], list[str]()
  while folders or links:
    if not folders:  # the links come last: a folder has its own name
      links.sort(reverse=True)
    path = folders.pop() if folders else links.pop()
    try:
      status = os.stat(path)
      identity = (status.st_dev, status.st_ino)
      if identity in seen:
        found.loops.append(path)
        continue
      seen.add(identity)
      with os.scandir(path) as entries:
        for entry in entries:
          if is_hidden(entry.name):
            found.hidden.append(entry.path)
          elif holds(entry.is_dir):
            (links if entry.is_symlink() else folders).append(entry.path)
          else:
            _add_file(found, entry)
    except OSError as error:
      found.closed[path] = error.strerror or str(error)
  for paths in vars(found).values():
    if paths is not found.closed:
      paths.sort()
  return found


def is_hidden(name: str) -> bool:
  return name.startswith((".", "~$")) or name.casefold() in _HIDDEN


def entries_of(found: Walk) -> list[ImageFile]:
  """Folders that cannot be listed, and then the images of a walk."""
  closed = [ImageFile(*item) for item in sorted(found.closed.items())]
  return closed + [ImageFile(path) for path in found.images]


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
