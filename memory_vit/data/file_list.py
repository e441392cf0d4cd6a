"""File lists: text files or tables with the images of a split, and labels.

A folder holds the images, anywhere below it, and a list for every split, such
as train.txt, whose lines are PATH LABEL, or a table, train.csv or
train.parquet. The order of images, slices, and the rules for broken ones are
those of an image folder.
"""

import collections
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memory_vit.data import image_paths, labels, split_parts, table_file
from memory_vit.data.data_files import LISTED
from memory_vit.data.labels import MOST_CLASSES, Encoder, Label
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages
from memory_vit.runtime.paths import local

CLASSES = "classes.txt"

# Bytes of a list, and of one of its lines: paths have at most 4,096.
_MOST_BYTES, _LONGEST = 2**29, 5_000
# Lines of a list, and classes: some more than the largest public sets have.
_MOST_LINES = 2**24
_MOST_CLASS_BYTES = 2**24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# {kind: what is written behind a path, how it looks, an example}
_LABELS = {
  "classes": ("LABEL", rb"[0-9]{1,9}", "0"),
  "labels": ("LABELS", rb"-|[0-9]{1,9}(,[0-9]{1,9})*", "0,3"),
  "values": ("VALUES", rb"\S+", "1.5,2"),
}


def open_list(ref: SplitRef) -> Split:
  root = local(ref.dir or ".", "the folder of file lists", DataError)
  lists = _find_lists(root, ref.dir)
  wanted = _named_lists(ref, lists)
  stated = _read_classes(root / CLASSES)
  # The classes of a data set are the same in all of its splits.
  is_known = stated or ref.kind == "values" or "," in ref.label
  needed = wanted if is_known else list(lists)
  most = len(stated) or MOST_CLASSES
  read = {stem: _read(lists[stem], most, ref) for stem in needed}
  names = _names(stated, read.values())
  sizes = {stem: len(read[stem].labels) for stem in wanted}
  chosen = []
  for stem, part in split_parts.split_parts(ref.name, ref.split, sizes):
    encoded = _encoded(lists[stem], read[stem], Encoder(ref.kind, names))
    chosen += image_paths.shuffled(encoded)[part]
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
  lists: dict[str, pathlib.Path] = {}
  for path in sorted(root.iterdir()):
    is_list = path.suffix in (".txt", *table_file.SUFFIXES)
    if not is_list or path.name == CLASSES or path.name.startswith("."):
      continue
    if path.stem in lists:
      raise DataError(
        f"{messages.utf8(str(root))} has two lists of one split, "
        f"{messages.brief(lists[path.stem].name)} and "
        f"{messages.brief(path.name)}: expected one."
      )
    lists[path.stem] = path
  return lists


def _named_lists(ref: SplitRef, lists: Collection[str]) -> list[str]:
  """The lists that a split such as "train[:90%]+val" names."""
  wanted = split_parts.split_names(ref.split)
  for name in wanted:
    if name not in lists:
      known = messages.name_list([messages.brief(stem) for stem in lists])
      raise DataError(
        f"data set {ref.name!r} has no split {messages.brief(name)}: "
        f"{messages.brief(ref.dir)} holds no such .txt, .csv or .parquet file, "
        "and has "
        f"{known or 'none at all'}."
      )
  return wanted


class _List(NamedTuple):
  """{image: its label}, in order, and the names that a table states."""

  labels: dict[str, Label]
  names: tuple[str, ...] = ()


def _read(path: pathlib.Path, classes: int, ref: SplitRef) -> _List:
  """Read a list; numbers in a text file are below `classes`."""
  if path.suffix == ".txt":
    if not ref.label:
      return _List(_read_lines(path, classes, ref.kind))
    raise DataError(
      f"config.data.label is {messages.brief(ref.label)}, a column of a table, "
      f"and {messages.utf8(str(path))} is none: expected ''."
    )
  _require_file(path, _MOST_BYTES)
  table = table_file.read_table(path, ref.kind, ref.label)
  found: dict[str, Label] = {}
  rows = zip(table.paths, table.labels, strict=True)
  for number, (file, label) in enumerate(rows, 1):
    try:
      _add(found, file, label)
    except ValueError as problem:
      raise _problem(path, number, str(problem), "row") from None
  return _List(found, table.names)


