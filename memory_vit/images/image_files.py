"""Find image files: files that a user names, and all images below a folder.

Folders are walked recursively, by the same rules for training, checks, predict
and embed. Links are followed, but each folder is read once. Hidden files are
skipped: names that begin with a dot, and files of operating systems and Excel.
"""

import codecs
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
# Folders and files that macOS, Synology and Windows create, in lower case.
_HIDDEN = ("__macosx", "@eadir", "$recycle.bin", "thumbs.db", "desktop.ini")


@dataclasses.dataclass(frozen=True)
class ImageFile:
  """An image file to read; `reason` says why it cannot be read, or is ""."""

  path: str
  reason: str = ""


def find_images(arguments: Iterable[str]) -> Iterator[ImageFile]:
  """Yield the image files that arguments name.

  Args:
    arguments: paths of files; paths of folders, which stand for all images
      below them, sorted; and "-" for paths on standard input, see `_lines`.
  """
  for argument in arguments:
    if argument == "-":
      for path in filter(None, _lines(sys.stdin.buffer)):
        yield from _below(path)
    else:
      yield from _below(argument)


def _lines(file: Iterable[bytes]) -> Iterator[str]:
  """Yield the lines of a file, without its byte order mark.

  Each line is read when it is needed. However, a file in UTF-16, as PowerShell
  writes it, is read and decoded as a whole before its first line is yielded.
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
  """Yield the file at `path`, or all images below the folder at `path`."""
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
    images: files with an image suffix.
    irregular: the paths in `images` that are not regular files, such as pipes.
    others: files without an image suffix.
    hidden: hidden files and folders.
    loops: paths of folders that are already listed under another path.
    closed: {path of a folder that cannot be listed: reason}.
  """

  images: list[str]
  irregular: list[str]
  others: list[str]
  hidden: list[str]
  loops: list[str]
  closed: dict[str, str]


def walk(folder: str) -> Walk:
  """Find all files below a folder; their paths begin with `folder`."""
  result = Walk([], [], [], [], [], {})
  seen: set[tuple[int, int]] = set()
  folders, links = [folder], list[str]()
  while folders or links:
    if not folders:  # follow links last, to prefer paths without links
      links.sort(reverse=True)
    path = folders.pop() if folders else links.pop()
    try:
      status = os.stat(path)
      identity = (status.st_dev, status.st_ino)
      if identity in seen:
        result.loops.append(path)
        continue
      seen.add(identity)
      with os.scandir(path) as entries:
        for entry in entries:
          if is_hidden(entry.name):
            result.hidden.append(entry.path)
          elif holds(entry.is_dir):
            (links if entry.is_symlink() else folders).append(entry.path)
          else:
            _add_file(result, entry)
    except OSError as error:
      result.closed[path] = error.strerror or str(error)
  for paths in vars(result).values():
    if paths is not result.closed:
      paths.sort()
  return result


def is_hidden(name: str) -> bool:
  # Excel creates "~$NAME" beside an open document.
  return name.startswith((".", "~$")) or name.casefold() in _HIDDEN


def entries_of(paths: Walk) -> list[ImageFile]:
  """Return entries of the folders that cannot be listed, then of all images."""
  closed = [ImageFile(*item) for item in sorted(paths.closed.items())]
  return closed + [ImageFile(path) for path in paths.images]


def _add_file(result: Walk, entry: os.DirEntry[str]) -> None:
  if not entry.name.lower().endswith(SUFFIXES):
    result.others.append(entry.path)
    return
  result.images.append(entry.path)
  if not holds(entry.is_file):
    result.irregular.append(entry.path)


def holds(kind: Callable[[], bool]) -> bool:
  """Return `kind()`, or False if `kind` raises an error for a circular link."""
  try:
    return kind()
  except OSError:
    return False
