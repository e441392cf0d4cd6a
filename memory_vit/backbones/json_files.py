"""Read untrusted JSON files that hold one object."""

from pathlib import Path
from typing import Any

from memory_vit.errors import BackboneError
from memory_vit.runtime import files
from memory_vit.runtime.messages import brief, first_line

# Maximum size of a file in bytes. A config.json with the names of 21,843
# classes has 2 MB, and an index of 10,000 arrays is smaller.
MAX_BYTES = 8 * 2**20


def read_object(file: Path) -> dict[str, Any]:
  """Read the object in a file of at most `MAX_BYTES`."""
  if not file.is_file():
    raise BackboneError(f"{file} is not there, or is not a file.")
  if (size := file.stat().st_size) > MAX_BYTES:
    raise BackboneError(
      f"{file} has {size:,} bytes, expected at most {MAX_BYTES:,}."
    )
  try:
    content = file.read_bytes()
  except OSError as error:
    raise BackboneError(
      f"{file} cannot be read: {first_line(error)}"
    ) from error
  return parse_object(content, str(file))


def parse_object(content: bytes, where: str) -> dict[str, Any]:
  """Parse a UTF-8 JSON object with unique keys; the caller limits the size."""
  try:
    values = files.strict_json(content.decode("utf-8"))
  except (ValueError, RecursionError) as error:
    raise BackboneError(
      f"{where} is not readable as JSON: {first_line(error)}"
    ) from error
  if not isinstance(values, dict):
    raise BackboneError(f"{where} holds {brief(values)}, expected an object.")
  return values
