"""File lists: text files with the images of a split, and their classes.

A folder holds the images, anywhere below it, and a list for every split, such
as train.txt, whose lines are PATH LABEL. The order of images, slices, and the
rules for broken ones are those of an image folder.
"""

import collections
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from memory_vit.data import image_paths, split_parts
from memory_vit.data.data_files import LISTED
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages
from memory_vit.runtime.paths import local

CLASSES = "classes.txt"

# Bytes of a list, and of one of its lines: paths have at most 4,096.
_MOST_BYTES, _LONGEST = 2**29, 5_000
# Lines of a list, and classes: some more than the largest public sets have.
_MOST_LINES, _MOST_CLASSES = 2**24, 2**20
_MOST_CLASS_BYTES = 2**24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_list(ref: SplitRef) -> Split:
  root = local(ref.dir or ".", "the folder of file lists", DataError)
  lists = _find_lists(root, ref.dir)
  wanted = _named_lists(ref, lists)
  names = _read_classes(root / CLASSES)
  # The classes of a data set are the same in all of its splits.
  needed = wanted if names else list(lists)
  most = len(names) if names else _MOST_CLASSES
  labels = {stem: _read_list(lists[stem], most) for stem in needed}
  if not names:
    greatest = max((max(e.values()) for e in labels.values() if e), default=0)
    names = [str(label) for label in range(greatest + 1)]
  sizes = {stem: len(labels[stem]) for stem in wanted}
  chosen = []
  for stem, part in split_parts.split_parts(ref.name, ref.split, sizes):
    chosen += image_paths.shuffled([*labels[stem].items()])[part]
  return image_paths.split_of(
    ref,
    root,
    chosen,
    class_names=names,
    irregular=_irregular(root, {file for file, _ in chosen}),
    facts={LISTED: _digest(chosen)},
  )


def _find_lists(root: pathlib.Path, directory: str) -> dict[str, pathlib.Path]:
  """{split: its list} in a folder, named as the user did."""
  if not directory or not root.is_dir():
    raise DataError(
      f"the folder of file lists {messages.brief(directory)} is not there: set "
      "config.data.dir to a directory that holds the images and train.txt."
    )
  found = sorted(root.glob("*.txt"))
  return {
    path.stem: path
    for path in found
    if path.name != CLASSES and not path.name.startswith(".")
  }


def _named_lists(ref: SplitRef, lists: Collection[str]) -> list[str]:
  """The lists that a split such as "train[:90%]+val" names."""
  wanted = split_parts.split_names(ref.split)
  for name in wanted:
    if name not in lists:
      known = messages.name_list([messages.brief(stem) for stem in lists])
      raise DataError(
        f"data set {ref.name!r} has no split {messages.brief(name)}: "
        f"{messages.brief(ref.dir)} holds no such .txt file, and has "
        f"{known or 'none at all'}."
      )
  return wanted


def _read_list(path: pathlib.Path, classes: int) -> dict[str, int]:
  """{image: its label}, in order; all labels are below `classes`."""
  found: dict[str, int] = {}
  for number, line in _lines(path, _MOST_BYTES):
    if not line:
      continue
    try:
      file, label = _parsed(line)
      if label >= classes:
        raise ValueError(f"label {label}, expected 0 to {classes - 1:,}.")
      if file in found:
        raise ValueError(f"{messages.brief(file)} is listed a second time.")
    except ValueError as problem:
      raise _problem(path, number, str(problem)) from None
    found[file] = label
  return found


def _parsed(line: bytes) -> tuple[str, int]:
  """The path and the label in a line, or a `ValueError`."""
  shown = messages.brief(os.fsdecode(line))
  file, *label = line.rsplit(maxsplit=1)
  if not label or not re.fullmatch(rb"[0-9]{1,9}", label[0]):
    raise ValueError(
      f"{shown}, expected PATH LABEL, such as 'images/1.jpg 0'. (Without a "
      f"{CLASSES}, every .txt file of the folder has to be a list.)"
    )
  path = pathlib.PurePosixPath(os.fsdecode(file))
  if path.is_absolute() or ".." in path.parts or not path.parts:
    raise ValueError(
      f"{shown} leads out of the folder: expected a path inside of it, such as "
      "'images/1.jpg', without '..'."
    )
  if b"\0" in file:
    raise ValueError(f"{shown} is no path.")
  return str(path), int(label[0])


