"""`task.json`: the untrusted description of a saved task.

format_version  version of the format, in a directory or in one file
sha256          SHA-256 of all other keys, so that every change is noticed
spec            `TaskSpec`
arrays          shape, type and SHA-256 of every array, by name
provenance      how the task was made, for people
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.errors import TaskError
from memory_vit.kinds import TaskKind
from memory_vit.kinds.task_kind import FITTED
from memory_vit.model import trees
from memory_vit.model.parts import Axes
from memory_vit.model.task import TaskSpec
from memory_vit.runtime import files as json_files
from memory_vit.runtime import messages, schema
from memory_vit.tasks import array_files
from memory_vit.tasks.array_files import StoredArray

FORMAT_VERSION = 2
FILE = "task.json"

# Maximum size of `task.json`, in bytes. For a task with 5,000 classes and a
# result for each class, `task.json` has 1 MB.
MAX_FILE_BYTES = 8 * 2**20
MAX_ARRAYS = 4096
# Maximum size of the arrays of a task, in bytes. For example, a head of 21,843
# classes on H/14 has 112 MB. A task that holds a whole backbone may be as large
# as a file of a backbone (`stored_arrays.MAX_BYTES`).
MAX_BYTES = 2**30
MAX_BACKBONE_BYTES = 32 * 2**30
# Maximum values of integers and image sides in the spec of a task. Tasks need
# far less; without a maximum, products of these numbers could be huge.
MAX_COUNT = 2**24
MAX_SIDE = 4096
_MAX_AXES = 8
_MAX_DEPTH = 32
_MAX_TEXT = 10_000
_MAX_NAME = 200
_MAX_UNIT = 40
# Maximum magnitude of means and standard deviations: within this bound,
# mean + std * output in float64 is finite for every float32 output.
MAX_SCALE = 1e30
_MAX_TEMPERATURE = 1e4
# Bound of all integers in `task.json`. Larger integers could cause errors
# later: Python prints at most 4,300 digits, and a float holds at most 309.
_MAX_NUMBER = 10**100

_KEYS = (
  "format_version", "sha256", "spec", "arrays", "provenance",
)  # fmt: skip
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = r"(?!\.)[A-Za-z0-9._-]{1,100}"
_PATH = re.compile(rf"{_PART}(?:/{_PART}){{0,7}}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The checked content of `task.json`."""

  spec: TaskSpec
  # Names and shapes of arrays are checked against `spec`, not a backbone.
  arrays: Mapping[str, StoredArray]
  provenance: Mapping[str, Any]  # not checked


def to_text(manifest: Manifest, where: str) -> str:
  """Return the text of the `task.json` at `where`; check it as `read` does."""
  # Convert to JSON and back, because `parse` computes the SHA-256 from parsed
  # JSON, in which tuples became lists, and keys became strings.
  values = json.loads(json.dumps(dataclasses.asdict(manifest)))
  values = {"format_version": FORMAT_VERSION, **values}
  signed = {**values, "sha256": digest(values)}
  check(signed, where)
  ordered = {key: signed[key] for key in _KEYS}
  text = json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
  if len(text.encode()) > MAX_FILE_BYTES:
    raise TaskError(f"{where} would have more than {MAX_FILE_BYTES:,} bytes.")
  return text


def digest(values: Mapping[str, Any]) -> str:
  """Return the SHA-256 of `values` without "sha256"; key order is ignored."""
  rest = {key: value for key, value in values.items() if key != "sha256"}
  text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Manifest:
  """Read the manifest of a saved task, a directory or a single file."""
  is_file = array_files.is_single_file(path)
  file = path if is_file else path / FILE
  try:
    if is_file:
      text = array_files.read_task_text(file, MAX_FILE_BYTES)
    else:
      text = array_files.read_file(file, MAX_FILE_BYTES).decode("utf-8")
  except (FileNotFoundError, NotADirectoryError):
    problem = "there is no such file" if is_file else "it has no task.json"
    if path.is_file():
      problem = "it is a file without the ending .safetensors"
    raise TaskError(
      f"{path} is not a task: {problem}. Expected a saved task: a directory, "
      "such as WORKDIR/tasks/NAME, or a .safetensors file."
    ) from None
  except (OSError, UnicodeDecodeError) as error:
    raise _unreadable(str(file), error) from error
  return parse(text, str(file))


def parse(text: str, where: str) -> Manifest:
  """Parse and check the text of a `task.json`; errors begin with `where`."""
  try:
    values = json_files.strict_json(text)
  except (ValueError, RecursionError) as error:
    raise _unreadable(where, error) from error
  return check(values, where)


