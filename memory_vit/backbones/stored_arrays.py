"""Read untrusted files of arrays: .npz, and .safetensors in one part or more.

Nothing is unpickled. Sizes are checked before memory is allocated: what a file
claims against caps and its own length, what the header of an array claims
against its bytes. The checksums of .npz files are verified. Arrays are read one
by one, on access.
"""

import contextlib
import dataclasses
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
import safetensors

from memory_vit.backbones import published
from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief, first_line

SAFETENSORS = ".safetensors"
# Of all arrays, uncompressed. The largest published ViT has 7 GB in float32.
MAX_BYTES = 16 * 2**30
# Uncompressed over compressed, of a whole .npz file: weights hardly shrink, but
# a head of zeros does, a thousandfold.
MAX_RATIO = 100
# A training state with two moments of H/14 has less than 2,000.
MAX_ENTRIES = 10_000
# Names, shapes and offsets of 10,000 arrays have 2 MB.
MAX_HEADER_BYTES = 8 * 2**20

# A name becomes a key and is shown in messages: short, printable, and nothing
# that could be a path.
_PART = r"(?!\.\.?(?:/|$))(?:(?![/\\:])[ -~])+"
_NAME = re.compile(rf"(?!.{{201}}){_PART}(?:/{_PART})*")
_NPY = ".npy"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_LENGTH_BYTES = 8
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class _Entry:
  file: Path
  read: Callable[[], np.ndarray]
  has_values: bool  # without values it is not listed


class StoredArrays(Mapping[str, np.ndarray]):
  """The arrays of open files by name, each read and checked on access.

  `arrays[name]` is float32, whatever float the file has. Arrays of .safetensors
  files without values are not listed: transformers writes the registers of a
  DINOv3 that has none.
  """

  note: bytes | None = None  # the entry of an .npz file, see `published`

  def __init__(self) -> None:
    self._entries: dict[str, _Entry] = {}
    self.dtypes: dict[str, np.dtype] = {}  # in the file, once they are read

  def __iter__(self) -> Iterator[str]:
    return (name for name, e in self._entries.items() if e.has_values)

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def __contains__(self, name: object) -> bool:
    return name in self._entries  # without reading it

  def __getitem__(self, name: str) -> np.ndarray:
    with _refusals(self._place(name)):
      array = self._entries[name].read()
    self.dtypes[name] = array.dtype
    return as_float32(array, self._place(name))

  def file_of(self, name: str) -> Path:
    return self._entries[name].file

  def add(
    self,
    name: str,
    file: Path,
    read: Callable[[], np.ndarray],
    has_values: bool = True,
  ) -> None:
    """Add an array; refuse an invalid or duplicate name."""
    if not _NAME.fullmatch(name):
      raise BackboneError(
        f"{file}: entry {brief(name)} is no name of an array: expected at most "
        "200 characters of ASCII, parts separated by '/', without '..', '\\', "
        "':' and control characters."
      )
    if name in self._entries:
      raise BackboneError(
        f"{file} has an entry {name}, and so has {self.file_of(name).name}: "
        "there may not be two entries of the same name."
      )
    self._entries[name] = _Entry(file, read, has_values)

  def _place(self, name: str) -> str:
    return f"{self.file_of(name)}: entry {name!r}"


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
  """Cast an array of any float; refuse it if empty or not finite."""
  if not array.size:
    raise BackboneError(f"{where} has the shape {array.shape}: no values.")
  with np.errstate(over="ignore", invalid="ignore"):
    cast = array.astype(np.float32, copy=False)
  if not np.isfinite(cast).all():
    raise BackboneError(f"{where} has values that are not finite as float32.")
  return cast


@contextlib.contextmanager
def open_npz(file: Path) -> Iterator[StoredArrays]:
  """Open a local .npz file, after its sizes and names were checked."""
  with _opened_zip(file) as archive:
    entries = archive.infolist()
    packed = file.stat().st_size
    _require_caps(
      file, len(entries), sum(entry.file_size for entry in entries),
      min(MAX_BYTES, MAX_RATIO * packed),
      f", and {MAX_RATIO} times as many as the {packed:,} of the file",
    )  # fmt: skip
    arrays = StoredArrays()
    for entry in entries:
      # zipfile cuts off or replaces parts of `filename`.
      name = entry.orig_filename
      _require_plain(entry, name, file)
      read = partial(_from_zip, archive, entry)
      is_note = name == published.ENTRY
      arrays.add(name.removesuffix(_NPY), file, read, not is_note)
      if is_note:
        with _refusals(f"{file}: entry {name}"):
          arrays.note = archive.read(entry)
    yield arrays


