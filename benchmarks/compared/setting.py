"""The model, images and numbers that every library is measured with."""

import dataclasses
import json
from pathlib import Path

import numpy as np

_FILE = "setting.json"
# (width, blocks, heads, width of the MLP) of what may be compared.
SIZES = {
  "Ti/16": (192, 12, 3, 768),
  "S/16": (384, 12, 6, 1536),
  "B/16": (768, 12, 12, 3072),
}


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes of the model, the tasks and the batch that are compared.

  Attributes:
    variant: of the ViT, one of `SIZES`.
    image_size: side in pixels.
    batch: images in a step and in a pass.
    classes: of every task, and of the backbone's own head.
    cells: of memory, for the libraries of this method.
    rank: of LoRA.
    tasks: numbers of tasks at inference.
    rounds: how often everything is timed in a process.
    threads: of PyTorch.
    clock: by which everything is timed, see `rounds.CLOCKS`.
  """

  variant: str
  image_size: int
  batch: int
  classes: int
  cells: int
  rank: int
  tasks: tuple[int, ...]
  rounds: int
  threads: int
  clock: str = "wall"

  def write(self, folder: Path) -> None:
    """Write it, and random images and labels, into `folder`."""
    (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)))
    rng = np.random.default_rng(0)
    shape = (self.batch, self.image_size, self.image_size, 3)
    images = np.clip(rng.standard_normal(shape) / 3, -1, 1)
    np.save(folder / "images.npy", images.astype(np.float32))
    np.save(folder / "labels.npy", np.arange(self.batch) % self.classes)

  @classmethod
  def read(cls, folder: Path) -> "Setting":
    """Read what `write` wrote."""
    values = json.loads((folder / _FILE).read_text())
    return cls(**{**values, "tasks": tuple(values["tasks"])})


def images(folder: Path) -> np.ndarray:
  """Images in [-1, 1], float32 (batch, side, side, 3)."""
  return np.load(folder / "images.npy")


def labels(folder: Path) -> np.ndarray:
  """Labels, int (batch,)."""
  return np.load(folder / "labels.npy")


def expected(folder: Path) -> np.ndarray:
  """Logits of memory_vit's plain backbone, which `comparison` has computed."""
  return np.load(folder / "logits.npy")