def _names(stated: Sequence[str], lists: Collection[_List]) -> Sequence[str]:
  """Names of columns, else of a file, else among the labels of all lists."""
  for names in (*(each.names for each in lists), stated):
    if names:
      return names
  try:
    return labels.names_among(
      label for each in lists for label in each.labels.values()
    )
  except DataError as error:
    raise BrokenDataError(
      f"the lists: {error}, one in each line of {CLASSES}."
    ) from None


def _encoded(
  path: pathlib.Path, read: _List, encode: Encoder
) -> list[tuple[str, Any]]:
  """(image, encoded label) of a list, in order."""
  encoded = []
  for file, label in read.labels.items():
    try:
      encoded.append((file, encode(label)))
    except DataError as error:
      raise BrokenDataError(
        f"{messages.utf8(str(path))}: {messages.brief(file)}: {error}."
      ) from None
  return encoded


def _read_lines(
  path: pathlib.Path, classes: int, kind: str
) -> dict[str, Label]:
  found: dict[str, Label] = {}
  for number, line in _lines(path, _MOST_BYTES):
    if not line:
      continue
    try:
      file, label, numbers = _parsed(line, kind)
      if max(numbers, default=0) >= classes:
        raise ValueError(
          f"label {max(numbers)}, expected 0 to {classes - 1:,}."
        )
      _add(found, file, label)
    except ValueError as problem:
      raise _problem(path, number, str(problem)) from None
  return found


def _parsed(line: bytes, kind: str) -> tuple[str, Label, list[int]]:
  """The path, the label, and its classes or labels; or a `ValueError`."""
  name, pattern, example = _LABELS[kind]
  file, *label = line.rsplit(maxsplit=1)
  if not label or not re.fullmatch(pattern, label[0]):
    raise ValueError(
      f"{messages.brief(os.fsdecode(line))}, expected PATH {name}, such as "
      f"'images/1.jpg {example}'. (Without a {CLASSES}, every .txt file of the "
      "folder has to be a list.)"
    )
  path = os.fsdecode(file)
  if kind == "values":
    return path, labels.read(label[0], kind), []
  numbers = [int(each) for each in label[0].split(b",") if each != b"-"]
  return path, numbers[0] if kind == "classes" else [*numbers], numbers


def _add(found: dict[str, Label], file: Any, label: Label) -> None:
  """Add an image; a `ValueError` if it is no path inside of the folder."""
  if not isinstance(file, str) or "\0" in file:
    raise ValueError(f"{messages.brief(file)} is no path.")
  path = pathlib.PurePosixPath(file)
  if path.is_absolute() or ".." in path.parts or not path.parts:
    raise ValueError(
      f"{messages.brief(file)} leads out of the folder: expected a path inside "
      "of it, such as 'images/1.jpg', without '..'."
    )
  name = str(path)
  if name in found:
    raise ValueError(f"{messages.brief(file)} is listed a second time.")
  found[name] = label


def _read_classes(path: pathlib.Path) -> list[str]:
  """The names of the classes, one a line; none without such a file."""
  if not os.path.lexists(path):
    return []
  names: dict[str, None] = {}
  for number, line in _lines(path, _MOST_CLASS_BYTES):
    if number > MOST_CLASSES:
      raise _problem(path, number, f"more than {MOST_CLASSES:,} classes.")
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
  _require_file(path, most)
  try:
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
      f"{messages.utf8(str(path))} cannot be read ({error.strerror})."
    ) from error


def _require_file(path: pathlib.Path, most: int) -> None:
  """Refuse what is no regular file, and a file of more than `most` bytes."""
  name = messages.utf8(str(path))
  if not path.is_file():
    raise BrokenDataError(f"{name}: {image_paths.why_irregular(str(path))}.")
  size = path.stat().st_size
  if size > most:
    raise BrokenDataError(
      f"{name} has {size:,} bytes, expected at most {most:,}."
    )


def _problem(
  path: pathlib.Path, number: int, text: str, place: str = "line"
) -> BrokenDataError:
  where = f"{messages.utf8(str(path))}, {place} {number}"
  return BrokenDataError(f"{where}: {text.removesuffix('.')}.")


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


def _digest(labelled: Sequence[tuple[str, Any]]) -> str:
  """SHA-256 of images and their labels, in order."""
  made = hashlib.sha256()
  for file, encoded in labelled:
    label = np.asarray(encoded).tolist()
    made.update(os.fsencode(f"{file}\0{label}\n"))
  return made.hexdigest()
