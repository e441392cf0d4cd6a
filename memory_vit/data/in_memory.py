"""Splits of images and labels in Python objects, read once into memory.

The objects are arrays, tables, lists of examples, or data sets of tf.data,
torch or Hugging Face. Only a folder of image files is not read into memory.
"""

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from memory_vit.data import (
  datasets,
  indexable,
  labels,
  oriented,
  python_images,
  raw_images,
  subset,
)
from memory_vit.data.data_files import DataFiles
from memory_vit.data.labels import Encoder
from memory_vit.data.memory_source import MemorySource
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import DataError
from memory_vit.kinds import KINDS
from memory_vit.kinds.written import Label
from memory_vit.runtime import messages, paths
from memory_vit.runtime.progress_bar import ProgressBar

# Number of examples after which the memory for all examples is estimated.
_TELLING = 100
# If a table has no column of images, paths are read from the column `_PATH`.
_PATH = "path"
_EXPECTED = (
  "(images, labels), a data set, a list of examples, a table, or a folder "
  "DATA/train"
)


def open_data(
  data: Any,
  name: str,
  split: str,
  class_names: Sequence[str] = (),
  keys: tuple[str, str] = ("image", "label"),
  kind: str = "classes",
) -> Split:
  """Open a split in any of the forms that `train_task` takes.

  The names of classes are stated by the data or given in `class_names`; the
  default is the sorted labels, or "0", "1", ... for labels that are arrays.
  """
  if isinstance(data, str | os.PathLike):
    folder = paths.local(data, "the image folder", DataError).absolute()
    if folder.is_file():
      raise DataError(
        f"{messages.brief(os.fspath(data))} is a file: expected the folder "
        "DATA/train, or paths and labels, for example in a table that "
        "pandas.read_csv returns."
      )
    ref = SplitRef(
      "folder", str(folder.parent), folder.name, kind=kind,
      class_names=tuple(class_names),
    )  # fmt: skip
    opened = datasets.open_ref(ref)
    return dataclasses.replace(opened, name=f"python:{name}")
  where = f"{name!r}, split {split!r}"
  try:
    if hasattr(data, "columns"):
      data, keys = _table(data, keys)
    size, examples = _examples(data, keys)
  except DataError as error:
    raise DataError(f"{where}: {error}.") from error
  stated = indexable.stated_classes(data, keys[1], kind)
  if class_names and stated not in ((), tuple(class_names)):
    raise DataError(
      f"{where}: the classes of the data are {messages.name_list(stated)}, "
      f"expected {messages.name_list(class_names)}."
    )
  images, raw_labels = _read(size, examples, keys, where, kind)
  try:
    names = stated or tuple(class_names) or labels.names_among(raw_labels)
  except DataError as error:
    raise DataError(f"{where}: {error}.") from error
  are_names = not stated and labels.are_names(names, raw_labels)
  if are_names:
    labels.tell_of_numbers(names, where)
  encode = Encoder(kind, names, are_names)
  numbers = encode.all(raw_labels, lambda i: f"{where}, example {i}")
  digest = hashlib.sha256(numbers.tobytes())
  for image in images:
    # Leave out the prefixes, whose random bytes differ between processes.
    content = image.removeprefix(raw_images.MAGIC).removeprefix(oriented.MAGIC)
    digest.update(hashlib.sha256(content).digest())
  opened = Split(
    name=f"python:{name}",
    split=split,
    size=len(images),
    class_names=names,
    kind=kind,
    source=MemorySource(images, numbers),
    file_name=lambda index: f"number {index} of the given examples",
    data_files=DataFiles(facts={"contents": digest.hexdigest()}),
    labels=numbers,
  )
  opened.check_labels(numbers)
  return opened


def hold_out(split: Split) -> tuple[Split, Split]:
  """Set a tenth of a training split aside, as the configuration `folder` does.

  The order of a folder already mixes the classes. Other data are shuffled with
  a fixed seed, so that the tenth is the same in every run.
  """
  size = split.size
  if size < 2:
    raise DataError(
      f"{split} has only one example, so no example can be held out: expected "
      "at least two."
    )
  order = np.arange(size)
  if not split.data_files.files:
    order = np.random.default_rng(0).permutation(size)
  first = min(round(size * 90 / 100), size - 1)  # as TFDS rounds
  parts = {"[:90%]": order[:first], "[90%:]": order[first:]}
  train, held_out = (
    subset.take(split, part, split.split + name, split.data_files)
    for name, part in parts.items()
  )
  return train, held_out


