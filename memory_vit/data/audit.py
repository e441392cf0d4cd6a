"""Read every example of the splits of a configuration, and report problems."""

import array
import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from memory_vit.config import EMBEDDINGS, Config
from memory_vit.data import (
  datasets,
  image_ops,
  numpy_ops,
  oriented,
  string_ops,
  subset,
)
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef, configured_splits
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.images.view import LONGEST_ASPECT
from memory_vit.kinds import KINDS
from memory_vit.runtime import messages
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

# The audit reports imbalance if the largest class has at least `IMBALANCED`
# times as many images as the smallest class: accuracy then says little about
# small classes. Cui et al. and Cao et al. (2019) study ratios from 10 to 200.
IMBALANCED = 10.0

# Splits of the task's data set, which must not share files with each other.
_OF_THE_TASK = ("train", "validation", "test")

_STATISTICS = ("min", "mean", "max", "std")

_IntegerArray = functools.partial(array.array, "Q")  # uint64


@dataclasses.dataclass(eq=False)  # == is ambiguous for arrays
class _Contents:
  """The contents of a split, and the problems that the audit found in it.

  Attributes:
    split: the split.
    labels: the valid labels of readable examples.
    extremes: smallest and largest class index; None if no class was read.
    kinds: {kind of image, such as "JPEG RGB": number of images}.
    turned: number of images whose EXIF orientation says to turn them.
    smallest: (width, height) with the fewest pixels; None if no image was read.
    largest: (width, height) with the most pixels; None if no image was read.
    problems: one dictionary for each problem, with the keys "kind", "where" and
      "detail", and with "index" if an example has the problem.
    hashes: uint64 hash of the file of each readable example.
    indices: index of each readable example, in the order of `hashes`.
  """

  split: Split
  labels: list[np.ndarray] = dataclasses.field(default_factory=list)
  extremes: tuple[int, int] | None = None
  kinds: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  turned: int = 0
  smallest: tuple[int, int] | None = None
  largest: tuple[int, int] | None = None
  problems: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  hashes: "array.array[int]" = dataclasses.field(default_factory=_IntegerArray)
  indices: "array.array[int]" = dataclasses.field(default_factory=_IntegerArray)

  def add(self, index: int, example: Any) -> None:
    """Count an example, or note the error that was raised when reading it."""
    if isinstance(example, ExampleError):
      # The source holds an empty image for each record that could not be read
      # into memory when the split was opened. For such a record, `example` says
      # only that the empty image cannot be decoded, so report the reason in
      # `unreadable` instead.
      known = self.split.unreadable.get(index)
      self._note("cannot be read", index, known or str(example))
      return
    image, label = example
    self.hashes.append(int(image["hash"]))
    self.indices.append(index)
    self.kinds[image["kind"].decode()] += 1
    self.turned += bool(image["turned"])
    self._add_label(index, np.asarray(label))
    self._add_size(index, *map(int, image["size"]))

  def _add_label(self, index: int, label: np.ndarray) -> None:
    kind, number = KINDS[self.split.kind], label.tolist()
    if kind.one_is_right:
      least, greatest = self.extremes or (number, number)
      self.extremes = min(least, number), max(greatest, number)
    right, expected = kind.check(label[None], self.split.num_classes)
    if right.all():
      self.labels.append(label)
    else:
      detail = f"{messages.brief(number)}, expected {expected}"
      self._note(kind.wrong_target, index, detail)

  def _add_size(self, index: int, width: int, height: int) -> None:
    size = (width, height)
    self.smallest = min(self.smallest or size, size, key=np.prod)
    self.largest = max(self.largest or size, size, key=np.prod)
    if min(size) == 1:
      self._note("one pixel wide or high", index, f"{width} x {height}")
    elif max(size) > LONGEST_ASPECT * min(size):
      kind = f"more than {LONGEST_ASPECT:.0f} times as long as wide"
      self._note(kind, index, f"{width} x {height}")

  def _note(self, kind: str, index: int, detail: str) -> None:
    where = self.split.describe(index)
    self.problems.append(
      {"kind": kind, "index": index, "where": where, "detail": detail}
    )


