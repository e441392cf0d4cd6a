"""VTAB-1k in small: all tasks by their names, with their shapes and labels.

The images are drawn: their colour says the class, so that there is something to
learn. There are fewer of them than the benchmark has.
"""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from memory_vit.benchmark.tasks import TASKS, VtabTask

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
  """Write the prepared folder: images and lists of tasks; all by default."""
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
  return root
