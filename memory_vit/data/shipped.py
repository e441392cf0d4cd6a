"""Data sets that come with packages: digits of scikit-learn, and glyphs."""

import functools
import hashlib
import io
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from memory_vit import glyphs
from memory_vit.data import split_parts
from memory_vit.data.data_files import DataFiles
from memory_vit.data.memory_source import MemorySource
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import DataError
from memory_vit.kinds import KINDS

_GLYPHS = "glyphs:inverted"
_ANGLE = "glyphs:angle"
# Labels of digits, for tasks of labels: {label: digits that have this label}.
_PROPERTIES = {
  "even": (0, 2, 4, 6, 8), "above 4": (5, 6, 7, 8, 9), "prime": (2, 3, 5, 7)
}  # fmt: skip
# Constants for rotating glyphs: maximum angle in degrees, padding in pixels and
# the golden ratio, whose multiples modulo 1 are spread evenly over [0, 1).
_MOST_TURNED, _AROUND, _GOLDEN = 45, 8, 0.6180339887


class _LabelledImages(NamedTuple):
  """Images, uint8 (n, side, side, 1 or 3), and labels as in `Split.labels`."""

  images: np.ndarray
  labels: np.ndarray


class _Shipped(NamedTuple):
  """Data set that an installed package contains, in memory.

  Attributes:
    splits: {"train": images, "test": images}, in orders that mix the classes.
    class_names: names of the classes, labels or values.
  """

  splits: dict[str, _LabelledImages]
  class_names: tuple[str, ...]


def open_shipped(ref: SplitRef) -> Split:
  if ref.name.partition(":")[0] == "digits":
    dataset = _digits(ref.name)
    ref.require_kind("classes", "labels")
    if not KINDS[ref.kind].one_is_right:
      dataset = _with_properties(dataset)
  elif ref.name == _ANGLE:
    ref.require_kind("values")
    dataset = _turned()
  else:
    dataset = _inverted(ref.name)
    ref.require_kind("classes")
  sizes = {key: len(split.labels) for key, split in dataset.splits.items()}
  parts = split_parts.split_parts(ref.name, ref.split, sizes)
  chosen = [(dataset.splits[key], part) for key, part in parts]
  images = np.concatenate([split.images[part] for split, part in chosen])
  labels = np.concatenate([split.labels[part] for split, part in chosen])
  encoded = [_png(image) for image in images]
  digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
  return Split(
    name=ref.name,
    split=ref.split,
    size=len(labels),
    class_names=dataset.class_names,
    kind=ref.kind,
    source=MemorySource(encoded, labels),
    data_files=DataFiles(facts={"pictures": digest}),
    labels=labels,
  )


def _png(image: np.ndarray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(image.squeeze()).save(file, "PNG")
  return file.getvalue()


def _digits(name: str) -> _Shipped:
  """Load the digits in the range that `name` states.

  Every fifth image of a digit is in "test".
  """
  match = re.fullmatch(r"digits(?::([0-9])-([0-9]))?", name)
  first, last = (int(match[1] or 0), int(match[2] or 9)) if match else (1, 0)
  if first > last:
    raise DataError(
      f"data set {name!r} is unknown: expected 'digits', or a range such as "
      "'digits:0-4'."
    )
  images, digits = _all_digits()
  train, test = [], []
  for digit in range(first, last + 1):
    indices = np.flatnonzero(digits == digit)
    train.append(np.delete(indices, np.s_[4::5]))
    test.append(indices[4::5])
  # Sort the indices to restore scikit-learn's order, which mixes the classes.
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


def _with_properties(digits: _Shipped) -> _Shipped:
  """Replace the class of each image by labels: properties of the digit."""
  names = map(int, digits.class_names)
  rows = [[name in p for p in _PROPERTIES.values()] for name in names]
  table = np.array(rows, np.float32)
  splits = {
    key: split._replace(labels=table[split.labels])
    for key, split in digits.splits.items()
  }
  return _Shipped(splits, tuple(_PROPERTIES))


@functools.cache
def _all_digits() -> _LabelledImages:
  import sklearn.datasets  # a slow import, which only digits need

  images, digits = sklearn.datasets.load_digits(return_X_y=True)
  images = np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
  return _LabelledImages(images, digits.astype(np.int32))


def _inverted(name: str) -> _Shipped:
  """Load the inverted glyphs (light on dark), see `memory_vit/glyphs`."""
  if name != _GLYPHS:
    raise DataError(
      f"data set {name!r} is unknown: expected {_GLYPHS!r} or {_ANGLE!r}."
    )
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


@functools.cache
def _turned() -> _Shipped:
  """Load the glyphs, each rotated counterclockwise by the angle in its label.

  The corners of a rotated image show pixels mirrored at the image's border.
  """
  pads = [(0, 0), (_AROUND, _AROUND), (_AROUND, _AROUND), (0, 0)]
  splits = {}
  for key, (images, _) in _inverted(_GLYPHS).splits.items():
    shares = np.arange(len(images)) * _GOLDEN % 1
    angles = ((2 * shares - 1) * _MOST_TURNED).astype(np.float32)
    inside = slice(_AROUND, _AROUND + images.shape[1])
    turned = [
      np.asarray(
        Image.fromarray(image).rotate(float(angle), Image.Resampling.BILINEAR)
      )[inside, inside]
      for image, angle in zip(
        np.pad(images, pads, "reflect"), angles, strict=True
      )
    ]
    splits[key] = _LabelledImages(
      np.stack(turned), angles[:, None].astype(np.float64)
    )
  return _Shipped(splits, ("angle",))