def audit_data(config: Config, splits: Sequence[str] = ()) -> dict[str, Any]:
  """Audit the configured splits, or the given splits of the same data set.

  Returns:
    A JSON value: {"splits": contents and problems of each split, "duplicates":
    files that two splits share, "clean": whether there is no problem}.
  """
  entries, contents = [], {}
  for role, ref in splits_to_audit(config, splits).items():
    logger.info("%s: %s, split %s", role, ref.name, ref.split)
    entry = {"role": role, "data": ref.name, "split": ref.split}
    try:
      audited = _read(role, ref)
    except BrokenDataError as error:
      problem = {"kind": "cannot be opened", "where": str(error), "detail": ""}
      entries.append({**entry, "examples": 0, "problems": [problem]})
      continue
    entries.append({**entry, **_as_json(audited, all_classes=not entries)})
    if splits or role in _OF_THE_TASK:
      contents[role] = audited
  duplicates = _duplicates(contents)
  return {
    "splits": entries,
    "duplicates": duplicates,
    "clean": not any(entry["problems"] for entry in entries)
    and not any(duplicate["count"] for duplicate in duplicates),
  }


def splits_to_audit(
  config: Config, splits: Sequence[str]
) -> dict[str, SplitRef]:
  """Return {role: split}: `splits`, or by default the configured splits."""
  if not config.data.name:
    raise ConfigError("config.data.name is empty: name a data set.")
  refs = configured_splits(config)
  if any(ref.name == EMBEDDINGS for ref in refs.values()):
    raise ConfigError(
      f"config.data.name is {EMBEDDINGS!r}, but only images can be checked: "
      "name the data set that was embedded."
    )
  return {
    split: dataclasses.replace(refs["train"], split=split) for split in splits
  } or refs


def _read(role: str, ref: SplitRef) -> _Contents:
  """Decode all images of a split; return what the audit found in it."""
  # Allow any number of unreadable examples, because the audit reports them.
  ref = dataclasses.replace(ref, max_bad=sys.maxsize)
  opened = datasets.open_whole(ref)
  split = datasets.read_as(ref, dataclasses.replace(opened, faults=()))
  contents = _Contents(split)
  for fault in opened.faults:
    contents.problems.append({"kind": "refused", "where": fault, "detail": ""})
  with ProgressBar(role, split.size) as bar:
    examples = split.source.examples(_Examined(), range(split.size))
    for index, example in enumerate(split.in_time(examples)):
      contents.add(index, example)
      bar.update()
  return contents


