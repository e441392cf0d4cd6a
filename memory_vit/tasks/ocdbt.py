"""Read untrusted OCDBT databases, in which orbax keeps arrays.

Tensorstore, which writes them, trusts what it reads. A key is stored as its
difference from the one before, so a node of 600 bytes can unfold to a gigabyte
of keys; nodes can be used again and again, so a small tree can have any number
of them. For the arrays of a task tensorstore writes one leaf with all keys.
Only that is read here, and every key is known before. The manifest that leads
to the leaf, and files that orbax needed only for writing, are not read.

The format is https://google.github.io/tensorstore/kvstore/ocdbt:

  leaf        magic, length, version, compression; then, packed, the rest:
              height, table of files, keys, lengths and kinds of values, where
              those are that lie in files, and the others; CRC
  number      as in protocol buffers, seven bits in a byte, the lowest first
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memory_vit.runtime.messages import brief
from memory_vit.tasks import zstd

# Where the leaf is. What is in other directories are values.
_NODES = "d/"
_MAGIC = b"\x0c\xdb\x20\xde"
_CRC_BYTES = 4
_VERSION = 0
_PLAIN, _ZSTD = 0, 1
_INLINE, _IN_FILE = 0, 1
# Of the unpacked leaf: keys, metadata and small values have less for a key.
_NODE_BYTES = 2**16
_NODE_BYTES_PER_KEY = 2**12


def read(
  files: Mapping[str, bytes], keys: Iterable[str]
) -> dict[str, memoryview]:
  """Read a database that has exactly these keys.

  Args:
    files: {path below the directory of the database: content}.
    keys: all of them.

  Returns:
    {key: value, as a view of the file that holds it}.

  Raises:
    ValueError: where it is damaged, has other keys, or is not what orbax writes
      for as many.
  """
  expected = sorted(key.encode() for key in keys)
  leaf = _Reader(_unpacked_leaf(files, len(expected)))
  if leaf.take(1)[0]:
    raise ValueError("its database has a tree of nodes, expected one leaf")
  places = _file_table(leaf, files)
  _require_keys(leaf, expected)
  lengths = leaf.numbers(len(expected))
  kinds = list(leaf.take(len(expected)))
  if not set(kinds) <= {_INLINE, _IN_FILE}:
    raise ValueError("its database has values of an unknown kind")
  in_files = kinds.count(_IN_FILE)
  numbers, offsets = leaf.numbers(in_files), leaf.numbers(in_files)
  if max(numbers, default=-1) >= len(places):
    raise ValueError("its database has values in a file that is not in it")
  where = zip(numbers, offsets, strict=True)
  values = {}
  for key, kind, length in zip(expected, kinds, lengths, strict=True):
    if kind == _INLINE:
      values[key.decode()] = leaf.take(length)
    else:
      number, offset = next(where)
      file = _Reader(files[places[number]])
      file.take(offset)
      values[key.decode()] = file.take(length)
  leaf.require_end()
  return values


class _Reader:
  """A reader of bytes that raises ValueError where they end."""

  def __init__(self, data: bytes | memoryview) -> None:
    self._data, self._at = memoryview(data), 0

  def take(self, length: int) -> memoryview:
    """Take the next `length` bytes."""
    end = self._at + length
    if end > len(self._data):
      raise ValueError("its database ends too early")
    taken = self._data[self._at : end]
    self._at = end
    return taken

  def number(self) -> int:
    """Take the next number, of at most 64 bits."""
    value = 0
    for shift in range(0, 64, 7):
      byte = self.take(1)[0]
      value |= (byte & 0x7F) << shift
      if byte < 0x80:
        return value
    raise ValueError("its database has a number of more than 64 bits")

  def numbers(self, count: int) -> list[int]:
    """Take the next `count` numbers."""
    return [self.number() for _ in range(count)]

  def strings(self, shared: list[int], own: list[int]) -> Iterator[bytes]:
    """Take strings: how much each shares with the one before, and its rest."""
    string = b""
    for prefix, suffix in zip(shared, own, strict=True):
      if prefix > len(string):
        raise ValueError("its database has a key that begins as none before")
      string = string[:prefix] + bytes(self.take(suffix))
      yield string

  def require_end(self) -> None:
    """Raise ValueError where anything is left."""
    if self._at != len(self._data):
      raise ValueError("its database has more in it than its values")


def _unpacked_leaf(files: Mapping[str, bytes], keys: int) -> bytes | memoryview:
  """The content of the only node, decompressed."""
  nodes = [name for name in files if name.startswith(_NODES)]
  if len(nodes) != 1:
    raise ValueError(
      f"its database has {len(nodes)} files of nodes, {brief(nodes)}, expected "
      f"one in {_NODES}"
    )
  content = files[nodes[0]]
  node = _Reader(content)
  magic, length = bytes(node.take(4)), int.from_bytes(node.take(8), "little")
  if magic != _MAGIC or length != len(content):
    raise ValueError(f"{nodes[0]} is no node of such a database, or not whole")
  version, method = node.numbers(2)
  if version != _VERSION or method not in (_PLAIN, _ZSTD):
    raise ValueError(
      f"{nodes[0]} is of version {version}, packed by method {method}, "
      f"expected {_VERSION}, and {_PLAIN} or {_ZSTD}"
    )
  # The SHA-256 of the file is known: the CRC at its end says nothing more.
  packed = node.take(max(0, length - 14 - _CRC_BYTES))
  if method == _PLAIN:
    return packed
  return zstd.unpack(packed, _NODE_BYTES + _NODE_BYTES_PER_KEY * keys)


def _file_table(leaf: _Reader, files: Mapping[str, bytes]) -> list[str]:
  """The files in which values lie, by their numbers."""
  count = leaf.number()
  if count > len(files):
    raise ValueError(f"its database lies in {count} files, not {len(files)}")
  shared = [0, *leaf.numbers(count - 1)] if count else []
  own = leaf.numbers(count)
  leaf.numbers(count)  # how much of each is a directory
  found = []
  # Compared one by one, no name is longer than a known one and the leaf.
  for name in leaf.strings(shared, own):
    found.append(name.decode())
    if found[-1] not in files:
      raise ValueError(f"its database has no file {brief(found[-1])}")
  return found


def _require_keys(leaf: _Reader, expected: Sequence[bytes]) -> None:
  """Raise ValueError unless these are all keys of a leaf."""
  count = leaf.number()
  if count != len(expected):
    raise ValueError(
      f"its database has {count} keys, expected {len(expected)}: .zarray and "
      "one chunk for every array"
    )
  shared, own = [0, *leaf.numbers(count - 1)], leaf.numbers(count)
  # Compared one by one, no key is longer than a known one and the leaf.
  for found, key in zip(leaf.strings(shared, own), expected, strict=True):
    if found != key:
      raise ValueError(
        f"its database has the key {brief(found)}, expected {brief(key)}"
      )
