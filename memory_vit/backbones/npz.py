"""Read untrusted .npz files.

Nothing is unpickled. Sizes are checked before memory is taken: what the archive
claims against caps and its own length, what the header of an array claims
against the bytes of its entry. The checksums of the archive are verified.
"""

import contextlib
import math
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax.numpy as jnp
import numpy as np

from memory_vit.backbones import published
from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief, first_line

# Of all entries, unpacked. The largest published ViT has 7 GB in float32.
MAX_BYTES = 16 * 2**30
# Unpacked over packed, of the whole file: weights hardly shrink, but a head
# that is still zero does, a thousandfold.
MAX_RATIO = 100
# A training state with two moments of H/14 has less than 2,000.
MAX_ENTRIES = 10_000

# A name becomes a key, never a path; one that could be a path is no name. It is
# shown, too: so it is short and plain.
_PART = r"(?!\.\.?(?:/|$))(?:(?![/\\:])[ -~])+"
_NAME = re.compile(rf"(?!.{{201}}){_PART}(?:/{_PART})*")
_SUFFIX = ".npy"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
  """The arrays of an open .npz file, whose outer form has been checked.

  Attributes:
    names: of the entries, without ".npy".
  """

  def __init__(self, archive: zipfile.ZipFile, file: Path) -> None:
    self._archive = archive
    self._file = file
    entries = archive.infolist()
    _check_entries(entries, file)
    self.names = tuple(
      e.filename.removesuffix(_SUFFIX)
      for e in entries
      if e.filename != published.ENTRY
    )
    self._has_note = len(self.names) < len(entries)

  def note(self) -> published.Note | None:
    """Read what the file says of itself, where it does.

    Raises:
      BackboneError: where that is damaged, or not possible.
    """
    if not self._has_note:
      return None
    where = f"{self._file}: entry {published.ENTRY}"
    with _refusals(where):
      content = self._archive.read(published.ENTRY)
    return published.parse(content, where)

  def read(self, name: str) -> np.ndarray:
    """Read one array, a float of any width; `name` is one of `names`.

    What numpy stored as two bytes without a meaning is bfloat16.

    Raises:
      BackboneError: where it is damaged, no float, or not finite.
    """
    entry = self._archive.getinfo(name + _SUFFIX)
    # The header of Python 2 makes numpy warn; nothing here has one.
    with _refusals(f"{self._file}: entry {name!r}"), warnings.catch_warnings():
      warnings.simplefilter("error")
      with self._archive.open(entry) as stream:
        _check_header(stream, entry)
      with self._archive.open(entry) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
    if array.dtype.kind == "V":
      array = array.view(jnp.bfloat16)
    if not np.isfinite(array).all():
      raise BackboneError(
        f"{self._file}: entry {name!r} has values that are not finite."
      )
    return array


@contextlib.contextmanager
def open_npz(file: Path) -> Iterator[Archive]:
  """Open a local .npz file.

  Raises:
    BackboneError: where it is none, is damaged, or is larger inside than its
      length or `MAX_BYTES` allow; or its names are there twice, or are paths.
  """
  if not zipfile.is_zipfile(file):
    raise BackboneError(
      f"{file} is no .npz file, or its end is missing: fetch it again."
    )
  with contextlib.ExitStack() as stack:
    with _refusals(str(file)):
      archive = stack.enter_context(zipfile.ZipFile(file))
    yield Archive(archive, file)


def require_whole(file: Path) -> None:
  """Raise `BackboneError` unless every entry has its CRC-32.

  The arrays themselves are not checked: see `Archive.read`.
  """
  with open_npz(file), _refusals(str(file)), zipfile.ZipFile(file) as archive:
    if damaged := archive.testzip():
      raise ValueError(f"entry {damaged!r} is damaged")


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
  """Raise a `BackboneError` for what the libraries raise.

  On damaged and hostile files that is nearly every type: of zipfile and zlib,
  SyntaxError of a header, RuntimeError of encryption, MemoryError.
  """
  try:
    yield
  except Exception as error:
    raise BackboneError(
      f"{what} cannot be read: {first_line(error)}"
    ) from error


def _check_entries(entries: list[zipfile.ZipInfo], file: Path) -> None:
  """Refuse an archive by its table of contents."""
  if len(entries) > MAX_ENTRIES:
    raise BackboneError(
      f"{file} has {len(entries)} entries, expected at most {MAX_ENTRIES}."
    )
  seen = set()
  for entry in entries:
    # `orig_filename` still has what zipfile cuts off or replaces.
    name = entry.orig_filename
    is_note = name == published.ENTRY
    if is_note and entry.file_size > published.MAX_BYTES:
      raise BackboneError(
        f"{file}: entry {name} has {entry.file_size:,} bytes, expected at most "
        f"{published.MAX_BYTES:,}."
      )
    if not is_note and not name.endswith(_SUFFIX):
      raise BackboneError(
        f"{file}: entry {brief(name)} is no array (NAME.npy)."
      )
    if not is_note and not _NAME.fullmatch(name.removesuffix(_SUFFIX)):
      raise BackboneError(
        f"{file}: entry {brief(name)} is no name of an array: expected at most "
        "200 characters of ASCII, parts separated by '/', without '..', '\\', "
        "':' and control characters."
      )
    if name in seen:
      raise BackboneError(f"{file} has two entries of the same name: {name}.")
    seen.add(name)
    if entry.compress_type not in _METHODS:
      raise BackboneError(
        f"{file}: entry {name!r} is compressed by method "
        f"{entry.compress_type}, expected one of {list(_METHODS)} (stored, "
        "deflated)."
      )
  claimed, packed = sum(e.file_size for e in entries), file.stat().st_size
  if claimed > min(MAX_BYTES, MAX_RATIO * packed):
    raise BackboneError(
      f"{file} would be {claimed:,} bytes unpacked, from {packed:,}: expected "
      f"at most {MAX_BYTES:,}, and {MAX_RATIO} times as many."
    )


def _check_header(stream: IO[bytes], entry: zipfile.ZipInfo) -> None:
  """Raise ValueError unless the header of an array fits its entry.

  Before the array is read: the memory for it is taken by the header alone.
  """
  version = np.lib.format.read_magic(stream)
  if version == (1, 0):
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
  elif version == (2, 0):
    shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
  else:
    raise ValueError(f"format {version} is not that of numbers")
  # bfloat16 is stored as two bytes without a meaning.
  if dtype.hasobject or (dtype.kind != "f" and dtype != np.dtype("V2")):
    raise ValueError(f"it is {dtype}, expected a float")
  # An empty axis would hide how long the others are: nothing weighs them.
  if min(shape, default=1) < 1:
    raise ValueError(f"its shape is {brief(shape)}: it has no values")
  claimed = math.prod(shape) * dtype.itemsize
  data_bytes = entry.file_size - stream.tell()
  if claimed != data_bytes:
    raise ValueError(
      f"its header says {brief(shape)} of {dtype}, {claimed:,} bytes, "
      f"and there are {data_bytes:,}"
    )
