"""A split of a data set with random access.

Example i can be fetched by itself, so the position in training is a single
number (see `data/batching.py`). `data/local.py` and `data/tfds.py` make them.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from memory_vit.data.inventory import Inventory
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime.messages import escaped

logger = logging.getLogger("memory_vit.sources")

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
# Unreadable examples that a message lists.
_SHOWN = 20
# In front of what Python raised inside of TensorFlow.
_RAISED = re.compile(r"\w+(Error|Exception): ")
# Index, int64 () -> the encoded picture, string (), and its label, int32 ().
Fetch = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """One split of a data set, with random access.

  Attributes:
    name: as in `config.data.name`.
    split: as in `config.data.train`, such as "train[:98%]".
    size: number of examples.
    class_names: one per class; "0", "1", ... where TFDS has no names.
    fetch: int64 () index -> the encoded picture, string (), and its label,
      int32 (). Runs eagerly and inside tf.data.
    file_name: index -> the file it comes from, "" where it has none.
    max_bad: how many examples may be left out as they cannot be read.
    left_out: index -> why, of those that were found so far; is changed by
      `leave_out` alone.
    stall_timeout: seconds after which a process that waits for a batch is
      ended; 0 is never.
    inventory: of its files, to notice later that they are others.
  """

  name: str
  split: str
  size: int
  class_names: tuple[str, ...]
  fetch: Fetch
  file_name: Callable[[int], str] = lambda index: ""
  max_bad: int = 0
  left_out: dict[int, str] = dataclasses.field(default_factory=dict)
  stall_timeout: float = 0.0
  inventory: Inventory = dataclasses.field(default_factory=Inventory)

  @property
  def num_classes(self) -> int:
    """The number of classes."""
    return len(self.class_names)

  def describe(self, index: int) -> str:
    """Names one example in a message."""
    where = f"data set {self.name!r}, split {self.split!r}, example {index}"
    file = escaped(self.file_name(index))
    return f"{where} ({file})" if file else where

  def leave_out(self, reasons: Mapping[int, str]) -> None:
    """Notes examples that cannot be read; each is named once in the log.

    Args:
      reasons: index -> why.

    Raises:
      BrokenDataError: where they are more than `max_bad`, with those before.
    """
    new = {i: why for i, why in reasons.items() if i not in self.left_out}
    if new and len(self.left_out) + len(new) > self.max_bad:
      together = {**self.left_out, **new}
      lines = [self._unreadable(i, why) for i, why in together.items()]
      raise BrokenDataError(_too_many(lines, self.max_bad))
    for index, why in new.items():
      line = self._unreadable(index, why)
      logger.warning("left out (%d may be): %s", self.max_bad, line)
    self.left_out.update(new)

  def _unreadable(self, index: int, why: str) -> str:
    return f"{self.describe(index)} cannot be read: {why}."

  def check_labels(
    self, labels: np.ndarray, index_of: Callable[[int], int] = int
  ) -> None:
    """Refuses labels that are not classes.

    Args:
      labels: int32 (b,).
      index_of: place in `labels` -> index of the example.

    Raises:
      BrokenDataError: if one is outside of 0 ... num_classes - 1.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
    if wrong.size:
      label = labels[wrong[0]]
      reason = ": an unlabelled test split" if label == -1 else ""
      raise BrokenDataError(
        f"data set {self.name!r}, split {self.split!r} has labels {label}"
        f"{reason}; expected 0 to {self.num_classes - 1}. Use another split. "
        f"(Found in {self.describe(index_of(int(wrong[0])))}.)"
      )


def _too_many(lines: Sequence[str], allowed: int) -> str:
  """The message for more unreadable examples than are allowed."""
  advice = (
    "`python -m memory_vit.check_data` names all that is broken; "
    f"config.data.max_bad ({allowed}) is how many may be left out."
  )
  if len(lines) == 1:
    return f"{lines[0]} {advice}"
  more = len(lines) - _SHOWN
  shown = [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
  return f"{len(lines)} examples cannot be read. {advice}\n  " + "\n  ".join(
    shown
  )


def slices(
  name: str, split: str, sizes: Mapping[str, int]
) -> list[tuple[str, slice]]:
  """Takes a split such as "train[:98%]+test" apart: which split, which part.

  Args:
    name: of the data set, for messages.
    split: in the notation of TFDS.
    sizes: name of each split -> number of its examples.

  Raises:
    DataError: for an unknown or an empty split.
  """
  infos = {
    key: tfds.core.SplitInfo(name=key, shard_lengths=[size], num_bytes=0)
    for key, size in sizes.items()
  }
  try:
    parts = tfds.core.ReadInstruction.from_spec(split).to_absolute(infos)
  except (AssertionError, NotImplementedError, ValueError) as error:
    raise DataError(
      f"data set {name!r} has no split {split!r} ({brief(error)}); its splits "
      f"are {dict(sizes)}."
    ) from error
  chosen = [(part.splitname, slice(part.from_, part.to)) for part in parts]
  if not count(chosen, sizes):
    raise DataError(
      f"data set {name!r}: split {split!r} is empty; its splits are "
      f"{dict(sizes)}."
    )
  return chosen


def count(parts: list[tuple[str, slice]], sizes: Mapping[str, int]) -> int:
  """How many examples the parts of splits hold that `slices` returns."""
  return sum(len(range(sizes[key])[part]) for key, part in parts)


def fetch_from_memory(pictures: tf.Tensor, labels: tf.Tensor) -> Fetch:
  """`Source.fetch` of encoded pictures, string (n,), and labels, int32 (n,)."""
  return lambda index: (tf.gather(pictures, index), tf.gather(labels, index))


def without_autotuning() -> tf.data.Options:
  """Autotuning has little to choose here, and its thread sleeps on.

  It looks at the pipeline after 1, 2, 4, ... up to 60 seconds, and an
  iterator that is closed waits until it wakes.
  """
  options = tf.data.Options()
  options.autotune.enabled = False
  return options


def attempts(
  dataset: tf.data.Dataset, count: int
) -> Iterator[Any | tf.errors.OpError]:
  """The elements of a data set that was mapped; errors stand in their place.

  Args:
    dataset: of numbers or tensors, mapped. Not of a reader of files: that could
      fail at the same place again and again.
    count: of its elements.

  Yields:
    `count` times an element, as numpy arrays, or what making it has raised.
  """
  elements = dataset.as_numpy_iterator()
  for _ in range(count):
    try:
      yield next(elements)
    except tf.errors.OpError as error:
      yield error


def reason_of(error: Exception) -> str:
  """What a reader or TensorFlow says, in a line without names of its nodes."""
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  lines = text.strip().splitlines() or [type(error).__name__]
  # What Python raised inside of TensorFlow stands at the end of a traceback.
  raised = [line for line in lines if _RAISED.match(line)]
  line = _RAISED.sub("", raised[-1], count=1) if raised else lines[0]
  return re.sub(r"\{\{.*?\}\}|\[Op:.*", "", line).strip(" .")


def brief(error: Exception) -> str:
  """The first line of an error."""
  line = next(iter(str(error).strip().splitlines()), "")
  return f"{type(error).__name__}: {line}".rstrip(": ")
