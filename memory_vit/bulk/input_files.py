"""Find the inputs: image files, and files of many images, with their counts.

An inventory is made once, before the first image is read, and numbers all
images: those of its first file come first. Equal files at equal paths make an
equal inventory, whatever order a file system lists them in.
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

# Paths are bytes: not every name of a file is text.
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
  """The files of an input, in order.

  Attributes:
    files: a row for each: "path"; "label", the folder of an image below the
      folder that was named, or null; "reason" why it cannot be read, or "";
      "images" in it; "bytes" and "time" of its last change in nanoseconds.
  """

  files: pa.Table

  @functools.cached_property
  def first(self) -> np.ndarray:
    """int64 (files + 1,): number of the first image of each, and the end."""
    counts = self.files["images"].to_numpy()
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

  @property
  def images(self) -> int:
    """Of all files."""
    return int(self.first[-1])

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of paths, sizes and times: contents are not read."""
    digest = hashlib.sha256()
    for row in self.files.to_pylist():
      digest.update(repr(tuple(row.values())).encode())
    return digest.hexdigest()

  def require_seen(self) -> None:
    """Make sure that another process sees the same files.

    Raises:
      DataError: where the first or the last of them is not there.
    """
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
    """Read images one after the other.

    Image files are named, not opened: whoever decodes them does that.

    Args:
      numbers: of images, without gaps.
      columns: of Parquet files.

    Raises:
      DataError: where a file of many images has changed, or cannot be read.
    """
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
  """List the files of inputs.

  Args:
    inputs: image files; Parquet (.parquet) and ArrayRecord (.array_record)
      files; folders, which stand for all images below them or, where there is
      none, for the Parquet and ArrayRecord files below them.
    columns: of Parquet files.
    output: a folder whose Parquet files are not read, wherever it lies.

  Raises:
    DataError: for an input that is not there or has no image, and for a file
      of many images that cannot be read.
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
  """The rows of one input."""
  # Workers may have another working directory, and so may a run that resumes.
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
  """The first folder below the one that was named: a class, as in `main`."""
  first, *rest = Path(path).relative_to(folder).parts
  return utf8(first) if rest else None


def _image(path: str, label: str | None, reason: str) -> _Row:
  """The row of an image file; one that is gone has a reason later on."""
  try:
    found = os.stat(path)
    facts = found.st_size, found.st_mtime_ns
  except OSError:
    facts = 0, 0
  return os.fsencode(path), label, reason, 1, *facts


def _container(path: Path, columns: Columns) -> _Row:
  """The row of a file of many images."""
  count = readers.count_images(path, columns)
  found = path.stat()
  return os.fsencode(path), None, "", count, found.st_size, found.st_mtime_ns
