"""VTAB-1k in small: all tasks by their names, with their shapes and labels.

The images are drawn: their colour says the class, so that there is something to
learn. There are fewer of them than the benchmark has.
"""

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from studies.vtab.tasks import TASKS, VtabTask

# Height and width of the images, of some where they differ.
SHAPES = {
  "cifar": (32, 32),
  "caltech101": (200, 300),
  "dtd": (300, 320),
  "oxford_flowers102": (240, 300),
  "oxford_iiit_pet": (250, 200),
  "svhn": (32, 32),
  "sun397": (200, 260),
  "patch_camelyon": (96, 96),
  "eurosat": (64, 64),
  "resisc45": (256, 256),
  "diabetic_retinopathy": (300, 300),
  "clevr_count": (320, 480),
  "clevr_dist": (320, 480),
  "dmlab": (360, 480),
  "kitti": (186, 620),
  "dsprites_loc": (64, 64),
  "dsprites_ori": (64, 64),
  "smallnorb_azi": (96, 96),
  "smallnorb_ele": (96, 96),
}


def drawn(task: VtabTask, label: int, seed: int) -> np.ndarray:
  """An image of a class, uint8 (h, w, 3): its colour, and a little noise."""
  height, width = SHAPES[task.name]
  rng = np.random.default_rng([seed, label])
  angle = 2 * np.pi * label / task.classes
  colour = 128 + 100 * np.cos(angle + np.array([0.0, 2.1, 4.2]))
  noise = rng.normal(0, 8, (height // 8 + 1, width // 8 + 1, 3))
  rows = np.kron(noise, np.ones((8, 8, 1)))[:height, :width]
  return np.clip(colour + rows, 0, 255).astype(np.uint8)


def labels_of(task: VtabTask, count: int, first: int = 0) -> list[int]:
  """So many labels, the last class among them."""
  return [(task.classes - 1 - i - first) % task.classes for i in range(count)]


def write_folder(
  root: pathlib.Path,
  names: Sequence[str] = (),
  *,
  train: int = 16,
  held_out: int = 8,
  test: int = 12,
) -> pathlib.Path:
  """Write the prepared folder: images and lists of tasks, all by default."""
  for task in TASKS:
    if names and task.name not in names:
      continue
    folder = root / task.name
    (folder / "images").mkdir(parents=True)
    lists: dict[str, list[str]] = {}
    number = 0
    for split, count in (
      ("train800", train), ("val200", held_out), ("test", test),
    ):  # fmt: skip
      for label in labels_of(task, count, number if task.classes < 20 else 0):
        file = f"images/{number:06}.jpg"
        content = io.BytesIO()
        Image.fromarray(drawn(task, label, number)).save(content, "JPEG")
        (folder / file).write_bytes(content.getvalue())
        lists.setdefault(split, []).append(f"{file} {label}\n")
        number += 1
    lists["train800val200"] = [*lists["train800"], *lists["val200"]]
    for split, lines in lists.items():
      (folder / f"{split}.txt").write_text("".join(lines))
    if number < task.classes:  # the lists of the benchmark have all classes
      classes = map(str, range(task.classes))
      (folder / "classes.txt").write_text("\n".join(classes))
  return root


def write_tfds(
  root: pathlib.Path, *, train: int = 100, held_out: int = 8, test: int = 12
) -> pathlib.Path:
  """Write the 16 data sets, with the features and versions that TFDS has.

  Of three of them two tasks are asked; their images show the class of the
  first. Those that hold out a part of "train" have so many that 90 % of them
  come before it.
  """
  for name in dict.fromkeys(task.tfds for task in TASKS):
    task = next(task for task in TASKS if task.tfds == name)
    real = tfds.builder(name, data_dir=root)
    sizes = {"train": train, "validation": held_out, "test": test}
    if task.tfds == "smallnorb":
      sizes["test"] = 2 * test
    splits = {
      split: [
        (i, _example(task, real.info.features, label, i))
        for i, label in enumerate(labels_of(task, size))
      ]
      for split, size in sizes.items()
    }
    tfds.dataset_builders.store_as_tfds_dataset(
      name=real.name,
      version=str(real.version),
      config=real.builder_config.name if real.builder_config else None,
      features=real.info.features,
      split_datasets=splits,
      data_dir=root,
    )
  return root


def _example(
  task: VtabTask,
  features: tfds.features.FeaturesDict,
  label: int,
  seed: int,
) -> dict[str, Any]:
  """An example of a class; features that no task reads are empty."""
  image = drawn(task, label, seed)
  made: dict[str, Any] = {
    key: _empty(feature, image.shape) for key, feature in features.items()
  }
  channels = features["image"].shape[-1]
  made["image"] = image if channels == 3 else image[:, :, :1]
  if task.tfds == "dsprites":  # a mask
    made["image"] = (made["image"] > 128).astype(np.uint8)
    made["label_x_position"] = 2 * label
    made["label_orientation"] = (5 * label + 1) // 2
  elif task.tfds == "smallnorb":
    made["label_azimuth"], made["label_elevation"] = label, label % 9
  elif task.tfds == "clevr":
    # The number of objects is one task, the depth of the nearest the other.
    nearest = (7.0, 8.2, 8.7, 9.2, 9.7, 11.0)[label % 6]
    made["objects"] = [
      {**_empty_row(features["objects"]), "pixel_coords": _point(nearest + i)}
      for i in range(label + 3)
    ]
  elif task.tfds == "kitti":
    depth = (5.0, 15.0, 40.0, 40.0)[label]
    row = {**_empty_row(features["objects"]), "location": _point(depth)}
    made["objects"] = [{**row, "type": 7 if label == 3 else 0}]
  else:
    made["label"] = label
  return made


def _point(depth: float) -> np.ndarray:
  return np.array([0, 0, depth], np.float32)


def _empty_row(sequence: Any) -> dict[str, Any]:
  """An object of an image, without values."""
  row = {k: _empty(f, ()) for k, f in sequence.feature.items()}
  if "bbox" in row:
    row["bbox"] = tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
  return row


def _empty(feature: Any, shape: Sequence[int]) -> Any:
  """A value without content."""
  if isinstance(feature, tfds.features.Image):
    height, width, channels = feature.shape
    return np.zeros((height or shape[0], width or shape[1], channels), np.uint8)
  if isinstance(feature, tfds.features.Text):
    return ""
  if isinstance(feature, tfds.features.Sequence):
    return []
  if isinstance(feature, tfds.features.BBoxFeature):
    return tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
  return np.zeros(feature.shape, feature.np_dtype) if feature.shape else 0
