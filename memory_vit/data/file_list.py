"""File lists: text files or tables that name the images and labels of a split.

A folder holds the images, at any depth, and a list for every split: a text file
such as train.txt, with lines PATH LABEL, or a table, train.csv, train.tsv or
train.parquet. Images are ordered, sliced and skipped if broken as in an image
folder; as there, a list "train" defines the classes.
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
# Name of the list that defines the classes of all splits.
_TRAIN = "train"

# Maximum number of bytes of a list, and of a line (paths take up to 4,096).
_MOST_BYTES, _LONGEST = 2**29, 5_000
# Maximum number of lines of a list; published lists have fewer lines.
_MOST_LINES = 2**24
_MOST_CLASS_BYTES = 2**24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Maximum number of rows that `check_data` shows of a table.
_EXAMPLES = 3


def open_list(ref: SplitRef) -> Split:
  root = local(ref.dir or ".", "the folder of file lists", DataError)
  lists = _find_lists(root, ref.dir)
  wanted = _named_lists(ref, lists)
  files = (path for path in root.iterdir() if path.name.lower() == CLASSES)
  stated = _read_classes(next(files, root / CLASSES))
  # `naming` holds the lists whose labels name the classes. It is empty if names
  # come from classes.txt or, for several label columns, from the column names.
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
  """Return {split: path of a list} for the lists in `root`.

  Errors name `directory`, which is `config.data.dir`.
  """
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
        f"{messages.utf8(str(root))} has two lists of the same split, "
        f"{messages.brief(lists[path.stem].name)} and "
        f"{messages.brief(path.name)}: expected one."
      )
    lists[path.stem] = path
  return lists


def _named_lists(ref: SplitRef, lists: Collection[str]) -> list[str]:
  """Return the names in `ref.split`: "train[:90%]+val" names "train" and "val".

  Raise if one of these names is not the name of a list.
  """
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
        f"{messages.brief(ref.dir)} holds no .txt, .csv, .tsv or .parquet file "
        f"of that name. The folder has {known or 'no list at all'}.{advice}"
      )
  return wanted


class _List(NamedTuple):
  """The images and labels of a list, in the order of the list.

  Attributes:
    path: the text file or table.
    labels: {image: its label}.
    numbers: number of the line or row of each image.
    columns: names of the columns that are read from a table; the first column
      holds the paths.
    examples: {index of an image: its cells in `columns`}, for a few images.
    names: names of the labels or values, if each label or value has a column.
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
        f"but {messages.utf8(str(path))} is not a table: leave "
        "this option empty."
      )
  listed, numbers = dict[str, Label](), list[int]()
  for number, line in _lines(path, _MOST_BYTES):
    if line:
      with _placed(path, number):
        _add(listed, *_parsed(line, kind), root)
      numbers.append(number)
  return _List(path, listed, numbers)


def _read_table(
  path: pathlib.Path, columns: Sequence[str], kind: Kind, root: pathlib.Path
) -> _List:
  listed, numbers = dict[str, Label](), list[int]()
  examples, marks = dict[int, Sequence[Any]](), set[str]()
  several = len(columns) > 2
  for number, row in table_file.rows(path, columns, _MOST_LINES):
    file, *cells = row
    with _placed(path, number):
      # If there are several columns of labels, each column holds one number.
      cell = tuple(cells) if several else cells[0]
      label = (KINDS["values"] if several else kind).read(cell)
      _add(listed, file.strip() if isinstance(file, str) else file, label, root)
      if kind.numbers:
        texts = [t for t in cells if isinstance(t, str) and "[" not in t]
        marks |= {*"".join(texts)} & {".", ","}
        if len(marks) > 1:  # "1.500" may mean 1,500
          raise ValueError(
            f"its label is {messages.brief(cell)}, but other rows have "
            "a different decimal mark: expected a point in all rows."
          )
    shown = [example[1:] for example in examples.values()]
    if len(shown) < _EXAMPLES and row[1:] not in shown:
      examples[len(numbers)] = row
    numbers.append(number)
  is_named = several or (
    # A value is named after its column, unless a cell holds several values.
    kind.numbers and all(np.size(label) == 1 for label in listed.values())
  )
  names = columns[1:] if is_named else ()
  return _List(path, listed, numbers, columns, examples, names)


@contextlib.contextmanager
def _placed(path: pathlib.Path, number: int) -> Iterator[None]:
  """Turn a `ValueError` in a `with` block into an error with file and line."""
  try:
    yield
  except ValueError as problem:
    raise _problem(path, number, str(problem)) from None


def _names(lists: Sequence[_List], root: pathlib.Path) -> Sequence[str]:
  """Return the names of classes, labels or values that `lists` define.

  If a list has `_List.names`, return these names. Otherwise, derive the names
  from the labels in all `lists`.
  """
  for file_list in lists:
    if file_list.names:
      return file_list.names
  try:
    names = labels.names_among(
      label for file_list in lists for label in file_list.labels.values()
    )
  except DataError as error:
    raise BrokenDataError(
      f"the lists: {error}. To set the names of classes or labels, list them "
      f"in the file {CLASSES}, one per line."
    ) from None
  labels.tell_of_numbers(names, messages.utf8(str(root)))
  return names


def _encoded(
  file_list: _List, encode: Encoder, naming: pathlib.Path
) -> np.ndarray:
  """Return the labels of a list, encoded as in `Split.labels`.

  Without classes.txt, the list at the path `naming` defines the classes. Then
  an error about a label in another list also names the path `naming`.
  """
  try:
    return encode.all(file_list.labels.values(), file_list.place)
  except BrokenDataError as error:
    if file_list.path == naming or not encode.numbers_are_names:
      raise
    raise BrokenDataError(
      f"{error} The {encode.kind} are taken from {messages.utf8(str(naming))} "
      f"unless {CLASSES} lists them."
    ) from None


