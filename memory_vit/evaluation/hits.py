"""Which examples of a split a task gets right, one bit each, in a small file.

Two tasks that were tested on the same examples can then be compared example by
example: the error of a paired difference is far below that of two accuracies.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from memory_vit.errors import ConfigError
from memory_vit.runtime import files
from memory_vit.runtime.messages import brief

HITS = "hits.json"


@dataclasses.dataclass(frozen=True)
class Hits:
  """Of the examples of a split, in order.

  Attributes:
    right: whether the best of the outputs is the class of the example.
    counted: whether it could be read; where not, `right` is False.
  """

  right: Bool[np.ndarray, " n"]
  counted: Bool[np.ndarray, " n"]


def write_hits(directory: Path, hits: Mapping[str, Hits]) -> None:
  """Write the hits of a run's trials, {name: hits}, on process 0 alone.

  Raises:
    TrainingError: where the file cannot be written.
  """
  values = {
    name: {
      "examples": len(found.right),
      "right": np.packbits(found.right).tobytes().hex(),
      "counted": np.packbits(found.counted).tobytes().hex(),
    }
    for name, found in hits.items()
  }
  files.write_json(directory / HITS, values)


def read_hits(directory: Path) -> dict[str, Hits] | None:
  """Read what `write_hits` wrote; None where it wrote nothing.

  Raises:
    ConfigError: where the file holds something else.
  """
  file = directory / HITS
  if not file.exists():
    return None
  values = files.read_object(file)
  return {name: _parse(file, name, value) for name, value in values.items()}


def _parse(file: Path, name: str, value: Any) -> Hits:
  """Read the hits of a trial."""
  try:
    examples = int(value["examples"])
    right = _bits(value["right"], examples)
    counted = _bits(value["counted"], examples)
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{file}: {brief(name)} has no hits that can be read ({error}). Move the "
      "run away to make it again."
    ) from error
  return Hits(right, counted)


def _bits(text: str, count: int) -> Bool[np.ndarray, " n"]:
  """Unpack so many bits.

  Raises:
    ValueError: for text of another length, or that is not hexadecimal.
  """
  packed = np.frombuffer(bytes.fromhex(text), np.uint8)
  if count < 0 or len(packed) != -(-count // 8):
    raise ValueError(f"{len(packed)} bytes do not hold {count} bits")
  return np.unpackbits(packed, count=count).astype(bool)
