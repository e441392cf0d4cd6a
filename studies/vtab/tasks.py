"""The 19 tasks of VTAB-1k: names, groups, classes, splits, labels.

From Zhai et al., "A Large-scale Study of Representation Learning with the
Visual Task Adaptation Benchmark" (2019), and its code, task_adaptation of
google-research. Names are those of the prepared folder that the field shares.
"""

import dataclasses
from collections.abc import Sequence

import memory_vit as mv

GROUPS = ("natural", "specialized", "structured")


@dataclasses.dataclass(frozen=True)
class VtabTask:
  """A task of 1,000 images: 800 for training, 200 for validation."""

  name: str  # also of its folder in the prepared benchmark
  group: str
  classes: int
  test_examples: int  # of the original test split, as the papers count them
  tfds: str  # its data set in TFDS
  label: str = "label"  # `config.data.label`
  # Where the 200 and the test split begin in TFDS: a split, per cent of it.
  held_out: tuple[str, int] = ("validation", 0)
  tested: tuple[str, int] = ("test", 0)


TASKS = (
  VtabTask("cifar", "natural", 100, 10_000, "cifar100", held_out=("train", 90)),
  VtabTask("caltech101", "natural", 102, 6_084, "caltech101",
           held_out=("train", 90)),
  VtabTask("dtd", "natural", 47, 1_880, "dtd"),
  VtabTask("oxford_flowers102", "natural", 102, 6_149, "oxford_flowers102"),
  VtabTask("oxford_iiit_pet", "natural", 37, 3_669, "oxford_iiit_pet",
           held_out=("train", 80)),
  VtabTask("svhn", "natural", 10, 26_032, "svhn_cropped",
           held_out=("train", 90)),
  VtabTask("sun397", "natural", 397, 21_750, "sun397/tfds"),
  VtabTask("patch_camelyon", "specialized", 2, 32_768, "patch_camelyon"),
  VtabTask("eurosat", "specialized", 10, 5_400, "eurosat/rgb",
           held_out=("train", 60), tested=("train", 80)),
  VtabTask("resisc45", "specialized", 45, 6_300, "resisc45",
           held_out=("train", 60), tested=("train", 80)),
  VtabTask("diabetic_retinopathy", "specialized", 5, 42_670,
           "diabetic_retinopathy_detection/btgraham-300"),
  VtabTask("clevr_count", "structured", 8, 15_000, "clevr",
           label="clevr_count", held_out=("train", 90),
           tested=("validation", 0)),
  VtabTask("clevr_dist", "structured", 6, 15_000, "clevr",
           label="clevr_distance", held_out=("train", 90),
           tested=("validation", 0)),
  VtabTask("dmlab", "structured", 6, 22_735, "dmlab"),
  VtabTask("kitti", "structured", 4, 711, "kitti", label="kitti_distance"),
  VtabTask("dsprites_loc", "structured", 16, 73_728, "dsprites",
           label="dsprites_x", held_out=("train", 80), tested=("train", 90)),
  VtabTask("dsprites_ori", "structured", 16, 73_728, "dsprites",
           label="dsprites_orientation", held_out=("train", 80),
           tested=("train", 90)),
  VtabTask("smallnorb_azi", "structured", 18, 12_150, "smallnorb",
           label="smallnorb_azimuth", held_out=("test", 0),
           tested=("test", 50)),
  VtabTask("smallnorb_ele", "structured", 9, 12_150, "smallnorb",
           label="smallnorb_elevation", held_out=("test", 0),
           tested=("test", 50)),
)  # fmt: skip


def choose(names: Sequence[str]) -> tuple[VtabTask, ...]:
  """The tasks with these names, in the order of the table; () is all."""
  known = [task.name for task in TASKS]
  for name in names:
    if name not in known:
      raise mv.MemoryVitError(
        f"--only={name!r}: VTAB-1k has no such task; expected some of "
        f"{', '.join(known)}, separated by commas."
      )
  return tuple(task for task in TASKS if not names or task.name in names)
