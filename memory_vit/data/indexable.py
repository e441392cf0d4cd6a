"""Splits of Python objects: anything with a length and examples by number.

Data sets with random access of torch, torchvision, Hugging Face `datasets` and
Grain are objects of this form.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from etils import epy

from memory_vit.data import datasets, labels, python_images
from memory_vit.data.data_files import DataFiles
from memory_vit.data.labels import Encoder
from memory_vit.data.source import Source
from memory_vit.data.split import Split, require_kind
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import KINDS, Kind
from memory_vit.runtime import messages

with epy.lazy_imports():  # TensorFlow is not needed for data in memory
  from memory_vit.data import graph_source, python_op, quiet_tensorflow

if TYPE_CHECKING:
  import tensorflow as tf

_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)


class Indexable(Protocol):
  """Examples that are numbered from 0 on."""

  def __len__(self) -> int:
    """Return the number of examples."""

  def __getitem__(self, index: int, /) -> Any:
    """Return the example with the number `index`."""


def open_indexable(
  examples: Indexable,
  *,
  name: str,
  version: str,
  class_names: Sequence[str] = (),
  split: str = "all",
  keys: tuple[str, str] = ("image", "label"),
  parallel: bool = True,
  kind: str = "classes",
) -> Split:
  """Open the examples of a Python object as a split.

  An example is a pair (image, label), or a dictionary with `keys`; for images
  and labels see `train_task`.

  Args:
    examples: any object with `len` and examples by number. A number must always
      give the same example, without random augmentation.
    name: name of the data set, for messages and results.
    version: change it when the contents of examples change, because a resumed
      run compares only version, number of examples and classes.
    class_names: one name per class, label or value; by default the names in
      `features` (Hugging Face `datasets`) or `classes` (torchvision), and "0",
      "1", ... for values.
    split: name of the split, for messages and results.
    keys: keys of the image and the label, if an example is a dictionary.
    parallel: whether several threads may ask for examples at once.
    kind: what a label is, as `config.task.kind`.

  Raises:
    DataError: if the examples have no length, or state no classes.
    BrokenDataError: if the first example cannot be read.
  """
  if not _NAME.fullmatch(name) or not version or not split:
    raise DataError(
      f"the examples have the name {messages.brief(name)}, version "
      f"{messages.brief(version)} and split {messages.brief(split)}: expected "
      "a name of letters, digits, '.', '_' and '-', and a version and a split "
      "that are not empty."
    )
  size = _count(examples, name)
  require_kind(kind, SplitRef(f"python:{name}", "", split))
  classes = tuple(class_names) or stated_classes(examples, keys[1], kind)
  if not classes and KINDS[kind].numbers:
    classes = _numbered(examples, keys, name, KINDS[kind])
  if not classes:
    raise DataError(
      f"the examples of {name!r} do not say what their {kind} are called: "
      "give class_names."
    )
  opened = Split(
    name=f"python:{name}",
    split=split,
    size=size,
    class_names=classes,
    kind=kind,
    source=_source(examples, keys, parallel, Encoder(kind, classes)),
    data_files=DataFiles(facts={"examples": size, "version": version}),
  )
  datasets.check_first_label(opened)
  return opened


def _count(examples: Indexable, name: str) -> int:
  kind = type(examples).__name__
  if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
    raise DataError(
      f"the examples of {name!r} are of type {kind}: expected an object with "
      "`__len__` and `__getitem__`. Convert a stream to a list."
    )
  if not len(examples):
    raise DataError(f"the examples of {name!r} are an empty {kind}.")
  return len(examples)


def stated_classes(examples: Any, label: str, kind: str) -> tuple[str, ...]:
  """Return the classes that a library's data set states; () for values."""
  if KINDS[kind].numbers:
    return ()
  features = getattr(examples, "features", None)
  feature = features.get(label) if isinstance(features, Mapping) else None
  feature = getattr(feature, "feature", feature)  # unwrap a Sequence
  stated = getattr(feature, "names", None) or getattr(examples, "classes", None)
  if not stated or not all(isinstance(name, str) for name in stated):
    return ()
  return tuple(stated)


def _numbered(
  examples: Indexable, keys: tuple[str, str], name: str, kind: Kind
) -> tuple[str, ...]:
  """Return the names "0", "1", ..., one for each value of the first example."""
  try:
    _, label = pair_of(examples[0], keys)
    return labels.names_among([kind.read(label)])
  except Exception as error:  # a user's object may raise any error
    raise BrokenDataError(
      f"the examples of {name!r}, example 0: {error}."
    ) from error


def _source(
  examples: Indexable,
  keys: tuple[str, str],
  parallel: bool,
  encode: Encoder,
) -> Source:
  lock = contextlib.nullcontext() if parallel else threading.Lock()
  kind, dtype = KINDS[encode.kind], encode.dtype

  def read(index: int) -> tuple[bytes, np.ndarray]:
    with lock:
      image, raw_label = pair_of(examples[int(index)], keys)
      label = kind.read(raw_label)
      # Do not check integers here: `Split.check_labels` raises a better error.
      number = label if isinstance(label, int) else encode(label)
      return python_images.encoded(image), np.array(number, dtype.base)

  def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    tf = quiet_tensorflow.tf
    encoded, label = python_op.call(read, [index], [tf.string, dtype.base])
    return tf.ensure_shape(encoded, ()), tf.ensure_shape(label, dtype.shape)

  return graph_source.GraphSource(fetch)


def pair_of(example: Any, keys: tuple[str, str]) -> tuple[Any, Any]:
  if isinstance(example, Mapping):
    if not all(key in example for key in keys):
      raise DataError(
        f"the keys are {messages.brief([*example])}, expected {list(keys)}: to "
        "use other keys, give keys=(IMAGE, LABEL)"
      )
    return example[keys[0]], example[keys[1]]
  if isinstance(example, Sequence) and len(example) == 2:
    return example[0], example[1]
  kind = type(example).__name__
  raise DataError(
    f"the example is of type {kind}, expected (image, label) or a dictionary; "
    "to give all images and all labels at once, use the tuple (images, labels)"
  )
