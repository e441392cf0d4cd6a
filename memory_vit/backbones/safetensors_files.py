"""Read untrusted .safetensors files, one or the shards of one model.

The library parses; nothing in such a file can be run. Before that, the lengths
of header and file are checked against caps, and after it names, shards and the
index that lists them. Arrays are read one by one, when they are asked for.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from memory_vit.backbones import json_files, npz
from memory_vit.backbones.float_arrays import as_float32
from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief, first_line

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"

# Names, shapes and offsets of 10,000 arrays have 2 MB.
MAX_HEADER_BYTES = 8 * 2**20
_LENGTH_BYTES = 8
_FLOATS = ("F64", "F32", "F16", "BF16")
_NAME = re.compile(r"[!-~]{1,200}")
# No path: a shard lies beside its index.
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\.safetensors")


class Tensors(Mapping[str, np.ndarray]):
  """The arrays of open files by name, each read and checked when it is asked.

  `tensors[name]` is float32, whatever float the file has; it raises
  `BackboneError` for an array of anything else, of no values, or of values that
  float32 cannot hold. Arrays of no values are not listed: transformers writes
  the registers of a DINOv3 that has none.
  """

  def __init__(self, places: Mapping[str, tuple[Path, Any]]) -> None:
    """Wrap {name: its file, the open file}."""
    self._places = places

  def __iter__(self) -> Iterator[str]:
    for name, (_, opened) in self._places.items():
      if 0 not in opened.get_slice(name).get_shape():
        yield name

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def __contains__(self, name: object) -> bool:
    return name in self._places  # without reading it

  def file_of(self, name: str) -> Path:
    """The file that holds an array."""
    return self._places[name][0]

  def __getitem__(self, name: str) -> np.ndarray:
    file, opened = self._places[name]
    where = f"{file}: {name}"
    with _refusals(where):
      kind = opened.get_slice(name).get_dtype()
    if kind not in _FLOATS:
      raise BackboneError(
        f"{where} is {brief(kind)}, expected one of {', '.join(_FLOATS)}."
      )
    with _refusals(where):
      array = np.asarray(opened.get_tensor(name))
    return as_float32(array, where)


@contextlib.contextmanager
def open_shards(index: Path) -> Iterator[Tensors]:
  """Open the files that an index lists, which lie beside it.

  Raises:
    BackboneError: where one is missing or cannot be read, or the arrays in them
      are not exactly those that the index says, where it says.
  """
  listed = _weight_map(index)
  shards = [index.with_name(name) for name in sorted(set(listed.values()))]
  with _opened(shards) as tensors:
    for name in sorted(listed.keys() | tensors.keys()):
      expected = listed.get(name, "no file")
      found = tensors.file_of(name).name if name in tensors else "no file"
      if expected != found:
        raise BackboneError(
          f"{index}: array {brief(name)} is listed in {expected}, and lies in "
          f"{found}."
        )
    yield tensors


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[Tensors]:
  """Open one file.

  Raises:
    BackboneError: where it cannot be read, or is beyond the caps.
  """
  with _opened([file]) as tensors:
    yield tensors


@contextlib.contextmanager
def _opened(files: list[Path]) -> Iterator[Tensors]:
  """Open files whose arrays have different names."""
  total = sum(_checked_size(file) for file in files)
  if total > npz.MAX_BYTES:
    raise BackboneError(
      f"{files[0].parent}: the weights have {total:,} bytes, expected at most "
      f"{npz.MAX_BYTES:,}."
    )
  places: dict[str, tuple[Path, Any]] = {}
  with contextlib.ExitStack() as stack:
    for file in files:
      with _refusals(str(file)):
        opened = stack.enter_context(safetensors.safe_open(file, "np"))
        names = list(opened.keys())
      for name in names:
        _require_name(name, file)
        if name in places:
          raise BackboneError(
            f"{file} has {name}, and so has {places[name][0].name}."
          )
        places[name] = (file, opened)
      if len(places) > npz.MAX_ENTRIES:
        raise BackboneError(
          f"{file}: more than {npz.MAX_ENTRIES:,} arrays, which no ViT has."
        )
    yield Tensors(places)


def _checked_size(file: Path) -> int:
  """The bytes of a file, whose header is no longer than it may be."""
  if not file.is_file():
    raise BackboneError(
      f"{file} is not there, or no file: fetch all files of the model."
    )
  size = file.stat().st_size
  with _refusals(str(file)), file.open("rb") as opened:
    begins = opened.read(_LENGTH_BYTES)
  length = int.from_bytes(begins, "little")
  if len(begins) < _LENGTH_BYTES or length > min(
    MAX_HEADER_BYTES, size - _LENGTH_BYTES
  ):
    raise BackboneError(
      f"{file} is no {SUFFIX} file, or its end is missing: {size:,} bytes, of "
      f"which its header would be {length:,} (at most {MAX_HEADER_BYTES:,})."
    )
  return size


def _require_name(name: str, file: Path) -> None:
  if not _NAME.fullmatch(name):
    raise BackboneError(
      f"{file}: {brief(name)} is no name of an array: expected at most 200 "
      "characters of ASCII, without spaces."
    )


def _weight_map(index: Path) -> dict[str, str]:
  """{array: file} of an index."""
  found = json_files.read_object(index).get("weight_map")
  if not isinstance(found, dict) or not found:
    raise BackboneError(
      f"{index}: weight_map is {brief(found)}, expected an object with the "
      "file of every array."
    )
  for name, shard in found.items():
    if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
      raise BackboneError(
        f"{index}: array {brief(name)} is listed in {brief(shard)}, expected "
        f"the name of a {SUFFIX} file in the same directory."
      )
  return found


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
  """Raise a `BackboneError` for what the library raises, of any type."""
  try:
    yield
  except Exception as error:
    raise BackboneError(
      f"{what} cannot be read: {first_line(error)}"
    ) from error
