"""Find the image and the label in the examples of a TFDS data set.

In most data sets, both are features. For tasks of labels or values, the numbers
in one or several features are concatenated. Five tasks of the benchmark VTAB
compute their label from features, here as in VTAB's own code
(google-research/task_adaptation).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memory_vit.data import image_ops
from memory_vit.data.quiet_tensorflow import tf, tfds
from memory_vit.errors import DataError
from memory_vit.kinds import KINDS, Kind
from memory_vit.runtime import messages

# Example of a data set, {name of a feature: value}; sequences become arrays.
_Example = Mapping[str, Any]
_Features = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
  """Places of the image and of the label in an example.

  Attributes:
    image: name of the feature that holds the image.
    label: function: example -> its label, an integer (), or numbers (c,).
    class_names: one name per class, label or value.
    is_mask: whether pixels are 0 or 1; `take` replaces 1 by 255.
    kind: kind of the label, see `Split`.
  """

  image: str
  label: Callable[[_Example], tf.Tensor]
  class_names: tuple[str, ...]
  is_mask: bool = False
  kind: str = "classes"

  @property
  def label_dtype(self) -> np.dtype:
    return KINDS[self.kind].target_dtype(len(self.class_names))

  def take(self, example: _Example) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the encoded image, string (), and the label; see `Source`."""
    encoded = example[self.image]
    if self.is_mask:
      white = tf.cast(image_ops.decode(encoded) > 0, tf.uint8) * 255
      encoded = tf.io.encode_png(white)
    label = tf.cast(self.label(example), self.label_dtype.base)
    return encoded, tf.ensure_shape(label, self.label_dtype.shape)


@dataclasses.dataclass(frozen=True)
class _Computed:
  """Class label that is computed from features of an example.

  Attributes:
    needs: paths of the features, such as "objects/size".
    label: returns the class of an example, as a tensor of shape ().
    class_names: names of the classes.
  """

  needs: tuple[str, ...]
  label: Callable[[_Example], tf.Tensor]
  class_names: tuple[str, ...]


def find_target(
  name: str,
  features: _Features,
  supervised_keys: Sequence[str] | None,
  label: str = "",
  kind: str = "classes",
) -> Target:
  """Find the image and the label of a TFDS data set.

  `label` is a feature or a label of VTAB; for labels and values, one or several
  features. It may be "" if the data set has a single suitable feature.
  """
  image = _find_image(features, supervised_keys)
  one_is_right = KINDS[kind].one_is_right
  if not label and one_is_right:
    image, label = find_keys(name, features, supervised_keys)
  if image is None:
    raise DataError(
      f"data set {messages.brief(name)} has no 8-bit Image, or several: "
      f"expected exactly one. The features are {_shown(features)}."
    )
  is_mask = name == "dsprites" or label.startswith("dsprites_")
  if not one_is_right:
    rows = _find_rows(name, features, label, KINDS[kind])
    return Target(
      image,
      lambda example: tf.concat([row.take(example) for row in rows], axis=0),
      tuple(name for row in rows for name in row.names),
      is_mask,
      kind,
    )
  if label in VTAB_LABELS:
    computed = VTAB_LABELS[label]
    _require(name, features, label, computed.needs)
    return Target(image, computed.label, computed.class_names, is_mask)
  feature = dict(features.items()).get(label)
  if not isinstance(feature, tfds.features.ClassLabel):
    raise DataError(
      f"config.data.label is {messages.brief(label)}, expected a ClassLabel of "
      f"data set {messages.brief(name)} (its features are {_shown(features)}), "
      f"or one of {', '.join(VTAB_LABELS)}."
    )
  return Target(
    image, lambda example: example[label], tuple(feature.names), is_mask
  )


