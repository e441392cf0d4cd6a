"""List the input of a bulk run: image files and files of many images.

The list is made before the first image is read, and numbers all images. Equal
files at equal paths make an equal list, in whatever order a file system lists
them.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memory_vit.bulk import readers
from memory_vit.bulk.readers import Columns, ImageRow
from memory_vit.errors import DataError
from memory_vit.images import image_files
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief, escaped, utf8

# Paths are bytes: not every file name is UTF-8. The label is the folder of an
# image below the named one, the time that of the last change in nanoseconds.
_SCHEMA = pa.schema([
  ("path", pa.binary()),
  ("label", pa.string()),
  ("reason", pa.string()),
  ("images", pa.int64()),
  ("bytes", pa.int64()),
  ("time", pa.int64()),
])  # fmt: skip

_Row = tuple[bytes, str | None, str, int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)  # it holds a table
class InputFiles:
  """The files of an input, in order."""

  files: pa.Table  # with the columns of `_SCHEMA`

  @functools.cached_property
  def first(self) -> np.ndarray:
    """int64 (files + 1,): number of the first image of each, and the end."""
    counts = self.files["images"].to_numpy()
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

  @property
  def images(self) -> int:
    return int(self.first[-1])

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of paths, sizes and times: contents are not read."""
    digest = hashlib.sha256()
    for row in self.files.to_pylist():
      digest.update(repr(tuple(row.values())).encode())
    return digest.hexdigest()

  def require_seen(self) -> None:
    """Make sure that this process sees the first and the last file."""
    seen = self.files.filter(pc.field("time") != 0)["path"]
    last = max(0, len(seen) - 1)
    for name in [*seen.slice(0, 1), *seen.slice(last)]:
      path = os.fsdecode(name.as_py())
      if not os.path.exists(path):
        raise DataError(
          f"{escaped(path)} was there when the input was listed, and is not "
          "seen by this process: is its file system mounted here? All workers "
          "must see the inputs at the same paths."
        )

  def rows(self, numbers: range, columns: Columns) -> Iterator[ImageRow]:
    """Read consecutive images; image files are named and not opened."""
    # Files without images are never the last that begins at or before a number.
    file = int(np.searchsorted(self.first, numbers.start, side="right")) - 1
    while file < self.files.num_rows and self.first[file] < numbers.stop:
      begin, end = int(self.first[file]), int(self.first[file + 1])
      [row] = self.files.slice(file, 1).to_pylist()
      name = os.fsdecode(row["path"])
      if readers.is_container(Path(name)):
        start, stop = max(begin, numbers.start), min(end, numbers.stop)
        inside = range(start - begin, stop - begin)
        yield from readers.read_container(Path(name), inside, begin, columns)
      else:
        image = None if row["reason"] else name
        shown = utf8(name)
        yield ImageRow(begin, shown, image, row["label"], row["reason"])
      file += 1


def take_inventory(
  inputs: Sequence[str], columns: Columns, output: Path | None = None
) -> InputFiles:
  """List the files of inputs, but for Parquet files below `output`.

  An input is an image file, a Parquet (.parquet) or ArrayRecord (.array_record)
  file, or a folder of one kind of these.
  """
  rows = [row for text in inputs for row in _files_of(text, columns, output)]
  arrays = [
    pa.array([row[i] for row in rows], field.type)
    for i, field in enumerate(_SCHEMA)
  ]
  found = InputFiles(pa.Table.from_arrays(arrays, schema=_SCHEMA))
  if not found.images:
    raise DataError(
      f"--input {brief(list(inputs))} has no image: expected image files, "
      "Parquet or ArrayRecord files that are not empty, or folders of these."
    )
  return found


def _files_of(
  text: str, columns: Columns, output: Path | None
) -> Iterator[_Row]:
  # Workers and resumed runs may have another working directory.
  path = paths.local(text, "--input", DataError).absolute()
  if not path.exists():
    raise DataError(f"--input {brief(text)}: there is no such file or folder.")
  if not path.is_dir():
    many = readers.is_container(path)
    yield _container(path, columns) if many else _image(str(path), None, "")
    return
  found = image_files.walk(str(path))
  found.closed.pop(str(path), None)  # it holds no image
  images = image_files.entries_of(found)
  many_images = [
    file
    for file in map(Path, found.others)
    if readers.is_container(file)
    # As Spark hides them.
    and not any(n.startswith("_") for n in file.relative_to(path).parts)
    and not (output and file.resolve().is_relative_to(output.resolve()))
  ]
  if images and many_images:
    raise DataError(
      f"--input {brief(text)} holds both images and files of many images "
      f"({escaped(str(many_images[0]))}): give folders that hold one kind, or "
      "the files themselves."
    )
  for entry in images:
    yield _image(entry.path, _label(entry.path, path), entry.reason)
  for file in many_images:
    yield _container(file, columns)


def _label(path: str, folder: Path) -> str | None:
  """The first folder below the named one: a class, as in training."""
  first, *rest = Path(path).relative_to(folder).parts
  return utf8(first) if rest else None


def _image(path: str, label: str | None, reason: str) -> _Row:
  """The row of an image file; a missing one gets its reason when it is read."""
  try:
    found = os.stat(path)
    facts = found.st_size, found.st_mtime_ns
  except OSError:
    facts = 0, 0
  return os.fsencode(path), label, reason, 1, *facts


def _container(path: Path, columns: Columns) -> _Row:
  count = readers.count_images(path, columns)
  found = path.stat()
  return os.fsencode(path), None, "", count, found.st_size, found.st_mtime_ns
