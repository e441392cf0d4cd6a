"""Files and directories that are written whole or not at all.

They survive a power cut: a file is synced to the disk before it is renamed, and
its new name after.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime.messages import brief, shortened

with epy.lazy_imports():
  import jax  # The options are checked without it.

# As `tempfile.mkdtemp` ends a name.
_SCRATCH = re.compile(r"\.(?P<name>.+)-[a-z0-9_]{8}")


def read_json(path: Path) -> Any:
  """Read a file that `write_json` wrote.

  Raises:
    ConfigError: where it is not readable.
  """
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} is not readable ({error}). Give another --workdir, or put back "
      "what was there."
    ) from error


def read_object(path: Path, *keys: str) -> Mapping[str, Any]:
  """Read a JSON object that has at least these keys.

  Raises:
    ConfigError: where it is not readable, or something else.
  """
  values = read_json(path)
  if not isinstance(values, Mapping) or not values.keys() >= {*keys}:
    raise ConfigError(
      f"{path} holds {brief(values)}, expected an object with {list(keys)}. "
      "Give another --workdir, or put back what was there."
    )
  return values


@contextlib.contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
  """Raise a `TrainingError` that names the file where it cannot be written.

  In place of an `OSError`, as on a full disk, or of `errors` of its writer.
  """
  refused: tuple[type[Exception], ...] = (OSError, *errors)
  try:
    yield
  except MemoryVitError:
    raise
  except refused as error:
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      "What was saved before is as it was. Make room, and give the same "
      "command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Write a JSON file atomically, on process 0 alone.

  Raises:
    TrainingError: where it cannot be written.
  """
  write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
  """Write a text file as `write_json` does."""
  if jax.process_index() != 0:
    return
  # Always the same name: what a killed process left is written over.
  part = path.with_name(path.name + ".tmp")
  with writing(path), replacing(path, part):
    part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
  """Yield a file to write, and move it to `path` once all went well.

  Args:
    path: of the file that is made or replaced, in an existing directory.
    part: the name to write under, in the same directory; by default one that no
      other process has.
  """
  part = part or path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
  try:
    yield part
    sync(part)
    part.replace(path)
    sync(path.parent)
  finally:
    part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
  """Yield a name for a directory, which takes the place of `path` as a whole.

  What lies at `path`, in an existing directory, is moved out of the way until
  the new one is in its place. If the process is killed in between, `tidy` puts
  it back.
  """
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  new, old = scratch / "new", scratch / "old"
  try:
    yield new
    sync_tree(new)
    if path.exists():
      path.rename(old)
    try:
      new.rename(path)
    except OSError:
      if old.exists():
        old.rename(path)
      raise
    sync(path.parent)
  finally:
    shutil.rmtree(scratch)


def tidy(directory: Path) -> None:
  """Remove what a killed `replacing_directory` left in a directory.

  What had been moved out of the way is put back. Nobody else may write there
  now. No link is followed, and nothing else is touched.
  """
  for scratch in directory.glob(".*-????????"):
    found = _SCRATCH.fullmatch(scratch.name)
    if not found or scratch.is_symlink() or not scratch.is_dir():
      continue
    if {path.name for path in scratch.iterdir()} <= {"new", "old"}:
      old, place = scratch / "old", directory / found["name"]
      if old.exists() and not place.exists():
        old.rename(place)
      shutil.rmtree(scratch)


def sync(path: Path) -> None:
  """Wait until a file, or the names in a directory, survive a power cut."""
  opened = os.open(path, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def sync_tree(directory: Path) -> None:
  """Wait until all that lies in a directory survives a power cut."""
  for folder, _, names in os.walk(directory):
    for name in names:
      sync(Path(folder) / name)
    sync(Path(folder))
