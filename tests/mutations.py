"""Files as they never should be: ways to damage a task, or an .npz file.

Every case follows from its number. A task is {file: its bytes} here.
"""

import bz2
import copy
import io
import json
import math
import shutil
import warnings
import zipfile
import zlib
from pathlib import Path

import databases
import numpy as np

from memory_vit.tasks import array_files, manifest

Files = dict[str, bytes]

DEEP = "[" * 50_000 + "]" * 50_000

# What JSON may hold in the place of anything.
VALUES = (
  None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**64, 10**30, 1e308, 0.5,
  float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "a\0b", "\ud800",
  "0" * 64, "f" * 64, "x" * 20_000, "memory", "full", "central", "float64",
  "object", [], [1], [32], [32, 3], [2, 2, 32], [10**9, 10**9], [-2, -3], [[]],
  {}, {"a": 1}, {"cls": {}},
  10**400, -(10**4000), [10**4000, 10**4000], 2**63, 1e-320,
  "a\nerror: b", "\u202etac", "a\u2028b\u0085c", "\x1b[2J", "\udcff",
)  # fmt: skip
NAMES = ("", ".", "..", "../x", "/x", "x", "memory", "head/kernel", "cls/cls",
         "a" * 300, "a\0b", "CON", "Ａ", "a\nb", "\u202ea", "a\u2028b",
         "a" * 60_000, "Transformer/encoderblock/x",
         "Transformer/encoderblock_64/x", "Transformer/encoderblock_1/x",
         "Transformer/encoderblock_99999999/x")  # fmt: skip
SHAPES = ((10**12,), (2**62, 4), (-1, -8), (0,), (), (1,) * 70, (10**30,),
          (7,), (2 * 10**9, 0), (10**6, 0), (0, 10**18), (1,) * 30,
          (10**400, 0))  # fmt: skip


KEYS = ("cls/0", "cls/1", "cls", "", "../x", "/etc/passwd", "d/x", "zzz/0",
        "head/bias/.zarray", "a" * 5_000, "é", "_METADATA",
        "manifest.ocdbt")  # fmt: skip
CODECS = (
  None, {"id": "zlib", "level": 1}, {"id": "bz2", "level": 9},
  {"id": "gzip", "level": 1}, {"id": "zstd", "level": 22}, {"id": "zstd"},
  {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}, {}, [], "zstd",
)  # fmt: skip


def read_files(root: Path) -> Files:
  return {
    file.relative_to(root).as_posix(): file.read_bytes()
    for file in sorted(root.rglob("*"))
    if file.is_file()
  }


