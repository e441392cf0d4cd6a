"""Count the labels of a split, and choose few of its examples by a seed.

The choice depends only on the labels of the split, in order, and on the seed.
So it is the same on every machine, and in every process of a run.
"""

import collections
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from memory_vit.data.data_files import DataFiles
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.data.split_ref import Subset
from memory_vit.errors import DataError
from memory_vit.kinds import KINDS
from memory_vit.runtime import messages

logger = logging.getLogger(__name__)

# Number of records whose labels are read under one common time limit.
_AT_ONCE = 256


def class_counts(split: Split) -> np.ndarray:
  """Count the examples of each class or label, int64 (c,)."""
  return KINDS[split.kind].counts(_readable_labels(split), split.num_classes)


def value_statistics(split: Split) -> tuple[np.ndarray, np.ndarray]:
  """Return mean and standard deviation of each value, float64 (c,)."""
  values = _readable_labels(split)
  return values.mean(axis=0), deviations(values)


def deviations(values: np.ndarray) -> np.ndarray:
  """Return the standard deviation of each column, 0 for constant columns.

  NumPy may give constant columns a deviation, because it rounds the mean.
  """
  return values.std(axis=0) * (values != values[:1]).any(axis=0)


def _readable_labels(split: Split) -> np.ndarray:
  """Return the labels of all readable examples, without decoding images.

  Images that can be read, but not decoded, count as readable.
  """
  if len(split.unreadable) == split.size:
    raise split.nothing_readable()
  if split.labels is not None:  # labels are known, so no file is read
    return np.delete(split.labels, sorted(split.unreadable), axis=0)
  logger.info("reading the labels of %d examples", split.size)
  readable = []
  labels = split.source.labels(range(split.size))
  for index, label in enumerate(split.in_time(labels)):
    if isinstance(label, ExampleError):
      split.mark_unreadable({index: str(label)})
    elif index not in split.unreadable:
      # Check a single label. If it is wrong, the error names example `index`.
      split.check_labels(np.asarray(label)[None], [index].__getitem__)
      readable.append(label)
  if not readable:
    raise split.nothing_readable()
  return np.stack(readable)


def choose(split: Split, subset: Subset) -> Split:
  """Choose examples of a split, except those known to be unreadable."""
  indices = (
    _of_each_class(split, subset) if subset.per_class else _first(split, subset)
  )
  return take(
    split,
    np.sort(indices),
    f"{split.split}, {subset}",
    subset.noted(split.data_files),
  )


def _first(split: Split, subset: Subset) -> list[int]:
  indices = list(itertools.islice(_order(split, subset.seed), subset.first))
  if len(indices) < subset.first:
    raise DataError(
      f"{split}: only {len(indices):,} examples can be read, but "
      f"config.data.first is {subset.first:,}: set a smaller config.data.first."
    )
  return indices


def _of_each_class(split: Split, subset: Subset) -> list[int]:
  indices: list[int] = []
  counts: collections.Counter[int] = collections.Counter()
  missing = split.num_classes * subset.per_class
  for index, label in _labels(split, list(_order(split, subset.seed))):
    if counts[label] < subset.per_class:
      counts[label] += 1
      indices.append(index)
      missing -= 1
    if not missing:
      return indices
  few = [
    f"{messages.brief(name)} has {counts[label]:,}"
    for label, name in enumerate(split.class_names)
    if counts[label] < subset.per_class
  ]
  raise DataError(
    f"{split}: {len(few):,} classes have fewer examples than "
    f"config.data.per_class ({subset.per_class:,}): {messages.name_list(few)}."
  )


def _order(split: Split, seed: int) -> Iterator[int]:
  """Yield all indices but those in `split.unreadable`, shuffled by `seed`."""

  def key(index: int) -> bytes:
    return hashlib.sha256(f"{seed} {index}".encode()).digest()

  for index in sorted(range(split.size), key=key):
    if index not in split.unreadable:
      yield index


def _labels(split: Split, order: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yield (index, label) for each index in `order` that can be read."""
  if split.labels is not None:
    yield from zip(order, split.labels[order].tolist(), strict=True)
    return
  attempts = split.source.labels(order)
  for start in range(0, len(order), _AT_ONCE):
    with split.time_limit(start):
      labels = list(itertools.islice(attempts, _AT_ONCE))
    for index, label in zip(
      order[start : start + _AT_ONCE], labels, strict=True
    ):
      if isinstance(label, ExampleError):
        split.mark_unreadable({index: str(label)})
      else:
        split.check_labels(label[None], [index].__getitem__)
        yield index, int(label)


def take(
  split: Split, indices: np.ndarray, name: str, files: DataFiles
) -> Split:
  """Return the examples at `indices` as a split called `name`."""
  return dataclasses.replace(
    split,
    split=name,
    size=len(indices),
    source=split.source.take(indices),
    file_name=lambda i: split.file_name(int(indices[i])),
    broken={},
    unreadable={},
    labels=None if split.labels is None else split.labels[indices],
    embedded=split.embedded and split.embedded.take(indices),
    data_files=files,
  )
