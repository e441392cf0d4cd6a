"""Splits of images and labels that Python has, read once into memory.

Arrays, tf.data, torch, Hugging Face `datasets`, lists of examples. A folder of
image files stays on its disk.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
from PIL import Image

from memory_vit.data import (
  datasets,
  indexable,
  labels,
  oriented,
  raw_images,
  subset,
)
from memory_vit.data.data_files import DataFiles
from memory_vit.data.labels import Encoder, Label
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split, fetch_from_memory
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import DataError
from memory_vit.images import decoding
from memory_vit.runtime import messages, paths

# Examples from which the size of all is estimated.
_TELLING = 100


def open_data(
  data: Any,
  name: str,
  split: str,
  class_names: Sequence[str] = (),
  keys: tuple[str, str] = ("image", "label"),
  kind: str = "classes",
) -> Split:
  """Open a split in any of the forms that `train_task` takes.

  Without `class_names`, the data state them, or they are the names among the
  labels, sorted, or "0" up to the greatest label.
  """
  if isinstance(data, str | os.PathLike):
    folder = paths.local(data, "the image folder", DataError).absolute()
    ref = SplitRef(
      "folder", str(folder.parent), folder.name, kind=kind,
      class_names=tuple(class_names),
    )  # fmt: skip
    opened = datasets.open_ref(ref)
    return dataclasses.replace(opened, name=f"python:{name}")
  where = f"{name!r}, split {split!r}"
  stated = indexable.stated_classes(data, keys[1], kind)
  if class_names and stated not in ((), tuple(class_names)):
    raise DataError(
      f"{where}: the data state the classes {messages.name_list(stated)}, "
      f"expected {messages.name_list(class_names)}."
    )
  images, found = _read(data, keys, where, kind)
  try:
    names = stated or tuple(class_names) or labels.names_among(found)
  except DataError as error:
    raise DataError(f"{where}: {error}.") from error
  are_names = not stated and labels.are_names(names, found)
  if are_names:
    labels.tell_of_numbers(names, where)
  encode = Encoder(kind, names, are_names)
  numbers = encode.all(found, lambda i: f"{where}, example {i}")
  digest = hashlib.sha256(numbers.tobytes())
  for image in images:  # each process marks pixels in its own way
    content = image.removeprefix(raw_images.MAGIC).removeprefix(oriented.MAGIC)
    digest.update(hashlib.sha256(content).digest())
  opened = Split(
    name=f"python:{name}",
    split=split,
    size=len(images),
    class_names=names,
    kind=kind,
    fetch=fetch_from_memory(tf.constant(images), tf.constant(numbers)),
    file_name=lambda index: f"number {index} of those given",
    data_files=DataFiles(facts={"contents": digest.hexdigest()}),
    labels=numbers,
  )
  opened.check_labels(numbers)
  return opened


def hold_out(split: Split) -> tuple[Split, Split]:
  """Set a tenth of a training split aside, as the configuration `folder` does.

  The images of a folder are in an order that mixes the classes; of other data
  the tenth is drawn, and is the same in every run.
  """
  size = split.size
  if size < 2:
    raise DataError(f"{split} has one example: none can be held out.")
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
  data: Any, keys: tuple[str, str], where: str, kind: str
) -> tuple[list[bytes], list[Label]]:
  """Read all images, encoded, and their labels; not more than memory holds."""
  images: list[bytes] = []
  found: list[Label] = []
  # Half, as a tensor is made of them, which is a copy.
  taken, free = 0, psutil.virtual_memory().available // 2
  size, examples = _examples(data, keys)
  for example in examples:
    try:
      image, label = indexable.pair_of(example, keys)
      images.append(_encoded(image))
      found.append(labels.read(label, kind))
    except DataError as error:
      raise DataError(f"{where}, example {len(images)}: {error}.") from error
    taken += len(images[-1])
    count = len(images)
    needed = taken * (size or count) // count
    if needed > free and count >= min(_TELLING, size or _TELLING):
      raise DataError(
        f"{where}: its images take {needed / 2**30:.1f} GiB or more, and "
        f"{free / 2**30:.1f} GiB are free for them. Write them to "
        "DATA/train/CLASS/ and run `memory-vit train --config=folder "
        "--config.data.dir=DATA --workdir=DIR`, which reads images as they are "
        "needed; in Python, give the folder 'DATA/train'."
      )
  if not images:
    raise DataError(f"{where} has no example.")
  return images, found


def _examples(
  data: Any, keys: tuple[str, str]
) -> tuple[int | None, Iterable[Any]]:
  """The examples, and their number if it is known."""
  if isinstance(data, Mapping):
    data = indexable.pair_of(data, keys)
  if isinstance(data, tuple) and len(data) == 2:
    images, targets = data
    size = _length(images)
    if size is None or size != _length(targets):
      raise DataError(
        f"the data are a pair of a {type(images).__name__} of {size} and a "
        f"{type(targets).__name__} of {_length(targets)}: expected as many "
        "images as labels."
      )
    return size, zip(images, targets, strict=True)
  size = _length(data)
  if size is not None and hasattr(data, "__getitem__"):
    # Iterated, a data set of torch does not end.
    return size, (data[i] for i in range(size))
  if isinstance(data, Iterable):
    return size, data
  raise DataError(
    f"the data are of type {type(data).__name__}: expected (images, labels), a "
    "data set, a list of examples, or a folder DATA/train."
  )


def _length(data: Any) -> int | None:
  try:
    return len(data)
  except TypeError:  # of a stream, also one of TensorFlow
    return None


def _encoded(image: Any) -> bytes:
  """Convert an image to a file or pixels that `image_ops.decode` takes."""
  image = indexable.floats_of(image)
  if isinstance(image, Mapping | bytes | Image.Image):
    return indexable.encoded(image)
  pixels = np.asarray(image)
  if pixels.dtype == object and pixels.ndim == 0:  # a string of TensorFlow
    return oriented.unmarked(indexable.encoded(pixels.item()))
  if pixels.ndim == 4:
    raise DataError("it is a batch of images, expected single examples")
  if type(image).__module__.startswith("torch") and pixels.ndim == 3:
    pixels = np.moveaxis(pixels, 0, -1)
  if np.issubdtype(pixels.dtype, np.floating):
    if not (pixels.size and pixels.min() >= 0 and pixels.max() <= 1):
      raise DataError(
        "its image has floating-point values outside of 0 to 1: expected that "
        "range, or uint8 pixels of 0 to 255. Values in [-1, 1], as "
        "mv.preprocess returns, become (x + 1) / 2"
      )
    pixels = np.round(pixels * 255).astype(np.uint8)
  return raw_images.encode(decoding.rgb_pixels(pixels))
