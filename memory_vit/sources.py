"""A split of a data set with random access; image folders, and the digits.

Example i can be fetched by itself, so the position in training is a single
number (see `data.py`). `tfds_source.py` makes the same of TFDS data sets.
"""

import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sklearn.datasets
import tensorflow as tf
import tensorflow_datasets as tfds

from memory_vit.errors import BrokenDataError, DataError
from memory_vit.escaping import escaped
from memory_vit.inventory import Inventory
from memory_vit.paths import local

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


def open_folder(split: str, directory: str, **options: Any) -> Source:
  """A folder with SPLIT/CLASS/PICTURE: see `data.open_source`.

  Further options are those of `Source`.
  """
  root = local(directory or ".", "the image folder", DataError)
  if not directory or not root.is_dir():
    raise DataError(
      f"image folder {directory!r} is not there: set config.data.dir to a "
      "directory that holds train/CLASS/*.jpg."
    )
  irregular: dict[str, str] = {}
  files = {
    folder.name: _picture_files(folder, irregular) for folder in _folders(root)
  }
  if "train" not in files:
    raise DataError(
      f"image folder {directory!r} has no train/, whose folders are the "
      f"classes; it has {sorted(files)}."
    )
  class_names = tuple(files["train"])
  sizes = {key: sum(map(len, files[key].values())) for key in files}
  chosen = []
  for key, part in slices("folder", split, sizes):
    _check_classes(root / key, files[key], class_names)
    chosen += _shuffled(files[key])[part]
  where = {file: os.path.join(root, file) for file, _ in chosen}
  bad = {
    i: irregular[file]
    for i, (file, _) in enumerate(chosen)
    if file in irregular
  }
  # What reads a pipe waits for ever: what is no file has no path here.
  names = [
    b"" if file in irregular else os.fsencode(where[file]) for file, _ in chosen
  ]
  paths = tf.constant(names)
  label_of = {class_name: i for i, class_name in enumerate(class_names)}
  labels = tf.constant([label_of[name] for _, name in chosen], tf.int32)
  read = _reader(names)
  source = Source(
    name="folder",
    split=split,
    size=len(chosen),
    class_names=class_names,
    fetch=lambda i: (read(tf.gather(paths, i)), tf.gather(labels, i)),
    file_name=lambda i: _shown(where[chosen[i][0]]),
    inventory=Inventory(files=where),
    **options,
  )
  source.leave_out(bad)
  return source


def open_digits(name: str, split: str, **options: Any) -> Source:
  """The digits that come with scikit-learn: see `data.open_source`.

  Every fifth picture of a class is for the test. Further options are those of
  `Source`.
  """
  match = re.fullmatch(r"digits(?::([0-9])-([0-9]))?", name)
  first, last = (int(match[1] or 0), int(match[2] or 9)) if match else (1, 0)
  if first > last:
    raise DataError(
      f"data set {name!r}: expected 'digits', or a range such as 'digits:0-4'."
    )
  images, digits = sklearn.datasets.load_digits(return_X_y=True)
  train, test = [], []
  for digit in range(first, last + 1):
    indices = np.flatnonzero(digits == digit)
    train.append(np.delete(indices, np.s_[4::5]))
    test.append(indices[4::5])
  # Sorted, as they come in scikit-learn: the classes are mixed.
  splits = {
    "train": np.sort(np.concatenate(train)),
    "test": np.sort(np.concatenate(test)),
  }
  sizes = {key: len(indices) for key, indices in splits.items()}
  parts = slices(name, split, sizes)
  chosen = np.concatenate([splits[key][part] for key, part in parts])
  # 8 x 8 pixels from 0 to 16, as files: the rest is as for any other source.
  images = np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
  pictures = tf.stack([tf.io.encode_png(images[i]) for i in chosen])
  labels = tf.constant(digits[chosen] - first, tf.int32)
  return Source(
    name=name,
    split=split,
    size=len(chosen),
    class_names=tuple(str(digit) for digit in range(first, last + 1)),
    fetch=fetch_from_memory(pictures, labels),
    inventory=Inventory(facts={"pictures": _digest(images[chosen], labels)}),
    **options,
  )


