"""List the input of a bulk run: image files and files of many images.

The list is made before the first image is read, and numbers all images. The
same files at the same paths always give the same list, in whatever order the
file system returns them.
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

# Columns of the list of input files. The paths are bytes, because file names
# need not be UTF-8. The labels are names of folders. The times of the last
# change are in nanoseconds.
_SCHEMA = pa.schema([
  ("path", pa.binary()),
  ("label", pa.string()),
  ("reason", pa.string()),
  ("images", pa.int64()),
  ("bytes", pa.int64()),
  ("time", pa.int64()),
])  # fmt: skip

_Row = tuple[bytes, str | None, str, int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)  # a pyarrow table has no hash
class InputFiles:
  """The files of the input, in order."""

  files: pa.Table  # with the columns of `_SCHEMA`

  @functools.cached_property
  def first(self) -> np.ndarray:
    """int64 (files + 1,): number of each file's first image; then the total."""
    counts = self.files["images"].to_numpy()
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

  @property
  def images(self) -> int:
    return int(self.first[-1])

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of paths, sizes and times; the contents are not read."""
    digest = hashlib.sha256()
    for row in self.files.to_pylist():
      digest.update(repr(tuple(row.values())).encode())
    return digest.hexdigest()

  def require_seen(self) -> None:
    """Raise unless this process can see the first and the last file."""
    seen = self.files.filter(pc.field("time") != 0)["path"]
    last = max(0, len(seen) - 1)
    for name in [*seen.slice(0, 1), *seen.slice(last)]:
      path = os.fsdecode(name.as_py())
      if not os.path.exists(path):
        raise DataError(
          f"{escaped(path)} existed when the input was listed, but this "
          "process does not find the file. Expected all workers to see the "
          "inputs at the same paths: check that the file system is mounted."
        )

  def rows(self, numbers: range, columns: Columns) -> Iterator[ImageRow]:
    """Yield consecutive images, without opening image files."""
    # The entries of `first` for an empty file and for the next file are equal.
    # With side="right", the search skips the empty file.
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
  """List the files of all inputs, except Parquet files below `output`.

  An input is an image file, a file of many images (.parquet, .array_record), or
  a folder with files of only one of these two kinds.
  """
  rows = [row for text in inputs for row in _files_of(text, columns, output)]
  arrays = [
    pa.array([row[i] for row in rows], field.type)
    for i, field in enumerate(_SCHEMA)
  ]
  inventory = InputFiles(pa.Table.from_arrays(arrays, schema=_SCHEMA))
  if not inventory.images:
    raise DataError(
      f"--input {brief(list(inputs))} has no image. Expected image files, "
      "non-empty Parquet or ArrayRecord files, or folders of such files."
    )
  return inventory


def _files_of(
  text: str, columns: Columns, output: Path | None
) -> Iterator[_Row]:
  # Make the path absolute: workers may have another working directory.
  path = paths.local(text, "--input", DataError).absolute()
  if not path.exists():
    raise DataError(f"--input {brief(text)}: there is no such file or folder.")
  if not path.is_dir():
    is_many = readers.is_container(path)
    yield _container(path, columns) if is_many else _image(str(path), None, "")
    return
  listing = image_files.walk(str(path))
  # Each unreadable folder gets a row, except for the input folder itself.
  listing.closed.pop(str(path), None)
  images = image_files.entries_of(listing)
  many_images = [
    file
    for file in map(Path, listing.others)
    if readers.is_container(file)
    # Like Spark, skip names that begin with an underscore.
    and not any(n.startswith("_") for n in file.relative_to(path).parts)
    and not (output and file.resolve().is_relative_to(output.resolve()))
  ]
  if images and many_images:
    raise DataError(
      f"--input {brief(text)} holds both image files and files of many images "
      f"(such as {escaped(str(many_images[0]))}). Give folders that hold only "
      "one of these two kinds, or give the files themselves."
    )
  for entry in images:
    yield _image(entry.path, _label(entry.path, path), entry.reason)
  for file in many_images:
    yield _container(file, columns)


def _label(path: str, folder: Path) -> str | None:
  """Return the name of the subfolder (the class); None outside subfolders."""
  first, *rest = Path(path).relative_to(folder).parts
  return utf8(first) if rest else None


def _image(path: str, label: str | None, reason: str) -> _Row:
  """Return the row of an image file, even if the file is missing."""
  try:
    status = os.stat(path)
    facts = status.st_size, status.st_mtime_ns
  except OSError:
    facts = 0, 0
  return os.fsencode(path), label, reason, 1, *facts


def _container(path: Path, columns: Columns) -> _Row:
  count = readers.count_images(path, columns)
  status = path.stat()
  return os.fsencode(path), None, "", count, status.st_size, status.st_mtime_ns