def find_keys(
  name: str, features: _Features, supervised_keys: Sequence[str] | None
) -> tuple[str, str]:
  """Find the features of a TFDS data set that hold the image and its class.

  `supervised_keys` of TFDS are None (sun397), or the keys of image and label,
  sometimes followed by further keys (places365_small).
  """
  classes = [
    key
    for key, feature in features.items()
    if isinstance(feature, tfds.features.ClassLabel)
  ]
  _, stated = (*(supervised_keys or ()), None, None)[:2]
  image = _find_image(features, supervised_keys)
  label = _only(classes, stated, "label")
  if image is None or label is None:
    raise DataError(
      f"data set {name!r} does not have one image and one class per example: "
      "expected one 8-bit Image and one ClassLabel. If there are several "
      "ClassLabels, set config.data.label to the name of one. The features are "
      f"{_shown(features)}."
    )
  return image, label


@dataclasses.dataclass(frozen=True)
class _Row:
  """Part of a label: k numbers that are read from one feature of an example.

  Attributes:
    names: names of the k numbers.
    take: function: example -> numbers, (k,).
  """

  names: tuple[str, ...]
  take: Callable[[_Example], tf.Tensor]


# Texts in errors: features that fit tasks of labels (`_LABELS`), and features
# that fit tasks of values (`_NUMBERS`).
_LABELS = (
  "a Sequence of ClassLabels, a FeaturesDict of booleans, or booleans and "
  "ClassLabels of two classes"
)
_NUMBERS = "a number, or a Tensor or a FeaturesDict of numbers"


def _find_rows(
  name: str, features: _Features, label: str, kind: Kind
) -> list[_Row]:
  """Return the rows (`_Row`) of all features that are listed in `label`.

  The numbers of all these rows, concatenated, are the label of an example. If
  `label` is "", return the rows of the only feature that fits `kind`.
  """
  keys = [k.strip() for k in label.split(",")] if label else [*features.keys()]
  candidates = {key: _rows(key, features, kind) for key in keys}
  if not label:
    candidates = {key: rows for key, rows in candidates.items() if rows}
  if not all(candidates.values()) or not (label or len(candidates) == 1):
    raise DataError(
      f"config.data.label is {messages.brief(label)} and config.task.kind "
      f"is {kind.name!r}: expected {_NUMBERS if kind.numbers else _LABELS}. "
      "Separate the names of several features by commas. The features of data "
      f"set {messages.brief(name)} are {_shown(features)}."
    )
  return [row for rows in candidates.values() for row in rows]


def _rows(key: str, features: _Features, kind: Kind) -> list[_Row]:
  """Return the rows (`_Row`) of a feature; [] if it does not fit `kind`."""
  types, feature = tfds.features, _at(features, key)
  if isinstance(feature, types.FeaturesDict):
    parts = [
      _rows(f"{key}/{part}", features, kind) for part in sorted(feature.keys())
    ]
    return [row for rows in parts for row in rows] if all(parts) else []
  inner = getattr(feature, "feature", None)  # element of a Sequence
  if not kind.numbers and isinstance(inner, types.ClassLabel):
    names = tuple(inner.names)
    return [_Row(names, lambda e: _multi_hot(_at(e, key), len(names)))]
  if not isinstance(feature, types.Tensor):
    return []
  is_class = isinstance(feature, types.ClassLabel)
  if kind.numbers:
    fits = not is_class and np.issubdtype(feature.np_dtype, np.number)
  elif is_class:
    fits = feature.num_classes == 2
  else:
    fits = feature.np_dtype == np.bool_
  if not fits or len(feature.shape) > 1 or None in feature.shape:
    return []
  names = (key.rpartition("/")[2],)
  if feature.shape:
    names = tuple(f"{key}/{i}" for i in range(feature.shape[0]))
  dtype = kind.target_type
  return [_Row(names, lambda e: tf.reshape(tf.cast(_at(e, key), dtype), [-1]))]


def _at(tree: Any, path: str) -> Any:
  """Return the entry of nested dicts at a path like "a/b"; None if missing."""
  for key in path.split("/"):
    is_dict = isinstance(tree, Mapping | tfds.features.FeaturesDict)
    tree = tree[key] if is_dict and key in tree else None
  return tree


def _multi_hot(numbers: tf.Tensor, count: int) -> tf.Tensor:
  """Encode label numbers as multi-hot; all NaN if a number is invalid."""
  known = tf.reduce_all((numbers >= 0) & (numbers < count))
  ones = tf.reduce_max(tf.one_hot(numbers, count), axis=0)
  return tf.where(known, tf.maximum(ones, 0.0), np.nan)


