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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
  read = {stem: _read(lists[stem], ref) for stem in needed}
  names = _names(stated, read.values())
  sizes = {stem: len(read[stem].labels) for stem in wanted}
  chosen = []
  for stem, part in split_parts.split_parts(ref.name, ref.split, sizes):
    found, encode = read[stem], Encoder(ref.kind, names)
    encoded = encode.all(found.labels.values(), found.place)
    labelled = [*zip(found.labels, encoded, strict=True)]
    chosen += image_paths.shuffled(labelled)[part]
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
        f"and has {known or 'none at all'}."
      )
  return wanted


class _List(NamedTuple):
  """{image: its label}, in order.

  Attributes:
    numbers: of the line or row of each image.
    names: of the columns of a table that hold one label or value each.
  """

  path: pathlib.Path
  labels: dict[str, Label]
  numbers: list[int]
  names: tuple[str, ...]

  def place(self, i: int) -> str:
    return _place(self.path, self.numbers[i])


def _read(path: pathlib.Path, ref: SplitRef) -> _List:
  kind, found, numbers = ref.kind, dict[str, Label](), list[int]()
  columns: list[str] = []
  rows: Iterable[tuple[int, Any]]
  if path.suffix != ".txt":
    columns = table_file.label_columns(ref.label, kind)
    _require_file(path, _MOST_BYTES)
    rows = enumerate(table_file.rows(path, columns), 1)
  elif ref.label:
    raise DataError(
      f"config.data.label is {messages.brief(ref.label)}, a column of a table, "
      f"and {messages.utf8(str(path))} is none: expected ''."
    )
  else:
    rows = ((n, line) for n, line in _lines(path, _MOST_BYTES) if line)
  for number, row in rows:
    try:
      if columns:
        file, given = row
        # Several columns of labels hold a 1 or 0 each.
        label = labels.read(given, "values" if len(columns) > 1 else kind)
      else:
        file, label = _parsed(row, kind)
      _add(found, file, label)
    except ValueError as problem:
      raise _problem(path, number, str(problem)) from None
    numbers.append(number)
  is_named = len(columns) > 1 or (
    # A column may also hold vectors.
    kind == "values" and all(np.size(each) == 1 for each in found.values())
  )
  return _List(path, found, numbers, tuple(columns) if is_named else ())


def _names(stated: Sequence[str], lists: Collection[_List]) -> Sequence[str]:
  """Names of a file, else of columns, else among the labels of all lists."""
  for names in (stated, *(each.names for each in lists)):
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


def _parsed(line: bytes, kind: str) -> tuple[str, Label]:
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
    return path, labels.read(label[0], kind)
  numbers = [int(each) for each in label[0].split(b",") if each != b"-"]
  return path, numbers[0] if kind == "classes" else [*numbers]


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


def _problem(path: pathlib.Path, number: int, text: str) -> BrokenDataError:
  text = text.removesuffix(".")
  return BrokenDataError(f"{_place(path, number)}: {text}.")


def _place(path: pathlib.Path, number: int) -> str:
  word = "line" if path.suffix == ".txt" else "row"
  return f"{messages.utf8(str(path))}, {word} {number}"


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
