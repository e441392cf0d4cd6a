"""Files as they never should be: ways to damage a task, or an .npz file.

Every case follows from its number. A task is {file: its bytes} here.
"""

import copy
import io
import json
import math
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import safetensors.numpy

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


TASK, ARRAYS = "task.json", "arrays.safetensors"


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


def signed(files: Files, **changed) -> Files:
  """Makes the digest of task.json fit, as whoever changed it can."""
  values = {**json.loads(files[TASK]), **changed}
  values["sha256"] = manifest.digest(values)
  return {**files, TASK: to_json(values)}


def forged_task(files: Files, rng: np.random.Generator) -> Files:
  """A task that somebody changed who can compute digests."""
  values = json.loads(files[TASK])
  if rng.random() < 0.3:
    changed = _with_header if rng.random() < 0.5 else _written_otherwise
    files = {**files, ARRAYS: changed(files[ARRAYS], rng)}
  else:
    for _ in range(rng.integers(1, 4)):
      change_json(values, rng)
  values["sha256"] = manifest.digest(values)
  return {**files, TASK: to_json(values)}


def split(content: bytes) -> tuple[dict, bytes]:
  """The header of a file of safetensors, and its values."""
  length = int.from_bytes(content[:8], "little")
  return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: bytes, values: bytes) -> bytes:
  """A file of safetensors; the inverse of `split`."""
  return len(header).to_bytes(8, "little") + header + values


def forged_arrays(files: Files, rng: np.random.Generator) -> Files:
  """A signed task whose arrays are by somebody who knows the format."""
  header, values = split(files[ARRAYS])
  name, other = rng.choice(sorted(header), 2)
  match rng.integers(0, 10):
    case 0 | 1:  # what the header says
      content = _with_header(files[ARRAYS], rng)
    case 2:  # how deep it is
      text = json.dumps({**header, name: "DEEP"}).replace('"DEEP"', DEEP)
      content = joined((text if rng.random() < 0.7 else DEEP).encode(), values)
    case 3:  # how long it is
      length = int(2 ** int(rng.integers(0, 64))) - int(rng.integers(0, 2))
      content = length.to_bytes(8, "little") + files[ARRAYS][8:]
    case 4 | 5:  # written otherwise, which is right
      content = _written_otherwise(files[ARRAYS], rng)
    case 6:  # arrays that share their bytes
      shared = {**header, name: {**header[name], "data_offsets":
                header[other]["data_offsets"]}}  # fmt: skip
      content = joined(to_json(shared), values)
    case 7:  # bytes that nobody declares
      content = files[ARRAYS] + rng.bytes(rng.integers(1, 99))
    case _:  # a task that claims to be larger, in all that is written
      return _claiming(files, rng)
  return {**files, ARRAYS: content}


def _written_otherwise(content: bytes, rng: np.random.Generator) -> bytes:
  """The same arrays, under a header in another order and with more in it."""
  header, values = split(content)
  names = [*header, "__metadata__"]
  header["__metadata__"] = {"a": "b" * int(rng.integers(0, 999))}
  ordered = {names[i]: header[names[i]] for i in rng.permutation(len(names))}
  text = json.dumps(ordered, indent=int(rng.integers(0, 9)))
  return joined(text.encode(), values)


def _claiming(files: Files, rng: np.random.Generator) -> Files:
  task = json.loads(files[TASK])
  classes = int(2 ** rng.integers(2, 25))
  task["spec"] |= {"num_classes": classes, "class_names": []}
  arrays = safetensors.numpy.load(files[ARRAYS])
  width = task["arrays"]["head/kernel"]["shape"][0]
  for name, shape in (("head/kernel", (width, classes)),
                      ("head/bias", (classes,))):  # fmt: skip
    described = {"shape": shape, "dtype": "float32", "sha256": "0" * 64}
    if 4 * math.prod(shape) <= 2**25:
      arrays[name] = np.zeros(shape, np.float32)
      described = declared(arrays[name])
    task["arrays"][name] = described
  content = safetensors.numpy.save(arrays)
  if rng.random() < 0.3:
    content = content[: rng.integers(0, len(content))]
  files = {**files, ARRAYS: content}
  return signed(files, spec=task["spec"], arrays=task["arrays"])


def declared(array: np.ndarray) -> dict:
  """What task.json says of an array."""
  described = array_files.describe(array)
  return {
    "shape": list(array.shape), "dtype": described.dtype,
    "sha256": described.sha256,
  }  # fmt: skip


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
  values, rest = split(content)
  change_json(values, rng)
  header = to_json(values)
  if rng.random() < 0.2:
    header = header.replace(b"F32", (b"F64", b"I32", b"BF16")[rng.integers(3)])
  return joined(header, rest)


def _npy_header(shape, descr) -> bytes:
  out = io.BytesIO()
  header = {"descr": descr, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(out, header)
  return out.getvalue()
