"""Reads every example of a split, and says what is wrong with it."""

import array
import collections
import dataclasses
import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from memory_vit.data import image_ops, sources
from memory_vit.data.reader import Reader
from memory_vit.data.sources import Source

_ORIENTATION = 0x0112  # of EXIF
# Images that are waited for together: what keeps the time costs a thread.
_AT_ONCE = 64
# From so many times as many images of a class as of another on, accuracy says
# little of the smaller one. Work on imbalanced data begins there: Cui et al.
# and Cao et al. (2019) measure at 10 to 200.
IMBALANCED = 10.0

# What is wrong with an example; what is odd does not keep it from being used.
UNREADABLE = "cannot be read"
WRONG_LABEL = "label is no class"
LINE = "one pixel wide or high"
LONG = f"more than {image_ops.LONGEST_ASPECT:.0f} times as long as wide"


@dataclasses.dataclass(frozen=True)
class Problem:
  """An example that is not as it should be.

  Attributes:
    kind: one of the constants above.
    index: of the example.
    where: the example in words, with its file.
    detail: more on it.
  """

  kind: str
  index: int
  where: str
  detail: str


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class SplitAudit:
  """The contents of a split, and what is wrong with it.

  Attributes:
    source: the split.
    per_class: int (num_classes,), readable examples of each class.
    labels: the least and the greatest; None where none can be read.
    kinds: {kind of image, such as "JPEG RGB": how many}.
    turned: images with an orientation in EXIF, which is not applied.
    smallest: width and height of the image with the fewest pixels; None where
      no image can be read.
    largest: the same, with the most.
    problems: in order.
    hashes: uint64 (n,), of the files of all examples that can be read.
    indices: int (n,), of these examples.
  """

  source: Source
  per_class: np.ndarray
  labels: tuple[int, int] | None
  kinds: Mapping[str, int]
  turned: int
  smallest: tuple[int, int] | None
  largest: tuple[int, int] | None
  problems: tuple[Problem, ...]
  hashes: np.ndarray
  indices: np.ndarray


def audit_split(
  reader: Reader, progress: Callable[[Iterable], Iterable] = iter
) -> SplitAudit:
  """Reads and decodes all images of a split, without keeping them.

  Args:
    reader: of the split.
    progress: is handed the examples, to show how far it is.
  """
  auditor = _Auditor(reader)
  for index, example in enumerate(progress(_examples(reader))):
    auditor.add(index, example)
  return auditor.finish()


@dataclasses.dataclass(frozen=True)
class Balance:
  """The numbers of images of the classes that have some.

  Attributes:
    fewest: the class with the fewest, and how many.
    most: the same, with the most.
    ratio: how many times as many that is.
    share: of the largest class, of all images.
  """

  fewest: tuple[str, int]
  most: tuple[str, int]
  ratio: float
  share: float

  @property
  def is_imbalanced(self) -> bool:
    """Whether accuracy alone would mislead."""
    return self.ratio >= IMBALANCED


def balance(audit: SplitAudit) -> Balance | None:
  """The sizes of the classes; None where no image can be read."""
  counts = {
    name: int(count)
    for name, count in zip(
      audit.source.class_names, audit.per_class, strict=True
    )
    if count
  }
  if not counts:
    return None
  fewest = min(counts.items(), key=lambda item: item[1])
  most = max(counts.items(), key=lambda item: item[1])
  share = most[1] / sum(counts.values())
  return Balance(fewest, most, most[1] / fewest[1], share)


def shared(first: SplitAudit, second: SplitAudit) -> list[tuple[int, int]]:
  """Pairs of examples of two splits whose files have the same bytes.

  Of several equal ones in a split, the first is named. Two files that differ
  have the same hash once in 10^19 pairs.
  """
  _, a, b = np.intersect1d(first.hashes, second.hashes, return_indices=True)
  pairs = zip(first.indices[a], second.indices[b], strict=True)
  return sorted((int(i), int(j)) for i, j in pairs)


def repeated(audit: SplitAudit) -> int:
  """Counts the examples of a split with the same bytes as one before them."""
  return len(audit.hashes) - len(np.unique(audit.hashes))


