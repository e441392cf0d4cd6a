"""The model, images and sizes with which every library is measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np

_FILE = "setting.json"
# Variant -> (width, blocks, heads, width of the MLP).
SIZES = {
  "Micro/16": (64, 4, 4, 256),
  "Ti/16": (192, 12, 3, 768),
  "S/16": (384, 12, 6, 1536),
  "B/16": (768, 12, 12, 3072),
}


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes of the model, the tasks and the batch."""

  variant: str
  image_size: int
  batch: int
  classes: int  # of every task, and of the backbone's own head
  cells: int
  rank: int
  tasks: tuple[int, ...]
  rounds: int
  threads: int
  clock: str = "wall"

  def write(self, folder: Path) -> None:
    """Write the setting, and random images and labels."""
    (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)))
    rng = np.random.default_rng(0)
    shape = (self.batch, self.image_size, self.image_size, 3)
    images = np.clip(rng.standard_normal(shape) / 3, -1, 1)
    np.save(folder / "images.npy", images.astype(np.float32))
    np.save(folder / "labels.npy", np.arange(self.batch) % self.classes)

  @classmethod
  def read(cls, folder: Path) -> "Setting":
    values = json.loads((folder / _FILE).read_text())
    return cls(**{**values, "tasks": tuple(values["tasks"])})


def images(folder: Path) -> np.ndarray:
  """Images in [-1, 1], float32 (batch, side, side, 3)."""
  return np.load(folder / "images.npy")


def labels(folder: Path) -> np.ndarray:
  """Labels, int (batch,)."""
  return np.load(folder / "labels.npy")


def expected(folder: Path) -> np.ndarray:
  """Logits of memory_vit's plain backbone, computed by `comparison`."""
  return np.load(folder / "logits.npy")
