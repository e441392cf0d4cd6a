"""Find the data of VTAB-1k: the prepared folder, or data sets of TFDS.

The prepared folder has NAME/train800.txt, val200.txt and test.txt for every
task, with the lines of `data.file_list`. Data sets of TFDS must be prepared,
NAME/[CONFIG/]VERSION/dataset_info.json; their splits are cut as the benchmark's
own code cuts them. The prepared folder takes precedence.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from studies.record import read_json
from studies.vtab.tasks import VtabTask

# Training and validation images, the first ones of their splits.
TRAINED, HELD_OUT = 800, 200
_LISTS = ("train800", "val200", "test")
_VERSION = re.compile(r"\d+\.\d+\.\d+", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData:
  """The data options of a task: `config.data.name` and others; splits."""

  task: VtabTask
  name: str
  dir: str
  label: str = ""
  train: str  # the 800
  held_out: str  # the 200
  test: str

  @property
  def both(self) -> str:
    """The split of all 1,000."""
    return f"{self.train}+{self.held_out}"


def find(
  directory: Path, tasks: Sequence[VtabTask]
) -> tuple[tuple[TaskData, ...], dict[str, str]]:
  """Find the data of tasks, and say what others lack; opens no split."""
  found, missing = [], {}
  for task in tasks:
    there = _in_folder(directory, task) or _in_tfds(directory, task)
    if isinstance(there, TaskData):
      found.append(there)
    else:
      missing[task.name] = there or f"there is no {task.name}, nor {task.tfds}"
  if not found:
    named = ", ".join(task.name for task in tasks)
    raise mv.MemoryVitError(
      f"--dir={directory} has no data of {named}: expected NAME/train800.txt, "
      "NAME/val200.txt and NAME/test.txt, as the prepared VTAB-1k folder has, "
      "or data sets prepared by TFDS. See docs/dev/studies.md of the "
      "repository."
    )
  return tuple(found), missing


def _in_folder(directory: Path, task: VtabTask) -> TaskData | str:
  """A task in the prepared folder; what is missing, or ""."""
  folder = directory / task.name
  absent = [f for f in _LISTS if not (folder / f"{f}.txt").is_file()]
  if absent == list(_LISTS):
    return ""
  if absent:
    return f"{task.name}/ has no {absent[0]}.txt"
  train, held_out, test = _LISTS
  return TaskData(
    task=task, name="list", dir=str(folder),
    train=train, held_out=held_out, test=test,
  )  # fmt: skip


def _in_tfds(directory: Path, task: VtabTask) -> TaskData | str:
  """A task among data sets of TFDS; what is wrong with it, or ""."""
  versions = [
    path.parent
    for path in (directory / task.tfds).glob("*/dataset_info.json")
    if _VERSION.fullmatch(path.parent.name)
  ]
  if not versions:
    return ""
  newest = max(versions, key=lambda p: [int(n) for n in p.name.split(".")])
  try:
    sizes = _sizes(read_json(newest / "dataset_info.json"))
  except mv.MemoryVitError as error:
    return str(error)
  named = {"train": 1, task.held_out[0]: 1, task.tested[0]: 1}
  if absent := sorted(named.keys() - sizes.keys()):
    return f"{task.tfds} has no split {absent[0]!r}"
  split, percent = task.held_out
  begin = percent * sizes[split] // 100
  return TaskData(
    task=task,
    name=f"{task.tfds}:{newest.name}",
    dir=str(directory),
    label=task.label,
    train=f"train[:{TRAINED}]",
    held_out=f"{split}[{begin}:{begin + HELD_OUT}]",
    test=_from(sizes, *task.tested),
  )


def _from(sizes: Mapping[str, int], split: str, percent: int) -> str:
  """The rest of a split, from a percentage of it."""
  return f"{split}[{percent * sizes[split] // 100}:]" if percent else split


def _sizes(info: Mapping[str, Any]) -> dict[str, int]:
  """The number of examples in every split, as TFDS recorded it."""
  try:
    return {
      entry["name"]: sum(int(length) for length in entry["shardLengths"])
      for entry in info["splits"]
    }
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise mv.MemoryVitError(
      "its dataset_info.json does not say how many examples there are"
    ) from error