def _digest(images: np.ndarray, labels: tf.Tensor) -> str:
  """SHA-256 of pictures in memory, and of their labels."""
  return hashlib.sha256(images.tobytes() + labels.numpy().tobytes()).hexdigest()


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


def _folders(root: pathlib.Path) -> list[pathlib.Path]:
  """The folders in a folder: splits, or classes.

  Raises:
    BrokenDataError: where the name of one is not UTF-8.
  """
  with os.scandir(root) as entries:
    names = sorted(
      entry.name
      for entry in entries
      if entry.is_dir() and not entry.name.startswith(".")
    )
  for name in names:
    if _shown(name) != name:
      raise BrokenDataError(
        f"the name of the folder {_shown(str(root / name))} is not UTF-8, so "
        "that it cannot be that of a class or a split: rename it."
      )
  return [root / name for name in names]


def _picture_files(
  folder: pathlib.Path, irregular: dict[str, str]
) -> dict[str, list[str]]:
  """The pictures of a split, by their class.

  Args:
    folder: of the split.
    irregular: what has the name of a picture and is no regular file is added
      to it, with what it is.

  Returns:
    Class -> its pictures, as paths relative to the parent of `folder`.
  """
  found = {}
  for class_folder in _folders(folder):
    files = found[class_folder.name] = []
    with os.scandir(class_folder) as entries:
      for entry in entries:
        suffix = os.path.splitext(entry.name)[1]
        if suffix.lower() in SUFFIXES and not entry.name.startswith("."):
          file = f"{folder.name}/{class_folder.name}/{entry.name}"
          files.append(file)
          if not entry.is_file():  # links are followed
            irregular[file] = f"no regular file, but {_kind(entry.path)}"
  return found


def _kind(path: str) -> str:
  """What something is that is no regular file."""
  try:
    mode = os.stat(path).st_mode
  except OSError as error:
    return f"a link to what cannot be found ({error.strerror})"
  kinds = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
  }
  return next((kind for is_, kind in kinds.items() if is_(mode)), "unknown")


def _reader(names: Sequence[bytes]) -> Callable[[tf.Tensor], tf.Tensor]:
  """How files are read: path, string () -> contents, string ()."""
  try:
    b"".join(names).decode("utf-8")
  except UnicodeDecodeError:
    return _read_in_python
  return tf.io.read_file


# A graph even when called eagerly, so that errors are TensorFlow's either way.
@tf.function
def _read_in_python(path: tf.Tensor) -> tf.Tensor:
  """TensorFlow reads a name that is not UTF-8, but cannot say if it fails."""

  def read(path: bytes) -> bytes:
    with open(path, "rb") as file:
      return file.read()

  return tf.ensure_shape(tf.numpy_function(read, [path], tf.string), ())


def _shown(path: str) -> str:
  """A path for messages: bytes that are not UTF-8 as \\xff."""
  return os.fsencode(path).decode("utf-8", "backslashreplace")


def _check_classes(
  folder: pathlib.Path,
  files: Mapping[str, Sequence[str]],
  classes: Sequence[str],
) -> None:
  """Refuses a class that train/ does not have, or without pictures."""
  unknown = sorted(set(files) - set(classes))
  if unknown:
    raise BrokenDataError(
      f"{folder} has classes that train/ does not have: {unknown}."
    )
  empty = sorted(name for name, pictures in files.items() if not pictures)
  if empty:
    raise BrokenDataError(
      f"{folder} has no pictures ({', '.join(SUFFIXES)}) of classes {empty}."
    )


def _shuffled(files: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
  """(file, class), in an order that mixes the classes, so slices are fair.

  Sorting by a hash of the name is the same everywhere, and a picture that is
  added leaves the others in their order.
  """
  pairs = [(file, name) for name in files for file in files[name]]
  return sorted(
    pairs, key=lambda pair: hashlib.sha256(os.fsencode(pair[0])).digest()
  )