@contextlib.contextmanager
def open_safetensors(files: Sequence[Path]) -> Iterator[StoredArrays]:
  """Open .safetensors files whose arrays have different names."""
  total = sum(_checked_size(file) for file in files)
  arrays = StoredArrays()
  with contextlib.ExitStack() as stack:
    for file in files:
      with _refusals(str(file)):
        opened = stack.enter_context(safetensors.safe_open(file, "np"))
        names = opened.keys()
        shapes = {n: opened.get_slice(n).get_shape() for n in names}
      _require_caps(file, len(arrays) + len(shapes), total, MAX_BYTES)
      for name, shape in shapes.items():
        arrays.add(
          name, file, partial(_from_open, opened, name), 0 not in shape
        )
    yield arrays


def require_whole(file: Path) -> None:
  """Refuse an .npz file with a wrong CRC-32; arrays are not parsed."""
  with open_npz(file), _opened_zip(file) as archive, _refusals(str(file)):
    if damaged := archive.testzip():
      raise ValueError(f"entry {damaged!r} is damaged")


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
  """Convert errors of the libraries to `BackboneError`.

  Damaged and hostile files raise nearly every type: those of zipfile and zlib,
  SyntaxError of a header, RuntimeError of encryption, MemoryError.
  """
  try:
    yield
  except Exception as error:
    raise BackboneError(
      f"{what} cannot be read: {first_line(error)}"
    ) from error


def _require_caps(
  file: Path, entries: int, claimed: int, most: int, why: str = ""
) -> None:
  if entries > MAX_ENTRIES:
    raise BackboneError(
      f"{file} has {entries} entries, expected at most {MAX_ENTRIES}."
    )
  if claimed > most:
    raise BackboneError(
      f"{file} would be {claimed:,} bytes unpacked: expected at most "
      f"{MAX_BYTES:,}{why}."
    )


@contextlib.contextmanager
def _opened_zip(file: Path) -> Iterator[zipfile.ZipFile]:
  if not zipfile.is_zipfile(file):
    raise BackboneError(
      f"{file} is no .npz file, or its end is missing: fetch it again."
    )
  with contextlib.ExitStack() as stack:
    with _refusals(str(file)):
      archive = stack.enter_context(zipfile.ZipFile(file))
    yield archive


def _require_plain(entry: zipfile.ZipInfo, name: str, file: Path) -> None:
  """Refuse an entry that is not an array, or of another compression."""
  if name == published.ENTRY:
    if entry.file_size > published.MAX_BYTES:
      raise BackboneError(
        f"{file}: entry {name} has {entry.file_size:,} bytes, expected at most "
        f"{published.MAX_BYTES:,}."
      )
  elif not name.endswith(_NPY):
    raise BackboneError(f"{file}: entry {brief(name)} is no array (NAME.npy).")
  if entry.compress_type not in _METHODS:
    raise BackboneError(
      f"{file}: entry {brief(name)} is compressed by method "
      f"{entry.compress_type}, expected one of {list(_METHODS)} (stored, "
      "deflated)."
    )


def _from_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
  # numpy warns of the header of Python 2, which no published file has.
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    with archive.open(entry) as stream:
      _check_header(stream, entry)
    with archive.open(entry) as stream:
      array = np.lib.format.read_array(stream, allow_pickle=False)
  # numpy stores bfloat16 as two bytes without a type.
  return array.view(jnp.bfloat16) if array.dtype.kind == "V" else array


def _check_header(stream: IO[bytes], entry: zipfile.ZipInfo) -> None:
  """Raise ValueError unless the header of an array fits its entry.

  Before the array is read: numpy allocates what the header claims.
  """
  version = np.lib.format.read_magic(stream)
  if version == (1, 0):
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
  elif version == (2, 0):
    shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
  else:
    raise ValueError(f"format {version} is not that of numbers")
  # V2 is bfloat16.
  if dtype.hasobject or (dtype.kind != "f" and dtype != np.dtype("V2")):
    raise ValueError(f"it is {dtype}, expected a float")
  # An empty axis would let the others have any length.
  if min(shape, default=1) < 1:
    raise ValueError(f"its shape is {brief(shape)}: it has no values")
  claimed = math.prod(shape) * dtype.itemsize
  data_bytes = entry.file_size - stream.tell()
  if claimed != data_bytes:
    raise ValueError(
      f"its header says {brief(shape)} of {dtype}, {claimed:,} bytes, "
      f"and there are {data_bytes:,}"
    )


def _from_open(opened: Any, name: str) -> np.ndarray:
  if (kind := opened.get_slice(name).get_dtype()) not in _FLOATS:
    raise ValueError(f"it is {brief(kind)}, expected a float")
  return np.asarray(opened.get_tensor(name))


def _checked_size(file: Path) -> int:
  """The bytes of a file, whose header has an acceptable length."""
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
      f"{file} is no {SAFETENSORS} file, or its end is missing: {size:,} "
      f"bytes, of which its header would be {length:,} (at most "
      f"{MAX_HEADER_BYTES:,})."
    )
  return size
