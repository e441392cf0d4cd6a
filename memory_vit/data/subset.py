"""Few examples of a training split, chosen by a seed.

Which ones follows from the labels of the split in its order, and from the seed:
it is the same on every machine, and in every process of a run.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from memory_vit.data import sources
from memory_vit.data.data_files import DataFiles
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.reader import Reader
from memory_vit.data.sources import Source
from memory_vit.data.split_ref import Subset
from memory_vit.errors import DataError
from memory_vit.runtime import messages

# Records whose labels are waited for together.
_AT_ONCE = 256


def choose(reader: Reader, subset: Subset) -> Source:
  """Choose examples of a split; those known to be unreadable are none of them.

  Labels that the source does not know beforehand are read, until there are
  enough: of records on disk, all bytes of those that are looked at.

  Raises:
    DataError: where a class, or the split, has fewer than asked for.
    BrokenDataError: where more of them than may be cannot be read.
  """
  indices = (
    _of_each_class(reader, subset)
    if subset.per_class
    else _first(reader, subset)
  )
  source = reader.source
  return take(
    source,
    np.sort(indices),
    f"{source.split}, {subset}",
    subset.noted(source.inventory),
  )


def _first(reader: Reader, subset: Subset) -> list[int]:
  """As many indices as are asked for, of whatever class."""
  found = list(itertools.islice(_order(reader, subset.seed), subset.first))
  if len(found) < subset.first:
    raise DataError(
      f"{reader.source} has {len(found):,} examples that can be read; "
      f"config.data.first is {subset.first:,}, expected at most that."
    )
  return found


def _of_each_class(reader: Reader, subset: Subset) -> list[int]:
  """The indices of as many examples of each class as are asked for."""
  found: list[int] = []
  counts: collections.Counter[int] = collections.Counter()
  missing = reader.num_classes * subset.per_class
  for index, label in _labels(reader, list(_order(reader, subset.seed))):
    if counts[label] < subset.per_class:
      counts[label] += 1
      found.append(index)
      missing -= 1
    if not missing:
      return found
  few = [
    f"{messages.brief(name)} has {counts[label]:,}"
    for label, name in enumerate(reader.class_names)
    if counts[label] < subset.per_class
  ]
  raise DataError(
    f"{reader.source}: {len(few):,} classes have fewer examples than "
    f"config.data.per_class, {subset.per_class:,}: {messages.name_list(few)}."
  )


def _order(reader: Reader, seed: int) -> Iterator[int]:
  """The indices that can be read, as far as is known, in the seed's order."""

  def key(index: int) -> bytes:
    return hashlib.sha256(f"{seed} {index}".encode()).digest()

  for index in sorted(range(reader.size), key=key):
    if index not in reader.unreadable:
      yield index


def _labels(reader: Reader, order: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yield (index, label) of examples in this order, but for unreadable ones."""
  source = reader.source
  if source.labels is not None:
    yield from zip(order, source.labels[order].tolist(), strict=True)
    return
  dataset = tf.data.Dataset.from_tensor_slices(np.array(order, np.int64))
  attempts = sources.attempts(dataset, lambda index: source.fetch(index)[1])
  for start in range(0, len(order), _AT_ONCE):
    with reader.time_limit(start):
      labels = list(itertools.islice(attempts, _AT_ONCE))
    for index, label in zip(
      order[start : start + _AT_ONCE], labels, strict=True
    ):
      if isinstance(label, tf.errors.OpError):
        reader.mark_unreadable({index: sources.reason_of(label)})
      else:
        source.check_labels(label[None], [index].__getitem__)
        yield index, int(label)


def take(
  source: Source, indices: np.ndarray, split: str, inventory: DataFiles
) -> Source:
  """The examples of some indices as a source; all of its files are noted."""
  chosen = tf.constant(indices, tf.int64)
  return dataclasses.replace(
    source,
    split=split,
    size=len(indices),
    fetch=lambda i: source.fetch(tf.gather(chosen, i)),
    file_name=lambda i: source.file_name(int(indices[i])),
    unreadable={},
    labels=None if source.labels is None else source.labels[indices],
    embedded=source.embedded and source.embedded.take(indices),
    inventory=inventory,
  )
