"""JSON and text files that are written whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime.messages import brief, shortened

with epy.lazy_imports():
  import jax  # The options are checked without it.


def read_json(path: Path) -> Any:
  """Reads a file that `write_json` wrote.

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
  """`read_json`, of an object that has at least these keys.

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
  """Says which file could not be written, as on a full disk.

  Args:
    path: of the file.
    *errors: what its writer raises then, beside an `OSError`.

  Raises:
    TrainingError: in place of what the operating system, or orbax, raises.
  """
  try:
    yield
  except MemoryVitError:
    raise
  except (OSError, *errors) as error:
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      "What was saved before is as it was. Make room, and give the same "
      "command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Writes a file that is whole or not there, by one process.

  Raises:
    TrainingError: where it cannot be written.
  """
  write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
  """As `write_json`."""
  if jax.process_index() != 0:
    return
  scratch = path.with_name(path.name + ".tmp")
  with writing(path):
    try:
      with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      os.replace(scratch, path)
    finally:
      scratch.unlink(missing_ok=True)