def _unreadable(where: str, error: Exception) -> TaskError:
  reason = messages.first_line(error)
  return TaskError(f"{where} is not readable as JSON: {reason}")


def check(values: Any, where: str) -> Manifest:
  """Make a `Manifest` from untrusted JSON values; errors begin with `where`."""
  _require_plain(values, where, _MAX_DEPTH)
  _require_version(values, where)
  schema.require_keys(values, _KEYS, where, TaskError)
  described = _with_fitted(values["spec"])
  spec = schema.build(TaskSpec, described, f"{where}: spec", TaskError)
  _require_possible(spec, where)
  arrays = {
    _checked_path(name, f"{where}: arrays"): schema.build(
      StoredArray, described, f"{where}: arrays.{name}", TaskError
    )
    for name, described in _mapping(values, "arrays", where, MAX_ARRAYS).items()
  }
  _require_sizes(arrays, spec, where)
  _require_fit(arrays, spec, where)
  if values["sha256"] != digest(values):
    raise TaskError(
      f"{where} was changed after it was written: its sha256 is "
      f"{messages.brief(values['sha256'])}, expected {digest(values)}."
    )
  provenance = _mapping(values, "provenance", where, MAX_COUNT)
  return Manifest(spec=spec, arrays=arrays, provenance=provenance)


def _with_fitted(spec: Any) -> Any:
  """Return `spec`, with defaults (`FITTED`) for fields that old files lack."""
  if isinstance(spec, dict) and isinstance(spec.get("kind"), dict):
    return {**spec, "kind": {**FITTED, **spec["kind"]}}
  return spec


def _require_plain(value: Any, where: str, depth: int) -> None:
  """Check the depth of a JSON value, its integers and its texts.

  Raise `TaskError` if nesting is too deep, if an integer is too large, or if a
  text is too long or not Unicode.
  """
  if depth == 0:
    raise TaskError(f"{where} is nested more than {_MAX_DEPTH} levels deep.")
  if isinstance(value, int):
    if abs(value) >= _MAX_NUMBER:
      raise TaskError(f"{where} has a number of more than 100 digits.")
  elif isinstance(value, str):
    if len(value) > _MAX_TEXT:
      raise TaskError(
        f"{where} has a text of more than {_MAX_TEXT} characters."
      )
    if any("\ud800" <= character <= "\udfff" for character in value):
      raise TaskError(
        f"{where} has a text that is not Unicode: {messages.brief(value)}."
      )
  elif isinstance(value, list | dict):
    if isinstance(value, dict):
      value = [*value, *value.values()]
    for inner in value:
      _require_plain(inner, where, depth - 1)


def _require_version(values: Any, where: str) -> None:
  version = values.get("format_version") if isinstance(values, dict) else None
  if type(version) is int and version == FORMAT_VERSION:
    return
  if type(version) is int and version > FORMAT_VERSION:
    advice = "It was written by a newer version: update memory_vit."
  else:
    advice = "Train the task again, or use the version that wrote it."
  raise TaskError(
    f"{where} has format_version {messages.brief(version)}, but this version "
    f"of memory_vit reads {FORMAT_VERSION}. {advice}"
  )


def _mapping(
  values: Mapping[str, Any], key: str, where: str, most: int
) -> dict[str, Any]:
  value = values[key]
  if not isinstance(value, dict):
    raise TaskError(
      f"{where}: {key} is {messages.brief(value)}, expected an object."
    )
  if len(value) > most:
    raise TaskError(
      f"{where}: {key} has {len(value)} entries, expected at most {most}."
    )
  return value


def _checked_path(name: str, where: str) -> str:
  """Return `name`; raise `TaskError` unless it is a plain relative path."""
  if not _PATH.fullmatch(name) or len(name) > _MAX_NAME:
    raise TaskError(
      f"{where}: {messages.brief(name)} is not a valid name: expected up to 8 "
      "parts of letters, digits, '.', '_' and '-', separated by '/', and at "
      f"most {_MAX_NAME} characters."
    )
  return name


def _require_sha256(value: Any, where: str) -> None:
  if type(value) is not str or not _SHA256.fullmatch(value):
    raise TaskError(
      f"{where} is {messages.brief(value)}, expected a SHA-256 of 64 digits."
    )