@dataclasses.dataclass(frozen=True)
class _Examined:
  """`Preparation` for the audit: it returns facts about an image, no pixels."""

  def in_graph(
    self, encoded: tf.Tensor, uniforms: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    orientation, file = string_ops.split(encoded)
    hashed, kind = tf.numpy_function(
      _examine_file, [file], [tf.uint64, tf.string]
    )
    # Decode the whole image to find every fault: a training crop decodes only a
    # part of a JPEG.
    shape = tf.shape(image_ops.decode(encoded))
    return {
      "hash": hashed, "kind": kind, "turned": orientation > 1,
      "size": (shape[1], shape[0]),
    }  # fmt: skip

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> dict[str, Any]:
    orientation, file = oriented.split(encoded)
    hashed, kind = _examine_file(file)
    height, width = numpy_ops.decode(encoded).shape[:2]
    return {
      "hash": hashed, "kind": kind, "turned": orientation > 1,
      "size": (width, height),
    }  # fmt: skip


def _examine_file(encoded: bytes) -> tuple[np.uint64, bytes]:
  """Return (hash of a file, kind of its image, such as b"JPEG RGB")."""
  hashed = hashlib.blake2b(encoded, digest_size=8).digest()
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      kind = f"{image.format} {image.mode}"
  # Ignore errors of any type here, because the caller decodes the image next:
  # if the image is really broken, decoding raises.
  except Exception:
    kind = "unknown to Pillow"
  return np.frombuffer(hashed, np.uint64)[0], kind.encode()


def _as_json(contents: _Contents, *, all_classes: bool) -> dict[str, Any]:
  """Return the contents and problems of a split as a JSON value.

  If `all_classes`, it is also a problem if a class has no image, if a value is
  constant, or if the split has only one class.
  """
  split = contents.split
  labels = np.array(contents.labels, split.label_dtype.base)
  labels = labels.reshape(-1, *split.label_dtype.shape)
  per_class, values = _per_class(split, labels), _values(split, labels)
  problems = list(contents.problems)
  if all_classes:
    wrong = [
      (f"{KINDS[split.kind].noun} without an image", name, "")
      for name, count in per_class.items()
      if not count
    ]
    wrong += [
      ("constant value", name, f"{value['mean']:g}")
      for name, value in values.items()
      if not value["std"]
    ]
    if detail := split.single_class():
      wrong.append(("a single class", repr(split.class_names[0]), detail))
    keys = ("kind", "where", "detail")
    problems += [dict(zip(keys, row, strict=True)) for row in wrong]
  return {
    "examples": split.size,
    "kind": split.kind,
    "classes": split.num_classes,
    "labels": contents.extremes,
    "per_class": per_class,
    "values": values,
    "balance": _balance(per_class, len(labels)),
    "kinds": dict(contents.kinds.most_common()),
    "turned": contents.turned,
    "smallest": contents.smallest,
    "largest": contents.largest,
    "repeated": len(contents.hashes) - len(np.unique(contents.hashes)),
    "skipped": split.skipped,
    "columns": split.columns,
    "problems": problems,
  }


def _per_class(split: Split, labels: np.ndarray) -> dict[str, int]:
  """Return {class or label: number of images}; {} for a task of values."""
  kind = KINDS[split.kind]
  if kind.numbers:
    return {}
  counts = kind.counts(labels, split.num_classes).tolist()
  return dict(zip(split.class_names, counts, strict=True))


def _values(split: Split, labels: np.ndarray) -> dict[str, dict[str, float]]:
  """Return {name of a value: {statistic: number}}.

  The result is {} for a task of classes or labels, or if `labels` is empty.
  """
  if not KINDS[split.kind].numbers or not len(labels):
    return {}
  statistics = np.stack([
    labels.min(axis=0), labels.mean(axis=0), labels.max(axis=0),
    subset.deviations(labels),
  ])  # fmt: skip
  return {
    name: dict(zip(_STATISTICS, map(float, numbers), strict=True))
    for name, numbers in zip(split.class_names, statistics.T, strict=True)
  }


def _balance(per_class: dict[str, int], images: int) -> dict[str, Any] | None:
  """Return the sizes of the smallest and the largest class (or label).

  Empty classes are left out; the result is None if all classes are empty.
  """
  counts = {name: count for name, count in per_class.items() if count}
  if not counts:
    return None
  fewest = min(counts.items(), key=lambda item: item[1])
  most = max(counts.items(), key=lambda item: item[1])
  ratio = most[1] / fewest[1]
  return {
    "fewest": fewest,
    "most": most,
    "ratio": ratio,
    "share": most[1] / images,
    "imbalanced": ratio >= IMBALANCED,
  }


def _duplicates(contents: Mapping[str, _Contents]) -> list[dict[str, Any]]:
  """Return a dictionary per pair of splits; it lists files that are in both."""
  duplicates = []
  for roles in itertools.combinations(contents, 2):
    first, second = (contents[role] for role in roles)
    # Compare files by hash: two different files have the same hash with a
    # probability of 2^-64. If a split has several copies of a file, name the
    # first copy.
    _, a, b = np.intersect1d(first.hashes, second.hashes, return_indices=True)
    shared = sorted(
      (first.indices[i], second.indices[j]) for i, j in zip(a, b, strict=True)
    )
    pairs = [
      [first.split.describe(i), second.split.describe(j)] for i, j in shared
    ]
    entry = {"splits": [*roles], "count": len(pairs), "pairs": pairs}
    duplicates.append(entry)
  return duplicates