def _examples(reader: Reader) -> Iterator[Any]:
  """Yields what is known of each example, or what reading it has raised.

  Ends the process where none comes for `reader.stall_timeout`.
  """
  source = reader.source

  def look(index: tf.Tensor) -> dict[str, tf.Tensor]:
    encoded, label = source.fetch(index)
    hashed, kind, turned = tf.numpy_function(
      _look, [encoded], [tf.uint64, tf.string, tf.bool]
    )
    # Whole, which a crop in training need not be.
    shape = tf.shape(image_ops.decode(encoded))
    return {
      "hash": hashed, "kind": kind, "turned": turned,
      "size": (shape[1], shape[0]), "label": label,
    }  # fmt: skip

  dataset = (
    tf.data.Dataset.range(source.size)
    .map(look, num_parallel_calls=os.cpu_count(), deterministic=True)
    .with_options(sources.without_autotuning())
  )
  examples = sources.attempts(dataset, source.size)
  for first in range(0, source.size, _AT_ONCE):
    with reader.time_limit(first):
      some = list(itertools.islice(examples, _AT_ONCE))
    yield from some


def _look(encoded: bytes) -> tuple[np.uint64, bytes, bool]:
  """Hash of a file, kind of image, and whether EXIF wants it turned."""
  hashed = hashlib.blake2b(encoded, digest_size=8).digest()
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      kind = f"{image.format} {image.mode}"
      turned = image.getexif().get(_ORIENTATION, 1) != 1
  # Pillow raises many kinds; what TensorFlow decodes can be used all the same.
  except Exception:
    kind, turned = "unknown to Pillow", False
  return np.frombuffer(hashed, np.uint64)[0], kind.encode(), turned


class _Auditor:
  """Counts the examples of a split, one after the other."""

  def __init__(self, reader: Reader) -> None:
    self._reader = reader
    self._per_class = np.zeros(reader.num_classes, np.int64)
    self._labels = None
    self._kinds = collections.Counter()
    self._turned = 0
    self._smallest = self._largest = None
    self._problems: list[Problem] = []
    self._hashes = array.array("Q")
    self._indices = array.array("Q")

  def add(self, index: int, example: Any) -> None:
    """Counts an example, or what reading it has raised."""
    if isinstance(example, tf.errors.OpError):
      # A record that could not be had stands in memory as an empty image.
      known = self._reader.unreadable.get(index)
      self._note(UNREADABLE, index, known or sources.reason_of(example))
      return
    self._hashes.append(int(example["hash"]))
    self._indices.append(index)
    self._kinds[example["kind"].decode()] += 1
    self._turned += bool(example["turned"])
    self._add_label(index, int(example["label"]))
    self._add_size(index, *map(int, example["size"]))

  def finish(self) -> SplitAudit:
    """Returns all that was counted."""
    return SplitAudit(
      self._reader.source,
      self._per_class,
      self._labels,
      dict(self._kinds.most_common()),
      self._turned,
      self._smallest,
      self._largest,
      tuple(self._problems),
      np.array(self._hashes, np.uint64),
      np.array(self._indices, np.int64),
    )

  def _add_label(self, index: int, label: int) -> None:
    least, greatest = self._labels or (label, label)
    self._labels = min(least, label), max(greatest, label)
    if 0 <= label < self._reader.num_classes:
      self._per_class[label] += 1
    else:
      last = self._reader.num_classes - 1
      self._note(WRONG_LABEL, index, f"{label}, expected 0 to {last}")

  def _add_size(self, index: int, width: int, height: int) -> None:
    size = (width, height)
    self._smallest = min(self._smallest or size, size, key=np.prod)
    self._largest = max(self._largest or size, size, key=np.prod)
    if min(size) == 1:
      self._note(LINE, index, f"{width} x {height}")
    elif max(size) > image_ops.LONGEST_ASPECT * min(size):
      self._note(LONG, index, f"{width} x {height}")

  def _note(self, kind: str, index: int, detail: str) -> None:
    where = self._reader.source.describe(index)
    self._problems.append(Problem(kind, index, where, detail))
