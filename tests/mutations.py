"""Files as they never should be: ways to damage a task, or an .npz file.

Every case follows from its number. A task is {file: its bytes} here.
"""

import copy
import io
import json
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np

from memory_vit import array_files, manifest

Files = dict[str, bytes]

# What JSON may hold in the place of anything.
VALUES = (
  None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**64, 10**30, 1e308, 0.5,
  float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "a\0b", "\ud800",
  "0" * 64, "f" * 64, "x" * 20_000, "memory", "full", "central", "float64",
  "object", [], [1], [32], [32, 3], [2, 2, 32], [10**9, 10**9], [-2, -3], [[]],
  {}, {"a": 1}, {"cls": {}},
)  # fmt: skip
NAMES = ("", ".", "..", "../x", "/x", "x", "memory", "head/kernel", "cls/cls",
         "a" * 300, "a\0b", "CON", "Ａ")  # fmt: skip
SHAPES = ((10**12,), (2**62, 4), (-1, -8), (0,), (), (1,) * 70, (10**30,),
          (7,))  # fmt: skip


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
  match rng.integers(0, 8):
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


def _npy_header(shape, descr) -> bytes:
  out = io.BytesIO()
  header = {"descr": descr, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(out, header)
  return out.getvalue()
