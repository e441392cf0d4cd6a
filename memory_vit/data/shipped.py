"""Data sets that come with packages: digits of scikit-learn, and glyphs."""

import functools
import hashlib
import re
from typing import NamedTuple

import numpy as np

from memory_vit import glyphs
from memory_vit.data import split_parts
from memory_vit.data.data_files import DataFiles
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split, fetch_from_memory
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import DataError

_GLYPHS = "glyphs:inverted"


class _LabelledImages(NamedTuple):
  """Images, uint8 (n, side, side, 1 or 3), and labels, int32 (n,)."""

  images: np.ndarray
  labels: np.ndarray


class _Shipped(NamedTuple):
  """A data set in memory: {"train", "test": images}, with the classes mixed."""

  splits: dict[str, _LabelledImages]
  class_names: tuple[str, ...]


def open_shipped(ref: SplitRef) -> Split:
  is_glyphs = ref.name.partition(":")[0] == "glyphs"
  found = _inverted(ref.name) if is_glyphs else _digits(ref.name)
  sizes = {key: len(split.labels) for key, split in found.splits.items()}
  parts = split_parts.split_parts(ref.name, ref.split, sizes)
  chosen = [(found.splits[key], part) for key, part in parts]
  images = np.concatenate([split.images[part] for split, part in chosen])
  labels = np.concatenate([split.labels[part] for split, part in chosen])
  # As files they are read as those of any other split.
  encoded = tf.stack([tf.io.encode_png(image) for image in images])
  digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
  return Split(
    name=ref.name,
    split=ref.split,
    size=len(labels),
    class_names=found.class_names,
    fetch=fetch_from_memory(encoded, tf.constant(labels)),
    data_files=DataFiles(facts={"pictures": digest}),
    labels=labels,
  )


def _digits(name: str) -> _Shipped:
  """A range of the digits of scikit-learn; every fifth is for the test."""
  match = re.fullmatch(r"digits(?::([0-9])-([0-9]))?", name)
  first, last = (int(match[1] or 0), int(match[2] or 9)) if match else (1, 0)
  if first > last:
    raise DataError(
      f"data set {name!r}: expected 'digits', or a range such as 'digits:0-4'."
    )
  images, digits = _all_digits()
  train, test = [], []
  for digit in range(first, last + 1):
    indices = np.flatnonzero(digits == digit)
    train.append(np.delete(indices, np.s_[4::5]))
    test.append(indices[4::5])
  # Sorted, as they come in scikit-learn: the classes are mixed.
  chosen = {
    "train": np.sort(np.concatenate(train)),
    "test": np.sort(np.concatenate(test)),
  }
  return _Shipped(
    {
      key: _LabelledImages(images[i], digits[i] - first)
      for key, i in chosen.items()
    },
    tuple(str(digit) for digit in range(first, last + 1)),
  )


@functools.cache
def _all_digits() -> _LabelledImages:
  import sklearn.datasets  # takes a second, and only digits need it

  images, digits = sklearn.datasets.load_digits(return_X_y=True)
  # They are from 0 to 16.
  images = np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
  return _LabelledImages(images, digits.astype(np.int32))


def _inverted(name: str) -> _Shipped:
  """The glyphs, light on dark; see the card in `memory_vit/glyphs`."""
  if name != _GLYPHS:
    raise DataError(f"data set {name!r}: expected {_GLYPHS!r}.")
  with np.load(glyphs.INVERTED) as arrays:
    return _Shipped(
      {
        key: _LabelledImages(
          arrays[f"{key}_images"], arrays[f"{key}_labels"].astype(np.int32)
        )
        for key in ("train", "test")
      },
      tuple(map(str, arrays["class_names"])),
    )