def _read(
  size: int | None,
  examples: Iterable[Any],
  keys: tuple[str, str],
  where: str,
  kind: str,
) -> tuple[list[bytes], list[Label]]:
  """Return (encoded images, labels); raise if images need too much memory."""
  images: list[bytes] = []
  raw_labels: list[Label] = []
  # Images may take half of the free memory, since training needs memory, too.
  taken, free = 0, psutil.virtual_memory().available // 2
  with ProgressBar(f"reading {where}", size) as bar:
    for example in examples:
      try:
        image, label = indexable.pair_of(example, keys)
        read = python_images.encoded(image), KINDS[kind].read(label)
      except DataError as error:
        raise DataError(f"{where}, example {len(images)}: {error}.") from error
      images.append(read[0])
      raw_labels.append(read[1])
      bar.update()
      taken += len(read[0])
      count = len(images)
      needed = taken * (size or count) // count
      if needed > free and count >= min(_TELLING, size or _TELLING):
        raise DataError(
          f"{where}: the images take {needed / 2**30:.1f} GiB or more, but "
          f"{free / 2**30:.1f} GiB are free for them. Write the images to "
          "DATA/train/CLASS/ and run `memory-vit train --config=folder "
          "--config.data.dir=DATA --workdir=DIR`, which reads images as they "
          "are needed. In Python, give the folder 'DATA/train' instead."
        )
  if not images:
    raise DataError(f"{where} has no example.")
  return images, raw_labels


def _table(
  data: Any, keys: tuple[str, str]
) -> tuple[dict[str, Any], tuple[str, str]]:
  """Return ({key: column}, keys) for a table of pandas, Polars or Arrow.

  `keys` name the columns of images and labels. If the column of images is
  missing, the returned keys name the column "path" in its place.
  """
  names = getattr(data, "column_names", None) or [*data.columns]
  if keys[0] not in names and _PATH in names:
    keys = _PATH, keys[1]
  indexable.pair_of(dict.fromkeys(names), keys)
  columns = {key: _item(data, key) for key in keys}
  return {
    key: column.to_pylist() if hasattr(column, "to_pylist") else [*column]
    for key, column in columns.items()
  }, keys


def _examples(
  data: Any, keys: tuple[str, str]
) -> tuple[int | None, Iterable[Any]]:
  """Return (number, examples); the number of examples is None if unknown."""
  if isinstance(data, Mapping):
    data = indexable.pair_of(data, keys)
  if isinstance(data, tuple) and len(data) == 2:
    images, targets = data
    size = _length(images)
    if size is None or size != _length(targets):
      raise DataError(
        f"the images are a {type(images).__name__} of length {size}, but "
        f"the labels are a {type(targets).__name__} of length "
        f"{_length(targets)}: expected as many images as labels"
      )
    return size, zip(images, targets, strict=True)
  size = _length(data)
  if size is not None and hasattr(data, "__getitem__"):
    # Read by index, since iterating over a data set of torch may not end.
    return size, (_item(data, i) for i in range(size))
  # Do not import TensorFlow: if `data` is a tf.data data set, the caller has
  # already imported TensorFlow.
  tf = sys.modules.get("tensorflow")
  if (
    tf
    and isinstance(data, tf.data.Dataset)
    and data.cardinality() == tf.data.INFINITE_CARDINALITY
  ):
    raise DataError(
      "the data set of TensorFlow has no end: leave out `repeat()`, or give "
      "`data.take(N)`"
    )
  if isinstance(data, Iterable):
    return size, data
  raise DataError(
    f"the data are of type {type(data).__name__}: expected {_EXPECTED}"
  )


def _item(data: Any, key: int | str) -> Any:
  try:
    return data[key]
  except (LookupError, TypeError) as error:
    raise DataError(
      f"the data are a {type(data).__name__}, from which `data[{key!r}]` "
      f"cannot be read ({messages.named(error)}): expected {_EXPECTED}"
    ) from error


def _length(data: Any) -> int | None:
  try:
    return len(data)
  except TypeError:  # streams and some tf.data data sets have no length
    return None