def _read_classes(path: pathlib.Path) -> list[str]:
  """The names of the classes, one a line; none without such a file."""
  if not os.path.lexists(path):
    return []
  names: dict[str, None] = {}
  for number, line in _lines(path, _MOST_CLASS_BYTES):
    if number > _MOST_CLASSES:
      raise _problem(path, number, f"more than {_MOST_CLASSES:,} classes.")
    try:
      name = line.decode()
    except UnicodeDecodeError:
      name = ""
    if not name or name in names:
      shown = messages.brief(os.fsdecode(line))
      raise _problem(
        path,
        number,
        f"{shown}, expected the name of a class, in UTF-8, that no line before "
        "has.",
      )
    names[name] = None
  if not names:
    raise BrokenDataError(
      f"{path} is empty: expected the name of a class in each line. Without "
      "this file, classes are called by their numbers."
    )
  return [*names]


def _lines(path: pathlib.Path, most: int) -> Iterator[tuple[int, bytes]]:
  """Yield (number, line without white space around it) of a text file."""
  name = messages.utf8(str(path))
  if not path.is_file():
    raise BrokenDataError(f"{name}: {image_paths.why_irregular(str(path))}.")
  try:
    size = path.stat().st_size
    if size > most:
      raise BrokenDataError(
        f"{name} has {size:,} bytes, expected at most {most:,}."
      )
    with path.open("rb") as file:
      read = functools.partial(file.readline, _LONGEST + 1)
      for number, line in enumerate(iter(read, b""), 1):
        if len(line) > _LONGEST:
          raise _problem(path, number, f"more than {_LONGEST:,} bytes.")
        if number > _MOST_LINES:
          raise _problem(path, number, f"more than {_MOST_LINES:,} lines.")
        # Some editors write an invisible mark.
        start = _BYTE_ORDER_MARK if number == 1 else b""
        yield number, line.removeprefix(start).strip()
  except OSError as error:
    raise BrokenDataError(
      f"{name} cannot be read ({error.strerror})."
    ) from error


def _problem(path: pathlib.Path, number: int, text: str) -> BrokenDataError:
  name = messages.utf8(str(path))
  return BrokenDataError(f"{name}, line {number}: {text}")


def _irregular(root: pathlib.Path, files: Collection[str]) -> dict[str, str]:
  """{unreadable file: why}; each directory is listed once."""
  names = collections.defaultdict(set)
  for file in files:
    parent, _, name = file.rpartition("/")
    names[parent].add(name)
  found = {}
  for parent, wanted in names.items():
    folder = os.path.join(root, parent)
    for name, why in _irregular_in(folder, wanted).items():
      found[f"{parent}/{name}" if parent else name] = why
  return found


def _irregular_in(folder: str, names: Collection[str]) -> Mapping[str, str]:
  """{name without a regular file in a directory: why}."""
  try:
    with os.scandir(folder) as entries:
      is_file = {e.name: e.is_file() for e in entries if e.name in names}
  except OSError as error:
    return dict.fromkeys(names, f"it is not there ({error.strerror})")
  return {
    name: image_paths.why_irregular(os.path.join(folder, name))
    if name in is_file
    else "it is not there"
    for name in names
    if not is_file.get(name)
  }


def _digest(labelled: Sequence[tuple[str, int]]) -> str:
  """SHA-256 of images and their labels, in order."""
  made = hashlib.sha256()
  for file, label in labelled:
    made.update(os.fsencode(f"{file}\0{label}\n"))
  return made.hexdigest()
