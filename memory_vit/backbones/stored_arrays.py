"""Read arrays from untrusted files: one .npz, or one or more .safetensors.

Nothing is unpickled. Sizes are checked before memory is allocated: the size
that a file claims against limits and its own length, and the size in an array's
header against the number of its bytes. The checksums of .npz files are
verified. Arrays are read one by one, on access.
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
# Maximum number of bytes of all arrays, uncompressed. The largest DINOv3 (7B)
# has 27 GB in float32.
MAX_BYTES = 32 * 2**30
# Maximum ratio of uncompressed to compressed size of a whole .npz file. A file
# of trained weights has a ratio near 1. The ratio of a single array has no
# maximum, because the zeros of a new head have a ratio of 1,000.
MAX_RATIO = 100
# Maximum number of arrays. A training state of H/14 with Adam's two moments has
# fewer than 2,000 arrays.
MAX_ENTRIES = 10_000
# Maximum size of a .safetensors header. With 10,000 arrays, a header has 2 MB.
MAX_HEADER_BYTES = 8 * 2**20

# Names of arrays become keys and appear in messages, so they must be short and
# printable, and must not lead out of a directory if used as a path.
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
  # False for `published.ENTRY` and for empty arrays; iteration skips them.
  has_values: bool


class StoredArrays(Mapping[str, np.ndarray]):
  """The arrays of open files by name; an access reads and checks an array.

  `arrays[name]` is cast to float32. Empty arrays of .safetensors files are not
  listed: transformers writes an empty array for the registers of a DINOv3
  without registers.
  """

  note: bytes | None = None  # content of `published.ENTRY` in an .npz file

  def __init__(self) -> None:
    self._entries: dict[str, _Entry] = {}
    # {name: dtype in the file} of the arrays read so far.
    self.dtypes: dict[str, np.dtype] = {}

  def __iter__(self) -> Iterator[str]:
    return (name for name, e in self._entries.items() if e.has_values)

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def __contains__(self, name: object) -> bool:
    return name in self._entries  # the inherited method would read the array

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
        f"{file}: entry {brief(name)} is no name of an array. Expected at "
        "most 200 printable ASCII characters without '\\' and ':', and no part "
        "'.' or '..' between slashes."
      )
    if name in self._entries:
      raise BackboneError(
        f"{file}: entry {name} is also in {self.file_of(name).name}: there "
        "must not be two entries of the same name."
      )
    self._entries[name] = _Entry(file, read, has_values)

  def _place(self, name: str) -> str:
    return f"{self.file_of(name)}: entry {name!r}"


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
  """Cast an array of floats to float32; raise if it is empty or not finite."""
  if not array.size:
    raise BackboneError(
      f"{where} has the shape {array.shape}, expected at least one value."
    )
  with np.errstate(over="ignore", invalid="ignore"):
    cast = array.astype(np.float32, copy=False)
  if not np.isfinite(cast).all():
    raise BackboneError(f"{where} has values that are not finite as float32.")
  return cast


@contextlib.contextmanager
def open_npz(file: Path) -> Iterator[StoredArrays]:
  """Open a local .npz file after checking its sizes and array names."""
  with _opened_zip(file) as archive:
    entries = archive.infolist()
    packed = file.stat().st_size
    _require_caps(
      file, len(entries), sum(entry.file_size for entry in entries),
      min(MAX_BYTES, MAX_RATIO * packed),
      f", and {MAX_RATIO} times as many as the {packed:,} bytes of the file",
    )  # fmt: skip
    arrays = StoredArrays()
    for entry in entries:
      # Use the stored name, because zipfile changes some names in `filename`.
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
  """Open .safetensors files; raise if two arrays have the same name."""
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
  """Raise if an .npz file is damaged (CRC-32); does not parse its arrays."""
  with open_npz(file), _opened_zip(file) as archive, _refusals(str(file)):
    if damaged := archive.testzip():
      raise ValueError(f"entry {damaged!r} is damaged")


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
  """Convert exceptions of libraries to `BackboneError`.

  Damaged and hostile files raise exceptions of nearly every type: those of
  zipfile and zlib, SyntaxError (bad header), RuntimeError (encryption) and
  MemoryError.
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
  """Raise if the name, size or compression of an entry is not supported."""
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
      f"{entry.compress_type}, expected one of {list(_METHODS)} (stored or "
      "deflated)."
    )


def _from_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
  # numpy only warns of headers that Python 2 wrote: turn warnings into errors.
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    with archive.open(entry) as stream:
      _check_header(stream, entry)
    with archive.open(entry) as stream:
      array = np.lib.format.read_array(stream, allow_pickle=False)
  # numpy stores bfloat16 as two bytes without a type, "V2".
  return array.view(jnp.bfloat16) if array.dtype.kind == "V" else array


def _check_header(stream: IO[bytes], entry: zipfile.ZipInfo) -> None:
  """Raise ValueError unless the header of an array fits the size of its entry.

  Check before reading: numpy allocates as much as the header claims.
  """
  version = np.lib.format.read_magic(stream)
  if version == (1, 0):
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
  elif version == (2, 0):
    shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
  else:
    raise ValueError(f"the .npy format is {version}, expected (1, 0) or (2, 0)")
  if dtype.hasobject or (dtype.kind != "f" and dtype != np.dtype("V2")):
    raise ValueError(f"the dtype is {dtype}, expected a float")
  # An axis of length 0 would let the other axes claim any length.
  if min(shape, default=1) < 1:
    raise ValueError(f"the shape {brief(shape)} has an axis shorter than 1")
  claimed = math.prod(shape) * dtype.itemsize
  data_bytes = entry.file_size - stream.tell()
  if claimed != data_bytes:
    raise ValueError(
      f"the header claims an array {brief(shape)} of {dtype}, which takes "
      f"{claimed:,} bytes, but the entry has {data_bytes:,} bytes"
    )


def _from_open(opened: Any, name: str) -> np.ndarray:
  if (kind := opened.get_slice(name).get_dtype()) not in _FLOATS:
    raise ValueError(f"the dtype is {brief(kind)}, expected a float")
  return np.asarray(opened.get_tensor(name))


def _checked_size(file: Path) -> int:
  """Return the size of a .safetensors file; raise if its header is too long."""
  if not file.is_file():
    raise BackboneError(
      f"{file} is not there, or is not a file: fetch all files of the model."
    )
  size = file.stat().st_size
  with _refusals(str(file)), file.open("rb") as opened:
    begins = opened.read(_LENGTH_BYTES)
  length = int.from_bytes(begins, "little")
  if len(begins) < _LENGTH_BYTES or length > min(
    MAX_HEADER_BYTES, size - _LENGTH_BYTES
  ):
    raise BackboneError(
      f"{file} is no {SAFETENSORS} file, or its end is missing: it claims a "
      f"header of {length:,} bytes, but a header must fit into the file "
      f"({size:,} bytes), and have at most {MAX_HEADER_BYTES:,} bytes."
    )
  return size
