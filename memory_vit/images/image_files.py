"""Find the image files that a user names."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator

from memory_vit.images import folders


@dataclasses.dataclass(frozen=True)
class ImageFile:
  """An image file to read; `reason` says why it cannot be read, or is ""."""

  path: str
  reason: str = ""


def find_images(arguments: Iterable[str]) -> Iterator[ImageFile]:
  """Yield the image files that are asked for.

  Args:
    arguments: files; folders, which stand for all images below them, sorted
      (see `folders`); and "-" for paths on standard input, read as they are
      asked for.
  """
  for argument in arguments:
    if argument == "-":
      for line in sys.stdin.buffer:
        if path := os.fsdecode(line.rstrip(b"\r\n")):
          yield from _below(path)
    else:
      yield from _below(argument)


def _below(path: str) -> Iterator[ImageFile]:
  """A file itself, or the images in a folder."""
  if not os.path.isdir(path):
    yield ImageFile(path)
    return
  found = folders.walk(path)
  entries = entries_of(found)
  if not entries:
    suffixes = ", ".join(folders.SUFFIXES)
    entries = [ImageFile(path, f"a folder without images ({suffixes})")]
  yield from entries


def entries_of(found: folders.Walk) -> list[ImageFile]:
  """Folders that cannot be listed, and then the images of a walk."""
  closed = [ImageFile(*item) for item in sorted(found.closed.items())]
  return closed + [ImageFile(path) for path in found.images]
