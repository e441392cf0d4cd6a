"""Read files of many images: Parquet and ArrayRecord.

In Parquet an image is the bytes of a file, a struct {bytes, path} as Hugging
Face `datasets` writes it, or the path of a file. In ArrayRecord every record
must be an image file; files of TFDS, with tf.train.Example, are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import UnidentifiedImageError

from memory_vit.errors import DataError
from memory_vit.images import decoding
from memory_vit.runtime import messages, parquet, paths
from memory_vit.runtime.messages import brief, escaped, first_line, utf8

# Names of columns that may hold images, in order of preference.
_IMAGE_COLUMNS = ("image", "bytes", "path", "file", "file_name")
_LABEL_COLUMN = "label"
# Tests for the Arrow types that store bytes (`_BINARY`) or text (`_TEXT`).
_BINARY = (
  pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view,
  pa.types.is_fixed_size_binary,
)  # fmt: skip
_TEXT = (
  pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
)  # fmt: skip
# Number of rows in memory at once. A row may hold an image of megabytes.
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Columns:
  """The columns to read from Parquet files."""

  # Column of images or paths; "" for the first of `_IMAGE_COLUMNS` that exists.
  image: str = ""
  # Column of labels, of any type. "" for the column "label", or for no labels
  # if a file has no such column.
  label: str = ""
  # Folder in which all paths must lie; "" for the folder of the Parquet file.
  root: str = ""

  def absolute(self) -> Columns:
    """Return columns whose `root` does not depend on the working directory."""
    if not self.root:
      return self
    root = paths.local(self.root, "--image_root", DataError).absolute()
    if not root.is_dir():
      raise DataError(
        f"--image_root {brief(str(root))} is no folder: expected the "
        "folder that the paths in Parquet files are relative to."
      )
    return dataclasses.replace(self, root=str(root))


@dataclasses.dataclass(frozen=True)
class ImageRow:
  """An image of the input, before decoding."""

  number: int  # position among all images of the input, from 0
  # Path of an image file. For a row of a table: the name that the row states,
  # or else FILE#ROW.
  path: str
  image: str | bytes | None  # path or content of an image file; None: no image
  label: str | None
  reason: str = ""  # why `image` is None


def is_container(path: Path) -> bool:
  """Return whether a file holds many images, according to its name."""
  return path.suffix.lower() == ".parquet" or _is_array_record(path)


def _is_array_record(path: Path) -> bool:
  """Return whether a path has the suffix of an ArrayRecord file or shard."""
  suffix = path.suffix.partition("-")[0]
  return suffix in (".array_record", ".arrayrecord")


def count_images(path: Path, columns: Columns) -> int:
  """Count the images in a file; raise `DataError` if it cannot be used."""
  if _is_array_record(path):
    with _array_record(path) as reader:
      count = reader.num_records()
      if count:
        _require_image(path, reader.read([0])[0])
      return count
  with parquet.reading(path) as file:
    _found_columns(path, file.schema_arrow, columns)
    return file.metadata.num_rows


def read_container(
  path: Path, rows: range, first: int, columns: Columns
) -> Iterator[ImageRow]:
  """Yield rows of a file; `first` is the number of the image in row 0."""
  if _is_array_record(path):
    read = _read_array_record(path, rows)
  else:
    read = _read_parquet(path, rows, columns)
  for row in rows:
    values = next(read, None)
    if values is None:
      raise DataError(
        f"{escaped(str(path))} has fewer rows than it had when it was listed."
      )
    image, name, label, reason = values
    place = name or f"{utf8(str(path))}#{row}"
    yield ImageRow(first + row, place, image, label, reason)


# (Image or None, name of the image or "", label, why there is no image).
_Found = tuple[str | bytes | None, str, str | None, str]


def _read_array_record(path: Path, rows: range) -> Iterator[_Found]:
  with _array_record(path) as reader:
    for start in range(rows.start, rows.stop, _ROWS):
      part = range(start, min(start + _ROWS, rows.stop))
      for record in reader.read([*part]):
        yield record, "", None, ""


def _read_parquet(
  path: Path, rows: range, columns: Columns
) -> Iterator[_Found]:
  root = Path(columns.root) if columns.root else path.parent
  with parquet.reading(path) as file:
    image, label = _found_columns(path, file.schema_arrow, columns)
    names = _class_names(file.schema_arrow, label)
    for values in _rows_of(file, rows, [image, label] if label else [image]):
      shown = _label(values[label], names) if label else None
      content, name, reason = _image(values[image], root)
      yield content, name, shown, reason


def _class_names(schema: pa.Schema, label: str | None) -> list[str]:
  """Return class names of column `label` from Hugging Face metadata, or []."""
  try:
    about = json.loads((schema.metadata or {})[b"huggingface"])
    names = about["info"]["features"][label]["names"]
  except (ValueError, LookupError, TypeError):
    return []
  are_names = isinstance(names, list) and all(type(n) is str for n in names)
  return names if are_names else []


def _rows_of(
  file: pq.ParquetFile, rows: range, wanted: list[str]
) -> Iterator[Mapping[str, Any]]:
  """Yield the rows with the numbers `rows`; read only their row groups."""
  groups: list[int] = []
  begin = first = 0
  for i in range(file.num_row_groups):
    end = begin + file.metadata.row_group(i).num_rows
    if begin < rows.stop and end > rows.start:
      first = first if groups else begin
      groups.append(i)
    begin = end
  for batch in file.iter_batches(_ROWS, row_groups=groups, columns=wanted):
    start, stop = (max(0, n - first) for n in (rows.start, rows.stop))
    yield from batch[start:stop].to_pylist()
    first += len(batch)


def _image(value: Any, root: Path) -> tuple[str | bytes | None, str, str]:
  """Return (image or None, name of the image, why there is no image)."""
  name = ""
  if isinstance(value, Mapping):  # as in data sets of Hugging Face
    name = utf8(value.get("path") or "")
    value = value["bytes"] if value.get("bytes") else value.get("path")
  if isinstance(value, bytes):
    return value, name, ""
  if not value:
    return None, name, "the row has no image"
  path = Path(value)
  if path.is_absolute() or ".." in path.parts:
    inside = path.is_relative_to(root) and ".." not in path.parts
    if not inside:
      return None, name or utf8(value), f"not a path below {root}"
  return str(root / path), name or utf8(value), ""


def _label(value: Any, names: Sequence[str]) -> str | None:
  """Return a label as text, or None if there is no label.

  A number becomes its class name, if known. A list becomes JSON.
  """
  if value is None:
    return None
  if isinstance(value, list):
    named = [_label(v, names) if isinstance(v, int) else v for v in value]
    return utf8(json.dumps(named, ensure_ascii=False, default=str))
  if isinstance(value, int) and 0 <= value < len(names):
    return names[value]
  if isinstance(value, bytes):
    value = os.fsdecode(value)
  return utf8(str(value))


def _found_columns(
  path: Path, schema: pa.Schema, columns: Columns
) -> tuple[str, str | None]:
  """Return the names of the image column and the label column (None if absent).

  Raise `DataError` if the image column is missing or holds no images, or if the
  table lacks the column `columns.label`.
  """
  wanted = (columns.image,) if columns.image else _IMAGE_COLUMNS
  image = next((name for name in wanted if name in schema.names), "")
  if not image or not _holds_images(schema.field(image).type):
    fault = f"is of type {schema.field(image).type}" if image else "is missing"
    raise DataError(
      f"{escaped(str(path))}: the column of images ({' or '.join(wanted)}) "
      f"{fault}; the columns are {brief(schema.names)}. Give the name of the "
      "column of images as --image_column. Each row of that column must hold "
      "the bytes of an image, a struct {bytes, path}, or a path."
    )
  label = columns.label or _LABEL_COLUMN
  if label in schema.names:
    return image, label
  if columns.label:
    raise DataError(
      f"{escaped(str(path))} has no column {brief(label)}: expected one of "
      f"its columns {brief(schema.names)} as --label_column."
    )
  return image, None


def _holds_images(kind: pa.DataType) -> bool:
  """Return whether values of a type may be images or their paths."""
  if not pa.types.is_struct(kind):
    return _is_any(kind, *_BINARY, *_TEXT)
  parts = {f.name: f.type for f in kind}
  is_named = "path" not in parts or _is_any(parts["path"], *_TEXT)
  return "bytes" in parts and _is_any(parts["bytes"], *_BINARY) and is_named


def _is_any(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
  """Return whether any test holds for a type.

  For a dictionary type, the type of the values is tested.
  """
  values = kind.value_type if pa.types.is_dictionary(kind) else kind
  return any(test(values) for test in tests)


@contextlib.contextmanager
def _array_record(path: Path) -> Iterator[Any]:
  """Open an ArrayRecord file; raise `DataError` if it cannot be read."""
  try:
    from array_record.python import array_record_module
  except ImportError as error:
    raise DataError(
      messages.not_installed(
        escaped(str(path)), "array_record (Linux only)", "train"
      )
    ) from error
  try:
    # These options turn off reading ahead.
    options = "readahead_buffer_size:0,max_parallelism:0"
    with contextlib.closing(
      array_record_module.ArrayRecordReader(str(path), options)
    ) as reader:
      yield reader
  except DataError:
    raise
  except (OSError, RuntimeError, ValueError, IndexError) as error:
    raise DataError(
      f"{escaped(str(path))} cannot be read: {first_line(error)}. The file may "
      "have changed since it was listed, or may not be an ArrayRecord file."
    ) from error


def _require_image(path: Path, record: bytes) -> None:
  """Raise `DataError` if the first record of a file is not an image file."""
  try:
    # Read only the header; nothing is decoded.
    with decoding.opened(record):
      pass
  except UnidentifiedImageError as error:
    raise DataError(
      f"{escaped(str(path))}: the first record is not an image file. Expected "
      "every record to be an image file. If TFDS wrote the file, the images "
      "are wrapped in tf.train.Example: first write the images to Parquet or "
      "to files."
    ) from error
  except Exception:  # decoding reports the error in the row of this image
    return
