"""The embeddings of a split, in the order in which their files are read."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from memory_vit.data.split import Split
from memory_vit.model.regimes import get_regime


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class EmbeddedViews:
  """The embeddings that a process keeps; see `fixed_views.FixedViews`.

  Files are read from their beginning to their end, once, and the examples of a
  split are in another order: they are kept as they are read.

  Attributes:
    split: the examples.
    numbers: int64 (n,), the example at every place, in the order of the files.
    places: int64 (n,), of the examples in the order of the split.
    name: of the column: "pooled" for a head, "layers" for a probe.
  """

  split: Split
  numbers: np.ndarray
  places: np.ndarray
  name: str

  @classmethod
  def of(
    cls, split: Split, numbers: np.ndarray, regime: str
  ) -> "EmbeddedViews":
    """The embeddings of some examples, int64 (n,), that a regime reads."""
    embedded = split.embedded
    assert embedded is not None
    order = np.argsort(embedded.rows[numbers], kind="stable")
    name = "layers" if get_regime(regime).has_probe else "pooled"
    return cls(split, numbers[order], np.argsort(order), name)

  def batches(self, starts: range, rows: int) -> Iterator[dict[str, Any]]:
    """Batches of the `rows` places from each of `starts` on, without gaps.

    Returns:
      Iterator over {"inputs": {name: (b, ...), as it is stored}, "label": int32
      (b,), "mask": float32 (b,)}. Behind the last place are zeros, with mask 0.
    """
    source = self.split
    assert source.embedded is not None
    assert source.labels is not None
    origin = source.embedded.origin
    numbers = self.numbers[starts.start : starts.stop]
    values = source.embedded.take(numbers).values(self.name)
    for i in range(len(starts)):
      examples = numbers[i * rows : (i + 1) * rows]
      inputs = np.zeros((rows, *origin.shapes[self.name]), origin.kind)
      label, mask = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
      for row, _ in enumerate(examples):
        inputs[row] = next(values)
      label[: len(examples)] = source.labels[examples]
      mask[: len(examples)] = 1
      yield {"inputs": {self.name: inputs}, "label": label, "mask": mask}
