"""File lists: text files or tables with the images of a split, and labels.

A folder holds the images, anywhere below it, and a list for every split, such
as train.txt, whose lines are PATH LABEL, or a table, train.csv, train.tsv or
train.parquet. The order of images, slices, and the rules for broken ones are
those of an image folder; so are the classes, if there is a list "train".
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memory_vit.data import image_paths, labels, split_parts, table_file
from memory_vit.data.data_files import LISTED
from memory_vit.data.labels import MOST_CLASSES, Encoder
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.images import image_files
from memory_vit.kinds import KINDS, Kind
from memory_vit.kinds.written import Label, name_of, parts
from memory_vit.runtime import messages
from memory_vit.runtime.paths import local

CLASSES = "classes.txt"
# The list whose classes are those of all lists.
_TRAIN = "train"

# Bytes of a list, and of one of its lines: paths have at most 4,096.
_MOST_BYTES, _LONGEST = 2**29, 5_000
# Lines of a list, and classes: some more than the largest public sets have.
_MOST_LINES = 2**24
_MOST_CLASS_BYTES = 2**24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Rows whose cells `check_data` shows.
_EXAMPLES = 3


def open_list(ref: SplitRef) -> Split:
  root = local(ref.dir or ".", "the folder of file lists", DataError)
  lists = _find_lists(root, ref.dir)
  wanted = _named_lists(ref, lists)
  files = (path for path in root.iterdir() if path.name.lower() == CLASSES)
  stated = _read_classes(next(files, root / CLASSES))
  # The classes of a data set are the same in all of its splits.
  naming = [_TRAIN] if _TRAIN in lists else [*lists]
  if stated or "," in ref.label:
    naming = []
  needed = dict.fromkeys([*naming, *wanted])
  read = {stem: _read(lists[stem], ref, root) for stem in needed}
  names = stated or _names([read[stem] for stem in naming or wanted], root)
  encode = Encoder(ref.kind, names, numbers_are_names=not stated)
  first = read[(naming or wanted)[0]].path
  encoded = {stem: _encoded(read[stem], encode, first) for stem in wanted}
  sizes = {stem: len(read[stem].labels) for stem in wanted}
  chosen = []
  for stem, part in split_parts.split_parts(ref.name, ref.split, sizes):
    labelled = [*zip(read[stem].labels, encoded[stem], strict=True)]
    chosen += image_paths.shuffled(labelled)[part]
  split = image_paths.split_of(
    ref,
    root,
    chosen,
    class_names=names,
    irregular=_irregular(root, {file for file, _ in chosen}),
    facts={LISTED: _digest(chosen)},
  )
  lines = (_columns(read[stem], encoded[stem], encode) for stem in wanted)
  columns = tuple(itertools.chain.from_iterable(lines))
  return dataclasses.replace(split, columns=columns)


def _find_lists(root: pathlib.Path, directory: str) -> dict[str, pathlib.Path]:
  """{split: its list} in a folder, named as the user did."""
  if not directory or not root.is_dir():
    raise DataError(
      f"the folder of file lists {messages.brief(directory)} is not there: set "
      "config.data.dir to a directory that holds the images and train.txt."
    )
  lists: dict[str, pathlib.Path] = {}
  for path in sorted(root.iterdir()):
    is_list = path.suffix.lower() in (".txt", *table_file.SUFFIXES)
    hidden = path.name.lower() == CLASSES or image_files.is_hidden(path.name)
    if hidden or not is_list:
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
      advice = ""
      if lists:
        part = messages.utf8(next(iter(lists)))
        advice = (
          f" Splits may be parts of a list: --config.data.train='{part}[:80%]' "
          f"--config.data.validation='{part}[80%:]' --config.data.test=''."
        )
      raise DataError(
        f"data set {ref.name!r} has no split {messages.brief(name)}: "
        f"{messages.brief(ref.dir)} holds no such .txt, .csv, .tsv or .parquet "
        f"file, and has {known or 'none at all'}.{advice}"
      )
  return wanted


class _List(NamedTuple):
  """{image: its label}, in order.

  Attributes:
    numbers: of the line or row of each image.
    columns: of a table, that of the paths first.
    examples: {place of an image: its cells in these columns}, of a few.
    names: of the columns that hold one label or value each.
  """

  path: pathlib.Path
  labels: dict[str, Label]
  numbers: list[int]
  columns: Sequence[str] = ()
  examples: Mapping[int, Sequence[Any]] = types.MappingProxyType({})
  names: Sequence[str] = ()

  def place(self, i: int) -> str:
    return _place(self.path, self.numbers[i])


def _read(path: pathlib.Path, ref: SplitRef, root: pathlib.Path) -> _List:
  _require_file(path, _MOST_BYTES)
  paths, kind = table_file.path_column(ref.path), KINDS[ref.kind]
  if table_file.is_table(path, paths):
    named = table_file.label_columns(ref.label, kind, paths)
    return _read_table(path, [paths, *named], kind, root)
  for key, column in (("label", ref.label), ("path", ref.path)):
    if column:
      raise DataError(
        f"config.data.{key} is {messages.brief(column)}, a column of a table, "
        f"and {messages.utf8(str(path))} is none: expected ''."
      )
  found, numbers = dict[str, Label](), list[int]()
  for number, line in _lines(path, _MOST_BYTES):
    if line:
      with _placed(path, number):
        _add(found, *_parsed(line, kind), root)
      numbers.append(number)
  return _List(path, found, numbers)


def _read_table(
  path: pathlib.Path, columns: Sequence[str], kind: Kind, root: pathlib.Path
) -> _List:
  found, numbers = dict[str, Label](), list[int]()
  examples, marks = dict[int, Sequence[Any]](), set[str]()
  several = len(columns) > 2
  for number, row in table_file.rows(path, columns, _MOST_LINES):
    file, *cells = row
    with _placed(path, number):
      # Several columns of labels hold a 1 or 0 each.
      given = tuple(cells) if several else cells[0]
      label = (KINDS["values"] if several else kind).read(given)
      _add(found, file.strip() if isinstance(file, str) else file, label, root)
      if kind.numbers:
        texts = [t for t in cells if isinstance(t, str) and "[" not in t]
        marks |= {*"".join(texts)} & {".", ","}
        if len(marks) > 1:  # 1.500 may be more than a thousand
          raise ValueError(
            f"its label is {messages.brief(given)}, but other rows have "
            "another decimal mark: expected a point in all rows."
          )
    shown = [each[1:] for each in examples.values()]
    if len(shown) < _EXAMPLES and row[1:] not in shown:
      examples[len(numbers)] = row
    numbers.append(number)
  is_named = several or (
    # A column may also hold vectors.
    kind.numbers and all(np.size(each) == 1 for each in found.values())
  )
  names = columns[1:] if is_named else ()
  return _List(path, found, numbers, columns, examples, names)


@contextlib.contextmanager
def _placed(path: pathlib.Path, number: int) -> Iterator[None]:
  """Name the line or row in an error."""
  try:
    yield
  except ValueError as problem:
    raise _problem(path, number, str(problem)) from None


def _names(lists: Sequence[_List], root: pathlib.Path) -> Sequence[str]:
  """Names of columns, else among the labels of lists."""
  for each in lists:
    if each.names:
      return each.names
  try:
    names = labels.names_among(
      label for each in lists for label in each.labels.values()
    )
  except DataError as error:
    raise BrokenDataError(
      f"the lists: {error}, one in each line of {CLASSES}."
    ) from None
  labels.tell_of_numbers(names, messages.utf8(str(root)))
  return names


def _encoded(found: _List, encode: Encoder, naming: pathlib.Path) -> np.ndarray:
  """The labels of a list; an error also says which list names them."""
  try:
    return encode.all(found.labels.values(), found.place)
  except BrokenDataError as error:
    if found.path == naming or not encode.numbers_are_names:
      raise
    raise BrokenDataError(
      f"{error} The {encode.kind} are those of {messages.utf8(str(naming))}, "
      f"unless {CLASSES} states them."
    ) from None


def _columns(
  found: _List, encoded: np.ndarray, encode: Encoder
) -> Iterator[str]:
  """Say how each column of a table was read, with examples of its cells."""
  images, several = [*found.labels], len(found.columns) > 2
  shown = functools.partial(KINDS[encode.kind].meaning, encode.names)
  for place, column in enumerate(found.columns):
    what = encode.kind if place else "paths"
    examples = []
    for i, cells in found.examples.items():
      label = encoded[i][place - 1] if several else shown(encoded[i])
      meaning = messages.brief(label if place else images[i])
      examples.append(f"{messages.brief(cells[place])} is {meaning}")
    yield (
      f"{messages.utf8(found.path.name)}: column {messages.brief(column)} "
      f"holds {what}: {', '.join(examples)}"
    )


def _parsed(line: bytes, kind: Kind) -> tuple[str, Label]:
  name, pattern, example = kind.line_form
  file, *label = line.rsplit(maxsplit=1)
  if not label or not re.fullmatch(pattern, label[0]):
    raise ValueError(
      f"{messages.brief(os.fsdecode(line))}, expected PATH {name}, such as "
      f"'images/1.jpg {example}'. (Without a {CLASSES}, every .txt file of the "
      "folder has to be a list.)"
    )
  path, given = os.fsdecode(file), parts(os.fsdecode(label[0]))
  if kind.numbers:
    return path, kind.read(given)
  numbers = [int(each) for each in given]
  return path, numbers[0] if kind.one_is_right else [*numbers]


def _add(
  found: dict[str, Label], file: Any, label: Label, root: pathlib.Path
) -> None:
  """Add an image; a `ValueError` if it is no path inside of the folder."""
  if not isinstance(file, str) or "\0" in file:
    raise ValueError(f"{messages.brief(file)} is no path.")
  path = pathlib.PurePosixPath(file)
  for base in (root.absolute(), root.resolve()):
    if path.is_relative_to(base):
      path = path.relative_to(base)
  is_absolute = path.is_absolute() or re.match(r"[A-Za-z]:[/\\]", file)
  if is_absolute or ".." in path.parts or not path.parts:
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
  is_file, others = dict[str, bool](), dict[str, str]()
  try:
    with os.scandir(folder) as entries:
      for e in entries:
        if e.name in names:
          is_file[e.name] = e.is_file()
        else:
          others[_folded(e.name)] = e.name
  except OSError as error:
    return dict.fromkeys(names, f"it is not there ({error.strerror})")
  return {
    name: image_paths.why_irregular(os.path.join(folder, name))
    if name in is_file
    else _why_missing(name, others.get(_folded(name)))
    for name in names
    if not is_file.get(name)
  }


def _folded(name: str) -> str:
  return name_of(name).casefold()


def _why_missing(name: str, similar: str | None) -> str:
  why = "it is not there"
  if "\\" in name:
    why += ": written on Windows? Use / in place of \\"
  elif similar:
    why += f", but {messages.brief(similar)} is (other case or form of Unicode)"
  return why


def _digest(labelled: Sequence[tuple[str, Any]]) -> str:
  """SHA-256 of images and their labels, in order."""
  made = hashlib.sha256()
  for file, encoded in labelled:
    label = np.asarray(encoded).tolist()
    made.update(os.fsencode(f"{file}\0{label}\n"))
  return made.hexdigest()