def write_files(root: Path, files: Files) -> None:
  """Replaces a directory."""
  shutil.rmtree(root, ignore_errors=True)
  for name, content in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
  """Bytes with a flipped bit, cut, grown, or with a part gone or moved."""
  data = bytearray(content)
  i, j = sorted(rng.integers(0, len(data) + 1, 2))
  match rng.integers(0, 7):
    case 0 | 1 if data:
      data[rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
    case 2:
      del data[i:]
    case 3:
      del data[i:j]
    case 4:
      data[i:i] = rng.bytes(rng.integers(1, 100))
    case 5:
      data[i:j] = bytes(j - i)
    case _:
      data += data[i:j] or b"\n"
  return bytes(data)


def damaged_task(files: Files, other: Files, rng: np.random.Generator) -> Files:
  """A task as rot, a bad copy or a hand may leave it; nothing is signed."""
  files = dict(files)
  names = sorted(files)
  a, b = rng.choice(names, 2)
  match rng.integers(0, 10):
    case 0 | 1 | 2:
      files[a] = damaged(files[a], rng)
    case 3:
      files["task.json"] = damaged(files["task.json"], rng)
    case 4:
      del files[a]
    case 5:
      files[a], files[b] = files[b], files[a]
    case 6:
      files[f"{a}.new" if rng.random() < 0.5 else f"more/{a}"] = files[b]
    case 7:  # of another task
      files[a] = other.get(a) or other[rng.choice(sorted(other))]
    case _:
      values = json.loads(files["task.json"])
      change_json(values, rng)
      files["task.json"] = to_json(values)
  return files


def forged_task(files: Files, rng: np.random.Generator) -> Files:
  """A task that somebody changed who can compute digests."""
  files = dict(files)
  values = json.loads(files["task.json"])
  if rng.random() < 0.3:
    name = rng.choice(sorted(values["files"]))
    content = damaged(files[f"arrays/{name}"], rng)
    files[f"arrays/{name}"] = content
    values["files"][name] = array_files.sha256(content)
  else:
    for _ in range(rng.integers(1, 4)):
      change_json(values, rng)
  values["sha256"] = manifest.digest(values)
  files["task.json"] = to_json(values)
  return files


def forged_database(files: Files, rng: np.random.Generator) -> Files:
  """A signed task whose database is by somebody who knows the format."""
  arrays = json.loads(files["task.json"])["arrays"]
  values = databases.values_of(files)
  name = rng.choice(sorted(arrays))
  shape = arrays[name]["shape"]
  about, chunk = f"{name}/.zarray", databases.chunk_key(name, shape)
  method = rng.integers(0, 2)
  match rng.integers(0, 12):
    case 0:  # what metadata says
      described = json.loads(values[about])
      change_json(described, rng)
      values[about] = _compact(described)
    case 1:  # how deep it is
      key = rng.choice(["shape", "fill_value", "compressor", "filters", "x"])
      described = {**json.loads(values[about]), key: "DEEP"}
      text = _compact(described).decode().replace('"DEEP"', DEEP)
      values[about] = (text if rng.random() < 0.7 else DEEP).encode()
    case 2:  # chunks that are not there, or are many
      if rng.random() < 0.5:
        del values[chunk]
      else:
        zeros = [0] * len(shape)
        many = {f"{name}/{'.'.join(map(str, [*zeros[1:], i]))}": b"\0" * 4
                for i in range(rng.integers(1, 3_000))}  # fmt: skip
        ones = [1] * len(shape)
        values |= {**many, about: databases.metadata(shape, chunks=ones)}
    case 3 | 4:  # packed, as it was once, or in other ways
      packed = databases.packed(values[chunk])
      codec = databases.ZSTD_CODEC
      if rng.random() < 0.5:
        packed = _packed_otherwise(values[chunk], packed, rng)
      if rng.random() < 0.3:
        codec = CODECS[rng.integers(0, len(CODECS))]
      values |= {chunk: packed, about: databases.metadata(shape, codec)}
    case 5:  # a task that claims to be larger, in all that is written
      return _claiming(files, values, rng)
    case 6:  # keys
      other = KEYS[rng.integers(0, len(KEYS))]
      key = rng.choice(sorted(values))
      values[other] = values.pop(key) if rng.random() < 0.5 else values[key]
    case 7 | 8:  # bytes of the node, before they are packed
      content = databases.body(values)
      for _ in range(rng.integers(1, 4)):
        content = damaged(content, rng)
      return databases.with_leaf(files, databases.leaf(content, method))
    case 9:  # parts of the node that tell how much there is
      return databases.with_leaf(files, _lying_leaf(values, method, rng))
    case 10:  # envelope
      content = bytearray(databases.leaf(databases.body(values), method))
      for _ in range(rng.integers(1, 3)):
        content[rng.integers(0, 40)] = rng.integers(0, 256)
      return databases.with_leaf(files, bytes(content))
    case _:  # values in other files, and anywhere in them
      return _elsewhere(files, values, rng)
  content = databases.leaf(databases.body(values), method)
  return databases.with_leaf(files, content)


def _compact(values) -> bytes:
  return json.dumps(values, separators=(",", ":")).encode()


def _packed_otherwise(
  chunk: bytes, packed: bytes, rng: np.random.Generator
) -> bytes:
  match rng.integers(0, 6):
    case 0:
      return databases.packed(bytes(2 ** int(rng.integers(10, 27))))
    case 1:
      return packed * int(rng.integers(2, 50))
    case 2:  # the header of the frame
      i = rng.integers(4, 10)
      return packed[:i] + rng.bytes(2) + packed[i + 2 :]
    case 3:
      return damaged(packed, rng)
    case 4:
      return zlib.compress(chunk) if rng.random() < 0.5 else bz2.compress(chunk)
    case _:  # in two frames, which is right
      return databases.packed(chunk[:4]) + databases.packed(chunk[4:])


def _claiming(files: Files, values: Files, rng: np.random.Generator) -> Files:
  task = json.loads(files["task.json"])
  classes = int(2 ** rng.integers(2, 25))
  task["spec"] |= {"num_classes": classes, "class_names": []}
  width = task["arrays"]["head/kernel"]["shape"][0]
  for name, shape in (("head/kernel", [width, classes]),
                      ("head/bias", [classes])):  # fmt: skip
    size = 4 * math.prod(shape)
    chunk = databases.chunk_key(name, shape)
    described = {"shape": shape, "dtype": "float32", "sha256": "0" * 64}
    codec = databases.ZSTD_CODEC if rng.random() < 0.6 else None
    if size <= 2**25:
      zeros = np.zeros(shape, np.float32)
      described = databases.declared(zeros)
      content = zeros.tobytes()
    else:
      content = bytes(2**20)
    if rng.random() < 0.3:
      content = content[: rng.integers(0, 100)]
    values[chunk] = databases.packed(content) if codec else content
    chunks = [1] * len(shape) if rng.random() < 0.2 else shape
    values[f"{name}/.zarray"] = databases.metadata(shape, codec, chunks=chunks)
    if rng.random() < 0.2:
      del values[chunk]
    task["arrays"][name] = described
  content = databases.leaf(databases.body(values), int(rng.integers(0, 2)))
  return databases.signed(
    databases.with_leaf(files, content), spec=task["spec"],
    arrays=task["arrays"],
  )  # fmt: skip


def _lying_leaf(values: Files, method: int, rng: np.random.Generator) -> bytes:
  keys = [key.encode() for key in sorted(values)]
  huge = databases.number(int(2 ** int(rng.integers(8, 70))))
  lengths = databases.numbers([len(values[key.decode()]) for key in keys])
  contents = b"".join(values[key.decode()] for key in keys)
  good = databases.keys_of(keys)
  start = b"\0\0"
  match rng.integers(0, 8):
    case 0:
      content = bytes([rng.integers(1, 256)]) + databases.body(values)[1:]
    case 1:
      content = b"\0" + huge + good
    case 2:
      content = start + huge + good[1:]
    case 3:
      count, length = int(rng.integers(8, 9_000)), int(rng.integers(1, 65_000))
      content = start + databases.keys_that_unfold(count, length)
    case 4:
      content = start + good + lengths.replace(lengths[:1], huge, 1)
    case 5:
      kinds = rng.bytes(len(keys))
      content = start + good + lengths + kinds + contents
    case 6:
      content = bytes(2 ** int(rng.integers(10, 27)))
    case _:
      twice = databases.keys_of([keys[0], *keys[:-1]])
      content = start + twice + lengths + bytes(len(keys)) + contents
  return databases.leaf(content, method)


def _elsewhere(files: Files, values: Files, rng: np.random.Generator) -> Files:
  content, places = b"", {}
  for key in sorted(values):
    places[key] = (len(content), len(values[key]))
    content += values[key]
  if rng.random() < 0.6:
    key = rng.choice(sorted(places))
    offset, length = places[key]
    places[key] = [
      (int(2 ** int(rng.integers(0, 63))), length), (0, len(content)),
      (offset + 1, length), (offset, length - 1),
      (offset, int(2 ** int(rng.integers(0, 63)))),
    ][rng.integers(0, 5)]  # fmt: skip
  path = "values" if rng.random() < 0.7 else KEYS[rng.integers(0, len(KEYS))]
  node = databases.leaf(databases.body_in_file(places, path))
  return databases.with_leaf({**files, "arrays/values": content}, node)


def to_json(values) -> bytes:
  return json.dumps(values).encode()


def change_json(values, rng: np.random.Generator) -> None:
  """Changes something in nested lists and dictionaries, anywhere."""
  holders = list(_holders(values))
  holder = holders[rng.integers(0, len(holders))]
  keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
  value = copy.deepcopy(VALUES[rng.integers(0, len(VALUES))])
  if not keys or rng.random() < 0.15:
    if isinstance(holder, dict):
      holder[NAMES[rng.integers(0, len(NAMES))]] = value
    else:
      holder.append(value)
    return
  key = keys[rng.integers(0, len(keys))]
  match rng.integers(0, 4):
    case 0:
      del holder[key]
    case 1 if isinstance(holder, dict):
      holder[NAMES[rng.integers(0, len(NAMES))]] = holder.pop(key)
    case 2 if len(keys) > 1:
      holder[key] = copy.deepcopy(holder[keys[rng.integers(0, len(keys))]])
    case _:
      holder[key] = value


def _holders(values):
  if isinstance(values, dict | list):
    yield values
    for inner in values.values() if isinstance(values, dict) else values:
      yield from _holders(inner)


def rewritten_npz(content: bytes, rng: np.random.Generator) -> bytes:
  """An archive with valid checksums of which one entry is not what it was."""
  with zipfile.ZipFile(io.BytesIO(content)) as archive:
    entries = [[e.filename, archive.read(e)] for e in archive.infolist()]
  i = rng.integers(0, len(entries))
  name, data = entries[i]
  # Magic, version, length and text of the header, of 128 bytes.
  header, values = bytearray(data[:128]), data[128:]
  match rng.integers(0, 11):
    case 8:  # arrays of no values, blocks without number, and their names
      added = NAMES[rng.integers(0, len(NAMES))]
      shape = SHAPES[rng.integers(0, len(SHAPES))]
      entries.append([f"{added}.npy", _npy_header(shape, "<f4")])
    case 9:
      names = ("", "/x", "_x/x")[rng.integers(3)]
      entries += [
        [f"Transformer/encoderblock_{k}{names}.npy", _npy_header((1,), "<f4")
         + bytes(4)]
        for k in range(1, rng.integers(2, 200))
      ]  # fmt: skip
    case 10:  # more than float32 holds
      wide = np.frombuffer(values, "<f4").astype("<f8")
      wide[rng.integers(len(wide))] = (1e300, 1e39, -1e308, 1e-320, 0.1)[
        rng.integers(5)
      ]
      shape = np.lib.format.read_array(io.BytesIO(data)).shape
      entries[i][1] = _npy_header(shape, "<f8") + wide.tobytes()
    case 5 | 6:  # another backbone, which is no damage
      k = rng.integers(128, len(data))
      entries[i][1] = data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :]
    case 0:
      header[rng.integers(0, 80)] ^= 1 << rng.integers(0, 8)
      entries[i][1] = bytes(header) + values
    case 1:
      shape = SHAPES[rng.integers(0, len(SHAPES))]
      entries[i][1] = _npy_header(shape, "<f4") + values
    case 2:
      kind = ("|O", "<i4", "<f8", "|V2", "<c8", "|V0", "|b1")[
        rng.integers(0, 7)
      ]
      entries[i][1] = _npy_header((len(values) // 4,), kind) + values
    case 3:
      entries[i][0] = f"{NAMES[rng.integers(0, len(NAMES))]}.npy"
    case 4:
      entries[i][1] = damaged(data[:128], rng) + values
    case _:
      entries.append([f"more{rng.integers(9)}.npy", data])
  out = io.BytesIO()
  with (
    warnings.catch_warnings(action="ignore"),  # of names that are there twice
    zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
  ):
    for name, data in entries:
      archive.writestr(name, data)
  return out.getvalue()


def damaged_model(files: Files, rng: np.random.Generator) -> Files:
  """A model in several files, with something wrong in one of them."""
  files = dict(files)
  name = rng.choice(sorted(files))
  if name.endswith(".json") and rng.random() < 0.7:
    values = json.loads(files[name])
    for _ in range(rng.integers(1, 3)):
      change_json(values, rng)
    files[name] = to_json(values)
    return files
  match rng.integers(0, 6):
    case 0:
      del files[name]
    case 1:
      other = rng.choice(sorted(files))
      files[name], files[other] = files[other], files[name]
    case 2 | 3 if name.endswith(".safetensors"):
      files[name] = _with_header(files[name], rng)
    case _:
      files[name] = damaged(files[name], rng)
  return files


def _with_header(content: bytes, rng: np.random.Generator) -> bytes:
  """A file of safetensors whose header says something else."""
  length = int.from_bytes(content[:8], "little")
  values = json.loads(content[8 : 8 + length])
  change_json(values, rng)
  header = to_json(values)
  if rng.random() < 0.2:
    header = header.replace(b"F32", (b"F64", b"I32", b"BF16")[rng.integers(3)])
  return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _npy_header(shape, descr) -> bytes:
  out = io.BytesIO()
  header = {"descr": descr, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(out, header)
  return out.getvalue()
