"""Data sets on this disk: folders of images, and the embedded digits."""

import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import sklearn.datasets

from memory_vit.data import image_paths, sources
from memory_vit.data.inventory import Inventory
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.sources import Source
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.images.image_files import SUFFIXES
from memory_vit.runtime.paths import local


def open_folder(ref: SplitRef) -> Source:
  """Open a split of an image folder with SPLIT/CLASS/IMAGE.

  Raises:
    DataError: where there is no such folder or split, or a class is empty.
  """
  root = local(ref.dir or ".", "the image folder", DataError)
  files, irregular = _files_of_splits(root, ref.dir)
  class_names = tuple(files["train"])
  label_of = {class_name: i for i, class_name in enumerate(class_names)}
  sizes = {key: sum(map(len, files[key].values())) for key in files}
  chosen = []
  for key, part in sources.split_parts(ref.name, ref.split, sizes):
    _check_classes(root / key, files[key], class_names)
    labelled = [
      (file, label_of[name]) for name in files[key] for file in files[key][name]
    ]
    chosen += image_paths.shuffled(labelled)[part]
  return image_paths.source_of(
    ref, root, chosen, class_names=class_names, irregular=irregular
  )


def open_digits(ref: SplitRef) -> Source:
  """Open a split of the digits of scikit-learn; every fifth is for the test.

  Raises:
    DataError: for another name, or a split that is not there.
  """
  match = re.fullmatch(r"digits(?::([0-9])-([0-9]))?", ref.name)
  first, last = (int(match[1] or 0), int(match[2] or 9)) if match else (1, 0)
  if first > last:
    raise DataError(
      f"data set {ref.name!r}: expected 'digits', or a range such as "
      "'digits:0-4'."
    )
  images, encoded, digits = _digits()
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
  parts = sources.split_parts(ref.name, ref.split, sizes)
  chosen = np.concatenate([splits[key][part] for key, part in parts])
  labels = tf.constant(digits[chosen] - first, tf.int32)
  return Source(
    name=ref.name,
    split=ref.split,
    size=len(chosen),
    class_names=tuple(str(digit) for digit in range(first, last + 1)),
    fetch=sources.fetch_from_memory(tf.gather(encoded, chosen), labels),
    inventory=Inventory(facts={"pictures": _digest(images[chosen], labels)}),
    labels=labels.numpy(),
  )


@functools.cache
def _digits() -> tuple[np.ndarray, tf.Tensor, np.ndarray]:
  """Images, uint8 (n, 8, 8, 1), the same as PNG files, and digits, (n,)."""
  images, digits = sklearn.datasets.load_digits(return_X_y=True)
  # They are from 0 to 16. As files they are read as any other source.
  images = np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
  return images, tf.stack([tf.io.encode_png(image) for image in images]), digits


def _digest(images: np.ndarray, labels: tf.Tensor) -> str:
  """SHA-256 of images in memory, and of their labels."""
  return hashlib.sha256(images.tobytes() + labels.numpy().tobytes()).hexdigest()


def _files_of_splits(
  root: pathlib.Path, directory: str
) -> tuple[dict[str, dict[str, list[str]]], dict[str, str]]:
  """Find all images of all splits below `root`, in messages `directory`.

  Returns:
    {split: {class: images}}, as paths relative to `root`, and {image: what it
    is} of those that are no regular files.
  """
  if not directory or not root.is_dir():
    raise DataError(
      f"image folder {directory!r} is not there: set config.data.dir to a "
      "directory that holds train/CLASS/*.jpg."
    )
  irregular: dict[str, str] = {}
  files = {
    folder.name: _image_files(folder, irregular) for folder in _folders(root)
  }
  if "train" not in files:
    raise DataError(
      f"image folder {directory!r} has no train/, whose folders are the "
      f"classes; it has {sorted(files)}."
    )
  return files, irregular


def _folders(root: pathlib.Path) -> list[pathlib.Path]:
  """The folders in a folder: splits, or classes. Their names must be UTF-8."""
  with os.scandir(root) as entries:
    names = sorted(
      entry.name
      for entry in entries
      if entry.is_dir() and not entry.name.startswith(".")
    )
  for name in names:
    if image_paths.shown(name) != name:
      raise BrokenDataError(
        f"the name of the folder {image_paths.shown(str(root / name))} is not "
        "UTF-8, so that it cannot be that of a class or a split: rename it."
      )
  return [root / name for name in names]


def _image_files(
  folder: pathlib.Path, irregular: dict[str, str]
) -> dict[str, list[str]]:
  """Find the images of a split, by their class.

  Adds to `irregular` what has the name of an image and is no regular file.

  Returns:
    {class: its images, as paths relative to the parent of `folder`}.
  """
  found: dict[str, list[str]] = {}
  for class_folder in _folders(folder):
    files = found[class_folder.name] = []
    with os.scandir(class_folder) as entries:
      for entry in entries:
        suffix = os.path.splitext(entry.name)[1]
        if suffix.lower() in SUFFIXES and not entry.name.startswith("."):
          file = f"{folder.name}/{class_folder.name}/{entry.name}"
          files.append(file)
          if not entry.is_file():  # links are followed
            irregular[file] = image_paths.why_irregular(entry.path)
  return found


def _check_classes(
  folder: pathlib.Path,
  files: Mapping[str, Sequence[str]],
  classes: Sequence[str],
) -> None:
  """Refuse a class that train/ does not have, or without images."""
  unknown = sorted(set(files) - set(classes))
  if unknown:
    raise BrokenDataError(
      f"{folder} has classes that train/ does not have: {unknown}."
    )
  empty = sorted(name for name, images in files.items() if not images)
  if empty:
    raise BrokenDataError(
      f"{folder} has no images ({', '.join(SUFFIXES)}) of classes {empty}."
    )