def _find_image(
  features: _Features, supervised_keys: Sequence[str] | None
) -> str | None:
  """Return the key of the image; None if it is missing or ambiguous."""
  images = [
    key
    for key, feature in features.items()
    if type(feature) is tfds.features.Image and feature.np_dtype == np.uint8
  ]
  return _only(images, (*(supervised_keys or ()), None)[0], "image")


def _only(candidates: Sequence[str], *preferred: str | None) -> str | None:
  """Return the first of the `preferred` keys that is in `candidates`.

  Without such a key, return the only candidate; None if there are 0 or several.
  """
  for key in preferred:
    if key in candidates:
      return key
  return candidates[0] if len(candidates) == 1 else None


def _shown(features: _Features) -> dict[str, str]:
  return {key: type(feature).__name__ for key, feature in features.items()}


def _require(
  name: str, features: _Features, label: str, needs: Sequence[str]
) -> None:
  """Raise if a data set lacks a feature from which the label is computed."""
  for path in needs:
    inner: Any = features
    for key in path.split("/"):
      if isinstance(inner, tfds.features.Sequence):
        inner = inner.feature
      keys = inner.keys() if hasattr(inner, "keys") else ()
      inner = inner[key] if key in keys else None
    if inner is None:
      raise DataError(
        f"config.data.label is {label!r}, which is computed from the feature "
        f"{path!r}, but data set {messages.brief(name)} has only the features "
        f"{_shown(features)}."
      )


def _between(value: tf.Tensor, bounds: Sequence[float]) -> tf.Tensor:
  """Return the index of the bin that holds a value; `bounds` are the edges."""
  below = tf.constant(bounds, tf.float32) < tf.cast(value, tf.float32)
  return tf.reduce_sum(tf.cast(below, tf.int32)) - 1


def _clevr_count(example: _Example) -> tf.Tensor:
  """Return the class, 0 to 7, for 3 to 10 objects in the scene."""
  return tf.size(example["objects"]["size"]) - 3


def _clevr_distance(example: _Example) -> tf.Tensor:
  """Return the bin, 0 to 5, of the depth of the nearest object."""
  depth = tf.reduce_min(example["objects"]["pixel_coords"][:, 2])
  return _between(depth, (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def _kitti_distance(example: _Example) -> tf.Tensor:
  """Return the distance bin of the nearest car, van or truck; 3 if none."""
  objects = example["objects"]
  is_vehicle = objects["type"] < 3
  depths = tf.boolean_mask(objects["location"][:, 2], is_vehicle)
  nearest = tf.reduce_min(tf.concat([depths, [1000.0]], axis=0))
  return _between(nearest, (-100.0, 8.0, 20.0, 999.0))


def _binned(key: str, old: int, new: int) -> _Computed:
  """Return a label that bins a feature of `old` classes into `new` classes."""
  # Divide in float32, as VTAB does, because the width of a bin may be 2.5.
  return _Computed(
    (key,),
    lambda example: tf.math.floordiv(
      tf.cast(example[key], tf.float32), old / new
    ),
    tuple(map(str, range(new))),
  )


# Labels of VTAB that are computed from other features of an example:
# {value of `config.data.label`: label}.
VTAB_LABELS: Mapping[str, _Computed] = {
  "clevr_count": _Computed(
    ("objects/size",), _clevr_count, tuple(map(str, range(3, 11)))
  ),
  "clevr_distance": _Computed(
    ("objects/pixel_coords",),
    _clevr_distance,
    ("below 8", "8-8.5", "8.5-9", "9-9.5", "9.5-10", "above 10"),
  ),
  "kitti_distance": _Computed(
    ("objects/type", "objects/location"),
    _kitti_distance,
    ("below 8 m", "8-20 m", "above 20 m", "no vehicle"),
  ),
  "dsprites_x": _binned("label_x_position", 32, 16),
  "dsprites_orientation": _binned("label_orientation", 40, 16),
  "smallnorb_azimuth": _binned("label_azimuth", 18, 18),
  "smallnorb_elevation": _binned("label_elevation", 9, 9),
}
