"""A split of a data set with random access.

Example i can be fetched by itself, so the position in training is a single
number (see `data/batching.py`). `data/local.py`, `data/file_list.py` and
`data/tfds.py` make them.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from memory_vit.data.data_files import DataFiles
from memory_vit.data.embedded_rows import EmbeddedRows
from memory_vit.data.quiet_tensorflow import tf, tfds
from memory_vit.data.split_ref import OF_A_DIRECTORY
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime.messages import escaped, named

# In front of what an operation of TensorFlow says of an image.
_AROUND = re.compile(
  r"Error in user-defined function .* iterator: \S+: "
  r"(jpeg::Uncompress failed\. )?"
)
# In front of what Python raised inside of TensorFlow.
_RAISED = re.compile(r"[\w.]+(Error|Exception): ")
# Index, int64 () -> the encoded image, string (), and its label, int32 ().
Fetch = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """One split of a data set, with random access.

  Attributes:
    name: as in `config.data.name`.
    split: as in `config.data.train`, such as "train[:98%]".
    size: number of examples.
    class_names: one per class; "0", "1", ... where TFDS has no names.
    fetch: int64 () index -> the encoded image, string (), and its label,
      int32 (). Runs eagerly and inside tf.data.
    file_name: index -> the file it comes from, "" where it has none.
    unreadable: index -> why, of the examples that were found to be unreadable
      when it was opened.
    inventory: of its files, to notice later that they have changed.
    labels: int32 (size,), where they are known before examples are read.
    embedded: rows in place of images, of which `fetch` has none then.
    left_out: what is no example of the split, as it has no embedding.
    skipped: a line for each of its folders that holds more than images.
  """

  name: str
  split: str
  size: int
  class_names: tuple[str, ...]
  fetch: Fetch
  file_name: Callable[[int], str] = lambda index: ""
  unreadable: Mapping[int, str] = dataclasses.field(default_factory=dict)
  inventory: DataFiles = dataclasses.field(default_factory=DataFiles)
  labels: np.ndarray | None = dataclasses.field(default=None, compare=False)
  embedded: EmbeddedRows | None = dataclasses.field(default=None, compare=False)
  left_out: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()

  @property
  def num_classes(self) -> int:
    """The number of classes."""
    return len(self.class_names)

  @property
  def directory(self) -> str:
    """The last name of its directory, where `name` says only that it is one."""
    if self.name not in OF_A_DIRECTORY:
      return ""
    for name, path in self.inventory.files.items():
      root = path.removesuffix(name)
      return os.path.basename(os.path.abspath(root)) if root else ""
    return ""

  @property
  def full_name(self) -> str:
    """The name of the data set for people: "digits", "folder pets"."""
    return f"{self.name} {self.directory}".rstrip()

  def __str__(self) -> str:
    """For messages."""
    return f"data set {self.full_name!r}, split {self.split!r}"

  def require_images(self) -> None:
    """Raise `DataError` where there are embeddings in place of images."""
    if self.embedded:
      raise DataError(
        f"{self} holds embeddings and no images: heads and probes alone are "
        "trained on them, by config.keep.what 'features'."
      )

  def single_class(self) -> str:
    """Say what to do about a single class; "" where there are several."""
    if self.num_classes > 1:
      return ""
    if self.name != "folder":
      return "expected two or more."
    return (
      "expected two or more. The folders in DATA/train are the classes: "
      "DATA/train/CLASS/IMAGE. If the images are one folder deeper, in "
      f"DATA/train/{escaped(self.class_names[0])}/CLASS, move these folders up."
    )

  def describe(self, index: int) -> str:
    """Name one example in a message."""
    where = f"{self}, example {index}"
    file = escaped(self.file_name(index))
    return f"{where} ({file})" if file else where

  def check_labels(
    self, labels: np.ndarray, index_of: Callable[[int], int] = int
  ) -> None:
    """Refuse labels that are not classes.

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
        f"{self} has labels {label}{reason}; expected 0 to "
        f"{self.num_classes - 1}. Use another split. "
        f"(Found in {self.describe(index_of(int(wrong[0])))}.)"
      )


def split_names(split: str) -> list[str]:
  """The splits that one such as "train[:90%]+val" is made of."""
  names = [part.partition("[")[0].strip() for part in split.split("+")]
  return list(dict.fromkeys(names))


def split_parts(
  name: str, split: str, sizes: Mapping[str, int]
) -> list[tuple[str, slice]]:
  """Parse a split such as "train[:98%]+test" into names and slices.

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
    advice = ""
    if "test" in split_names(split) and "test" not in sizes:
      advice = (
        " Without one, add --config.data.test='' to a run, and give `evaluate` "
        "another by --split."
      )
    raise DataError(
      f"data set {name!r} has no split {split!r} ({named(error)}); its "
      f"splits are {dict(sizes)}.{advice}"
    ) from error
  chosen = [(part.splitname, slice(part.from_, part.to)) for part in parts]
  if not count_examples(chosen, sizes):
    raise DataError(
      f"data set {name!r}: split {split!r} is empty; its splits are "
      f"{dict(sizes)}."
    )
  return chosen


def count_examples(
  parts: list[tuple[str, slice]], sizes: Mapping[str, int]
) -> int:
  """Count the examples in the parts that `split_parts` returns."""
  return sum(len(range(sizes[key])[part]) for key, part in parts)


def fetch_from_memory(images: tf.Tensor, labels: tf.Tensor) -> Fetch:
  """`Source.fetch` of encoded images, string (n,), and labels, int32 (n,)."""
  return lambda index: (tf.gather(images, index), tf.gather(labels, index))


def without_autotuning() -> tf.data.Options:
  """Options of a pipeline without autotuning, which delays its end.

  Its thread sleeps for 1, 2, 4, ... up to 60 seconds, and an iterator that is
  closed waits until it wakes; there is little to choose here.
  """
  options = tf.data.Options()
  options.autotune.enabled = False
  return options


def parallel_map(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> tf.data.Dataset:
  """Apply `make` to elements in parallel, in order; nothing is autotuned."""
  return dataset.map(
    make, num_parallel_calls=os.cpu_count(), deterministic=True
  ).with_options(without_autotuning())


def attempts(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> Iterator[Any | tf.errors.OpError]:
  """Apply `make` to elements in parallel, with errors in their place.

  Args:
    dataset: of numbers or tensors. Not of a reader of files: that could fail at
      the same place again and again.
    make: is applied to each element.

  Yields:
    What `make` gives, as numpy arrays, or what it has raised.
  """
  elements = parallel_map(dataset, make).as_numpy_iterator()
  for _ in range(len(dataset)):
    try:
      yield next(elements)
    except tf.errors.OpError as error:
      yield error


def reason_of(error: Exception) -> str:
  """The message of a reader or of TensorFlow in one line, without its nodes."""
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  lines = text.strip().splitlines() or [type(error).__name__]
  # What Python raised inside of TensorFlow stands at the end of a traceback.
  raised = [line for line in lines if _RAISED.match(line)]
  line = _RAISED.sub("", raised[-1], count=1) if raised else lines[0]
  line = _AROUND.sub("", line)
  return re.sub(r"\{\{.*?\}\}|\[Op:.*", "", line).strip(" .")
