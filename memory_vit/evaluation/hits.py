"""Correctly classified examples of a split, and paired differences of tasks.

An accuracy on 3,600 images has a standard error of 0.8 points. The error of the
difference of two tasks is half of it if most images are right or wrong in both.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from memory_vit.errors import ConfigError
from memory_vit.runtime import files
from memory_vit.runtime.messages import brief

HITS = "hits.json"
# A difference is clear if it exceeds this number of standard errors. If regimes
# are equally good and have many seeds, at most 5 % of their differences are
# clear by chance. This share can be larger if there are only three seeds.
_ERRORS = 2.0


@dataclasses.dataclass(frozen=True)
class Hits:
  """Hits of the examples of a split, in order.

  Attributes:
    right: whether the predicted class is the label of the example.
    counted: whether the example could be read; if not, `right` is False.
  """

  right: Bool[np.ndarray, " n"]
  counted: Bool[np.ndarray, " n"]


def write_hits(directory: Path, hits: Mapping[str, Hits]) -> None:
  """Write the hits of trials, one bit per example; call on process 0 only."""
  values = {
    name: {
      "examples": len(trial.right),
      "right": np.packbits(trial.right).tobytes().hex(),
      "counted": np.packbits(trial.counted).tobytes().hex(),
    }
    for name, trial in hits.items()
  }
  files.write_json(directory / HITS, values)


def read_hits(directory: Path) -> dict[str, Hits] | None:
  """Read the hits of a run's trials; None if there is no file of hits.

  Raises:
    ConfigError: if the file is invalid.
  """
  file = directory / HITS
  if not file.exists():
    return None
  values = files.read_object(file)
  return {name: _parse(file, name, value) for name, value in values.items()}


def _parse(file: Path, name: str, value: Any) -> Hits:
  try:
    examples = int(value["examples"])
    right = _bits(value["right"], examples)
    counted = _bits(value["counted"], examples)
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{file}: the hits of {brief(name)} cannot be read ({error}). Move the "
      "directory of the run away, and start the run again."
    ) from error
  return Hits(right, counted)


def _bits(text: str, count: int) -> Bool[np.ndarray, " n"]:
  packed = np.frombuffer(bytes.fromhex(text), np.uint8)
  if count < 0 or len(packed) != -(-count // 8):
    raise ValueError(f"{len(packed)} bytes do not hold exactly {count} bits")
  return np.unpackbits(packed, count=count).astype(bool)


@dataclasses.dataclass(frozen=True)
class PairedDifference:
  """A mean difference of accuracies, in [-1, 1], and its standard errors.

  Attributes:
    difference: mean over all seeds and examples.
    over_images: standard error over examples, each averaged over seeds.
    over_seeds: standard error over seeds, each averaged over examples; None for
      a single seed.
    seeds: the number of seeds.
  """

  difference: float
  over_images: float
  over_seeds: float | None
  seeds: int

  @property
  def is_clear(self) -> bool | None:
    """Whether `difference` exceeds two standard errors; None for one seed.

    The two errors are added in quadrature. Both contain the interaction of
    seeds and examples, so the sum is too large rather than too small.
    """
    if self.over_seeds is None:
      return None
    error = math.hypot(self.over_images, self.over_seeds)
    return abs(self.difference) > _ERRORS * error


def paired_difference(
  first: Sequence[Hits], second: Sequence[Hits]
) -> PairedDifference | None:
  """Compare the hits of two regimes on a split, seed by seed.

  Args:
    first: hits of the first regime for every seed, in the order of `second`.
    second: hits of the second regime, whose accuracy is subtracted.

  Returns:
    The difference over the examples that count for all seeds of both regimes;
    None without seeds or examples.

  Raises:
    ValueError: if the numbers of seeds or examples differ.
  """
  sizes = {len(hits.right) for hits in (*first, *second)}
  if len(first) != len(second) or len(sizes) > 1:
    raise ValueError(
      f"two results with {len(first)} and {len(second)} seeds, on splits of "
      f"{sorted(sizes)} examples, cannot be compared: expected the same number "
      "of seeds in both, and splits of the same size"
    )
  if not first:
    return None
  counted = np.all([hits.counted for hits in (*first, *second)], axis=0)
  if not counted.any():
    return None
  gains = np.stack([hits.right[counted] for hits in first]).astype(float)
  gains -= np.stack([hits.right[counted] for hits in second])
  seeds = len(gains)
  return PairedDifference(
    difference=float(gains.mean()),
    over_images=_standard_error(gains.mean(0)),
    over_seeds=_standard_error(gains.mean(1)) if seeds > 1 else None,
    seeds=seeds,
  )


def _standard_error(values: Float64[np.ndarray, " n"]) -> float:
  """Return the standard error of the mean; 0 for a single value."""
  if len(values) < 2:
    return 0.0
  return float(values.std(ddof=1) / math.sqrt(len(values)))
