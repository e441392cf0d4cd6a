"""Read every example of a split, and say what is wrong with it."""

import array
import collections
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from memory_vit.data import image_ops, sources
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.reader import Reader
from memory_vit.images.view import LONGEST_ASPECT

_ORIENTATION = 0x0112  # of EXIF

# What is wrong with an example; what is odd does not keep it from being used.
UNREADABLE = "cannot be read"
WRONG_LABEL = "label is no class"
LINE = "one pixel wide or high"
LONG = f"more than {LONGEST_ASPECT:.0f} times as long as wide"


_IntegerArray = functools.partial(array.array, "Q")  # uint64


@dataclasses.dataclass(frozen=True)
class ExampleProblem:
  """A problem, of one of the kinds above, with the example `where` names."""

  kind: str
  index: int
  where: str
  detail: str


@dataclasses.dataclass(eq=False)  # it holds arrays
class SplitAudit:
  """The contents of a split, and what is wrong with it.

  Attributes:
    reader: of the split.
    per_class: int (num_classes,), readable examples of each class.
    labels: the least and the greatest; None where none can be read.
    kinds: {kind of image, such as "JPEG RGB": how many}.
    turned: images with an orientation in EXIF, which is not applied.
    smallest: width and height of the image with the fewest pixels; None where
      no image can be read.
    largest: the same, with the most.
    problems: in order.
    hashes: uint64, of the files of all examples that can be read.
    indices: of these examples.
  """

  reader: Reader
  per_class: np.ndarray
  labels: tuple[int, int] | None = None
  kinds: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  turned: int = 0
  smallest: tuple[int, int] | None = None
  largest: tuple[int, int] | None = None
  problems: list[ExampleProblem] = dataclasses.field(default_factory=list)
  hashes: "array.array[int]" = dataclasses.field(default_factory=_IntegerArray)
  indices: "array.array[int]" = dataclasses.field(default_factory=_IntegerArray)

  def add(self, index: int, example: Any) -> None:
    """Count an example, or what reading it has raised."""
    if isinstance(example, tf.errors.OpError):
      # A record that could not be had stands in memory as an empty image.
      known = self.reader.unreadable.get(index)
      self._note(UNREADABLE, index, known or sources.reason_of(example))
      return
    self.hashes.append(int(example["hash"]))
    self.indices.append(index)
    self.kinds[example["kind"].decode()] += 1
    self.turned += bool(example["turned"])
    self._add_label(index, int(example["label"]))
    self._add_size(index, *map(int, example["size"]))

  def _add_label(self, index: int, label: int) -> None:
    least, greatest = self.labels or (label, label)
    self.labels = min(least, label), max(greatest, label)
    classes = len(self.per_class)
    if 0 <= label < classes:
      self.per_class[label] += 1
    else:
      self._note(WRONG_LABEL, index, f"{label}, expected 0 to {classes - 1}")

  def _add_size(self, index: int, width: int, height: int) -> None:
    size = (width, height)
    self.smallest = min(self.smallest or size, size, key=np.prod)
    self.largest = max(self.largest or size, size, key=np.prod)
    if min(size) == 1:
      self._note(LINE, index, f"{width} x {height}")
    elif max(size) > LONGEST_ASPECT * min(size):
      self._note(LONG, index, f"{width} x {height}")

  def _note(self, kind: str, index: int, detail: str) -> None:
    where = self.reader.source.describe(index)
    self.problems.append(ExampleProblem(kind, index, where, detail))


def audit_split(
  reader: Reader, count: Callable[[], None] = lambda: None
) -> SplitAudit:
  """Read and decode all images of a split; `count` is called after each."""
  audit = SplitAudit(reader, np.zeros(reader.num_classes, np.int64))
  for index, example in enumerate(_examples(reader)):
    audit.add(index, example)
    count()
  return audit


def shared(first: SplitAudit, second: SplitAudit) -> list[tuple[int, int]]:
  """Pairs of examples of two splits whose files have the same bytes.

  Of several equal ones in a split, the first is named. Two files that differ
  have the same hash once in 10^19 pairs.
  """
  _, a, b = np.intersect1d(first.hashes, second.hashes, return_indices=True)
  return sorted(
    (first.indices[i], second.indices[j]) for i, j in zip(a, b, strict=True)
  )


def repeated(audit: SplitAudit) -> int:
  """Count the examples of a split with the same bytes as one before them."""
  return len(audit.hashes) - len(np.unique(audit.hashes))


def _examples(reader: Reader) -> Iterator[Any]:
  """Yield what is known of each example, or what reading it has raised."""
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

  return reader.each(look)


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