def _require_possible(spec: TaskSpec, where: str) -> None:
  """Raise `TaskError` if `spec` has invalid digests or values out of range."""
  for field in dataclasses.fields(spec):
    value = getattr(spec, field.name)
    if type(value) is int and value > MAX_COUNT:
      raise TaskError(
        f"{where}: spec.{field.name} is {value}, expected at most {MAX_COUNT}."
      )
  sides = (spec.preprocessing.image_size, spec.preprocessing.resize)
  if sides[0] < 1 or sides[1] < 0 or max(sides) > MAX_SIDE:
    raise TaskError(
      f"{where}: spec.preprocessing has (image_size, resize) {sides}, expected "
      "an image_size of at least 1 and a resize of at least 0, both at most "
      f"{MAX_SIDE} pixels."
    )
  _require_kind(spec.kind, f"{where}: spec.kind")
  backbone = f"{where}: spec.backbone"
  _require_sha256(spec.backbone.fingerprint, f"{backbone}.fingerprint")
  if len(spec.backbone.variant) > 100 or len(spec.backbone.gelu) > 100:
    raise TaskError(
      f"{backbone}: variant and gelu may each have at most 100 characters."
    )
  for i, sha256 in enumerate(spec.parent_digests):
    if sha256:  # "" if the digest is unknown
      _require_sha256(sha256, f"{where}: spec.parent_digests[{i}]")


def _require_kind(kind: TaskKind, where: str) -> None:
  """Raise `TaskError` if a number is out of range, or a unit is too long."""
  for name, low, high in (
    ("thresholds", 0, 1),
    ("mean", -MAX_SCALE, MAX_SCALE),
    ("std", 1 / MAX_SCALE, MAX_SCALE),
    ("temperature", 1 / _MAX_TEMPERATURE, _MAX_TEMPERATURE),
    ("unknown", -MAX_SCALE, MAX_SCALE),
  ):
    stated = getattr(kind, name)
    if not isinstance(stated, tuple):
      stated = () if stated is None else (stated,)
    for number in stated:
      if not low <= number <= high:
        raise TaskError(
          f"{where}.{name} has {number:g}, expected {low:g} to {high:g}."
        )
  if any(len(unit) > _MAX_UNIT for unit in kind.units):
    raise TaskError(
      f"{where}.units has a text of more than {_MAX_UNIT} characters."
    )


def _require_sizes(
  arrays: Mapping[str, StoredArray], spec: TaskSpec, where: str
) -> None:
  """Raise `TaskError` for arrays that would take too much memory."""
  claimed = 0
  for name, array in arrays.items():
    if len(array.shape) > _MAX_AXES or min(array.shape, default=0) < 0:
      raise TaskError(
        f"{where}: the shape of {name} is {messages.brief(array.shape)}, "
        f"expected at most {_MAX_AXES} axes, and no negative length."
      )
    _require_sha256(array.sha256, f"{where}: arrays.{name}.sha256")
    # An axis of length 0 counts as 1: otherwise the size would be 0, even if
    # the other axes were huge.
    claimed += 4 * math.prod(max(1, axis) for axis in array.shape)
  holds_backbone = spec.learned.holds_backbone
  most = MAX_BACKBONE_BYTES if holds_backbone else MAX_BYTES
  if claimed > most:
    raise TaskError(
      f"{where}: the arrays would take {messages.brief(claimed)} bytes, "
      f"expected at most {most:,}."
    )


def _require_fit(
  arrays: Mapping[str, StoredArray], spec: TaskSpec, where: str
) -> None:
  """Raise `TaskError` unless arrays match `spec` for some backbone size."""
  # {axis: length}, read from the arrays. The length of an axis stays 0 if no
  # part of the regime has an array with this axis.
  axes = dict.fromkeys(Axes._fields, 0)
  for part in spec.learned.parts:
    for length, name in part.lengths.items():
      shape = arrays[name].shape if name in arrays else ()
      axes[length] = axes[length] or next(iter(shape), 0)
  depth = axes["depth"] or axes["memory"]
  shapes = spec.expected_shapes(axes["width"], depth, axes["summary"])
  expected = trees.flatten(shapes)
  # A task may hold a trained copy of the backbone. Leave out the arrays of this
  # copy: their shapes are checked later, when the original backbone is loaded.
  holds_backbone = spec.learned.holds_backbone
  described = {
    name: array
    for name, array in arrays.items()
    if not (holds_backbone and name.startswith("backbone/"))
  }
  problems = trees.differences(expected, described)
  shapes = {name: array.shape for name, array in expected.items()}
  if min(shape[0] for shape in shapes.values()) < 1:
    problems.append(f"an axis of {shapes} is empty")
  problems += [
    f"dtype of {name}: {messages.brief(array.dtype)}, expected float32"
    for name, array in arrays.items()
    if array.dtype != "float32"
  ]
  if problems:
    raise TaskError(
      f"{where}: the arrays do not match the spec of the task: "
      f"{messages.listed(problems)}."
    )