def _columns(
  file_list: _List, encoded: np.ndarray, encode: Encoder
) -> Iterator[str]:
  """Yield a line for each column of a table.

  The line says what the column holds, and how a few of its cells were read.
  """
  images, several = [*file_list.labels], len(file_list.columns) > 2
  shown = functools.partial(KINDS[encode.kind].meaning, encode.names)
  for place, column in enumerate(file_list.columns):
    contents = encode.kind if place else "paths"
    examples = []
    for i, cells in file_list.examples.items():
      label = encoded[i][place - 1] if several else shown(encoded[i])
      meaning = messages.brief(label if place else images[i])
      examples.append(f"{messages.brief(cells[place])} is {meaning}")
    yield (
      f"{messages.utf8(file_list.path.name)}: column {messages.brief(column)} "
      f"holds {contents}: {', '.join(examples)}"
    )


def _parsed(line: bytes, kind: Kind) -> tuple[str, Label]:
  name, pattern, example = kind.line_form
  file, *label = line.rsplit(maxsplit=1)
  if not label or not re.fullmatch(pattern, label[0]):
    raise ValueError(
      f"{messages.brief(os.fsdecode(line))}, expected PATH {name}, such as "
      f"'images/1.jpg {example}'. If this file is not a list, move it to "
      "another folder: every .txt file in this folder is read as a list if the "
      f"folder has neither {CLASSES} nor a list named train."
    )
  path, label_parts = os.fsdecode(file), parts(os.fsdecode(label[0]))
  if kind.numbers:
    return path, kind.read(label_parts)
  numbers = [int(part) for part in label_parts]
  return path, numbers[0] if kind.one_is_right else [*numbers]


def _add(
  listed: dict[str, Label], file: Any, label: Label, root: pathlib.Path
) -> None:
  """Add an image and its label to `listed`.

  Raise `ValueError` if the path of the image is listed already, or does not lie
  in the folder `root`.
  """
  if not isinstance(file, str) or "\0" in file:
    raise ValueError(f"{messages.brief(file)} is not a path.")
  path = pathlib.PurePosixPath(file)
  for base in (root.absolute(), root.resolve()):
    if path.is_relative_to(base):
      path = path.relative_to(base)
  is_absolute = path.is_absolute() or re.match(r"[A-Za-z]:[/\\]", file)
  if is_absolute or ".." in path.parts or not path.parts:
    raise ValueError(
      f"{messages.brief(file)} leads out of the folder: expected a path in the "
      "folder, such as 'images/1.jpg', without '..'."
    )
  name = str(path)
  if name in listed:
    raise ValueError(f"{messages.brief(file)} is listed a second time.")
  listed[name] = label


def _read_classes(path: pathlib.Path) -> list[str]:
  """Read the names of the classes, one per line; [] if there is no file."""
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
        f"{shown} is empty, is not UTF-8, or is also in an earlier line: "
        "expected the name of a class, different from all other names.",
      )
    names[name] = None
  if not names:
    raise BrokenDataError(
      f"{path} is empty: expected the name of a class in each line. Without "
      "this file, the labels in the lists name the classes."
    )
  return [*names]


def _lines(path: pathlib.Path, most: int) -> Iterator[tuple[int, bytes]]:
  """Yield (line number, line without outer white space) for each line."""
  _require_file(path, most)
  try:
    with path.open("rb") as file:
      read = functools.partial(file.readline, _LONGEST + 1)
      for number, line in enumerate(iter(read, b""), 1):
        if len(line) > _LONGEST:
          raise _problem(path, number, f"more than {_LONGEST:,} bytes.")
        if number > _MOST_LINES:
          raise _problem(path, number, f"more than {_MOST_LINES:,} lines.")
        # Some editors start a file with an invisible byte order mark: drop it.
        start = _BYTE_ORDER_MARK if number == 1 else b""
        yield number, line.removeprefix(start).strip()
  except OSError as error:
    raise BrokenDataError(
      f"{messages.utf8(str(path))} cannot be read ({error.strerror})."
    ) from error


def _require_file(path: pathlib.Path, most: int) -> None:
  """Raise unless a path is a regular file of at most `most` bytes."""
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
  """Return {file: reason} for the `files` that are missing or not regular."""
  names = collections.defaultdict(set)
  for file in files:
    parent, _, name = file.rpartition("/")
    names[parent].add(name)
  reasons = {}
  for parent, wanted in names.items():
    folder = os.path.join(root, parent)
    for name, why in _irregular_in(folder, wanted).items():
      reasons[f"{parent}/{name}" if parent else name] = why
  return reasons


def _irregular_in(folder: str, names: Collection[str]) -> Mapping[str, str]:
  """Return {name: reason} for `names` that are missing or not regular files."""
  is_file, similar = dict[str, bool](), dict[str, str]()
  try:
    with os.scandir(folder) as entries:
      for e in entries:
        if e.name in names:
          is_file[e.name] = e.is_file()
        else:
          similar[_folded(e.name)] = e.name
  except OSError as error:
    return dict.fromkeys(names, f"it is not there ({error.strerror})")
  return {
    name: image_paths.why_irregular(os.path.join(folder, name))
    if name in is_file
    else _why_missing(name, similar.get(_folded(name)))
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
    why += f", but {messages.brief(similar)} is (other case or Unicode form)"
  return why


def _digest(labelled: Sequence[tuple[str, Any]]) -> str:
  """Return the SHA-256 of (path of an image, encoded label) pairs, in order."""
  digest = hashlib.sha256()
  for file, encoded in labelled:
    label = np.asarray(encoded).tolist()
    digest.update(os.fsencode(f"{file}\0{label}\n"))
  return digest.hexdigest()
