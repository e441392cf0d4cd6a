"""The 19 tasks of VTAB-1k: names, groups, classes, splits, labels.

Facts of Zhai et al., "A Large-scale Study of Representation Learning with the
Visual Task Adaptation Benchmark" (2019), and of its code, task_adaptation of
google-research. Names are those of the folder in which the field hands the
benchmark around, and by which the code of its papers knows the tasks.
"""

import dataclasses
from collections.abc import Sequence

import memory_vit as mv

GROUPS = ("natural", "specialized", "structured")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabTask:
  """A task of 1,000 images: 800 to train on, 200 to choose on.

  Attributes:
    name: its folder in the prepared benchmark, and of the task that is learned.
    group: one of `GROUPS`.
    classes: how many.
    test_examples: images of the original test split, as the papers count them.
    tfds: its data set in TFDS, with the configuration.
    label: as `config.data.label` says which of several labels is meant.
    held_out: where the 200 begin in TFDS: a split, and per cent of it.
    tested: where the test split begins in TFDS: a split, and per cent of it.
  """

  name: str
  group: str
  classes: int
  test_examples: int
  tfds: str
  label: str = "label"
  held_out: tuple[str, int] = ("validation", 0)
  tested: tuple[str, int] = ("test", 0)


TASKS = (
  VtabTask(
    name="cifar",
    group="natural",
    classes=100,
    test_examples=10_000,
    tfds="cifar100",
    held_out=("train", 90),
  ),
  VtabTask(
    name="caltech101",
    group="natural",
    classes=102,
    test_examples=6_084,
    tfds="caltech101",
    held_out=("train", 90),
  ),
  VtabTask(
    name="dtd",
    group="natural",
    classes=47,
    test_examples=1_880,
    tfds="dtd",
  ),
  VtabTask(
    name="oxford_flowers102",
    group="natural",
    classes=102,
    test_examples=6_149,
    tfds="oxford_flowers102",
  ),
  VtabTask(
    name="oxford_iiit_pet",
    group="natural",
    classes=37,
    test_examples=3_669,
    tfds="oxford_iiit_pet",
    held_out=("train", 80),
  ),
  VtabTask(
    name="svhn",
    group="natural",
    classes=10,
    test_examples=26_032,
    tfds="svhn_cropped",
    held_out=("train", 90),
  ),
  VtabTask(
    name="sun397",
    group="natural",
    classes=397,
    test_examples=21_750,
    tfds="sun397/tfds",
  ),
  VtabTask(
    name="patch_camelyon",
    group="specialized",
    classes=2,
    test_examples=32_768,
    tfds="patch_camelyon",
  ),
  VtabTask(
    name="eurosat",
    group="specialized",
    classes=10,
    test_examples=5_400,
    tfds="eurosat/rgb",
    held_out=("train", 60),
    tested=("train", 80),
  ),
  VtabTask(
    name="resisc45",
    group="specialized",
    classes=45,
    test_examples=6_300,
    tfds="resisc45",
    held_out=("train", 60),
    tested=("train", 80),
  ),
  VtabTask(
    name="diabetic_retinopathy",
    group="specialized",
    classes=5,
    test_examples=42_670,
    tfds="diabetic_retinopathy_detection/btgraham-300",
  ),
  VtabTask(
    name="clevr_count",
    group="structured",
    classes=8,
    test_examples=15_000,
    tfds="clevr",
    label="clevr_count",
    held_out=("train", 90),
    tested=("validation", 0),
  ),
  VtabTask(
    name="clevr_dist",
    group="structured",
    classes=6,
    test_examples=15_000,
    tfds="clevr",
    label="clevr_distance",
    held_out=("train", 90),
    tested=("validation", 0),
  ),
  VtabTask(
    name="dmlab",
    group="structured",
    classes=6,
    test_examples=22_735,
    tfds="dmlab",
  ),
  VtabTask(
    name="kitti",
    group="structured",
    classes=4,
    test_examples=711,
    tfds="kitti",
    label="kitti_distance",
  ),
  VtabTask(
    name="dsprites_loc",
    group="structured",
    classes=16,
    test_examples=73_728,
    tfds="dsprites",
    label="dsprites_x",
    held_out=("train", 80),
    tested=("train", 90),
  ),
  VtabTask(
    name="dsprites_ori",
    group="structured",
    classes=16,
    test_examples=73_728,
    tfds="dsprites",
    label="dsprites_orientation",
    held_out=("train", 80),
    tested=("train", 90),
  ),
  VtabTask(
    name="smallnorb_azi",
    group="structured",
    classes=18,
    test_examples=12_150,
    tfds="smallnorb",
    label="smallnorb_azimuth",
    held_out=("test", 0),
    tested=("test", 50),
  ),
  VtabTask(
    name="smallnorb_ele",
    group="structured",
    classes=9,
    test_examples=12_150,
    tfds="smallnorb",
    label="smallnorb_elevation",
    held_out=("test", 0),
    tested=("test", 50),
  ),
)


def choose(names: Sequence[str]) -> tuple[VtabTask, ...]:
  """The tasks of these names, in the order of the table; all for no names.

  Raises:
    MemoryVitError: for a name that no task has.
  """
  known = [task.name for task in TASKS]
  for name in names:
    if name not in known:
      raise mv.MemoryVitError(
        f"--only={name!r}: VTAB-1k has no such task; expected some of "
        f"{', '.join(known)}, with commas between them."
      )
  return tuple(task for task in TASKS if not names or task.name in names)
