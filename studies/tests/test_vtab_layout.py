"""The tasks of VTAB-1k, and where their data are."""

import collections
import json

import pytest
import vtab_miniature

from memory_vit.errors import MemoryVitError
from studies.vtab import layout
from studies.vtab.tasks import GROUPS, TASKS, choose


def task(name):
  (found,) = choose([name])
  return found


def write_info(root, data_set, **sizes):
  """The sizes of splits, as TFDS writes them, in two shards."""
  directory = root / data_set
  directory.mkdir(parents=True)
  splits = [
    {"name": name, "shardLengths": [str(size - 1), "1"]}
    for name, size in sizes.items()
  ]
  text = json.dumps({"splits": splits})
  (directory / "dataset_info.json").write_text(text)


def test_tasks_are_those_of_the_benchmark():
  """Facts on which papers agree: groups, classes, and images."""
  counts = collections.Counter(t.group for t in TASKS)
  assert counts == {"natural": 7, "specialized": 4, "structured": 8}
  assert set(counts) == set(GROUPS)
  assert len({t.name for t in TASKS}) == 19
  classes = [t.classes for t in TASKS]
  assert classes == [
    100, 102, 47, 102, 37, 10, 397, 2, 10, 45, 5, 8, 6, 6, 4, 16, 16, 18, 9,
  ]  # fmt: skip
  # Three data sets have two tasks each.
  images = {t.tfds: t.test_examples for t in TASKS}
  assert len(images) == 16
  assert sum(images.values()) == 287_026


def test_unknown_task_is_refused():
  with pytest.raises(
    MemoryVitError, match="--only='cifar10': .* cifar, caltech"
  ):
    choose(["cifar", "cifar10"])
  assert [t.name for t in choose(["kitti", "cifar"])] == ["cifar", "kitti"]


def test_prepared_folder_is_found_and_missing_tasks_are_named(tmp_path):
  vtab_miniature.write_folder(
    tmp_path, ["cifar", "kitti", "dtd"], train=2, held_out=2, test=2
  )
  (tmp_path / "dtd" / "val200.txt").unlink()
  found, missing = layout.find(tmp_path, TASKS)
  assert [data.task.name for data in found] == ["cifar", "kitti"]
  first = found[0]
  assert (first.name, first.dir) == ("list", str(tmp_path / "cifar"))
  assert (first.train, first.held_out, first.test) == (
    "train800", "val200", "test",
  )  # fmt: skip
  assert first.both == "train800+val200"
  assert len(missing) == 17
  assert missing["dtd"] == "dtd/ has no val200.txt"
  assert missing["svhn"] == "there is no svhn, nor svhn_cropped"


def test_directory_without_data_is_refused(tmp_path):
  with pytest.raises(
    MemoryVitError, match="has no data of kitti: .*docs/dev/studies.md"
  ):
    layout.find(tmp_path, [task("kitti")])


@pytest.mark.parametrize(
  ("name", "sizes", "splits"),
  [
    # As task_adaptation cuts them: 90 % of 3,059 are 2,753 images.
    (
      "caltech101",
      {"train": 3_059, "test": 6_085},
      ("train[:800]", "train[2753:2953]", "test"),
    ),
    (
      "eurosat",
      {"train": 27_000},
      ("train[:800]", "train[16200:16400]", "train[21600:]"),
    ),
    (
      "clevr_count",
      {"train": 70_000, "validation": 15_000, "test": 15_000},
      ("train[:800]", "train[63000:63200]", "validation"),
    ),
    (
      "dmlab",
      {"train": 65_550, "validation": 22_628, "test": 22_735},
      ("train[:800]", "validation[0:200]", "test"),
    ),
    (
      "dsprites_ori",
      {"train": 737_280},
      ("train[:800]", "train[589824:590024]", "train[663552:]"),
    ),
    (
      "smallnorb_azi",
      {"train": 24_300, "test": 24_300},
      ("train[:800]", "test[0:200]", "test[12150:]"),
    ),
  ],
)
def test_tfds_splits_are_those_of_the_benchmark(tmp_path, name, sizes, splits):
  chosen = task(name)
  write_info(tmp_path, f"{chosen.tfds}/1.9.0", train=1)  # an older one
  write_info(tmp_path, f"{chosen.tfds}/1.10.0", **sizes)
  (found,), missing = layout.find(tmp_path, [chosen])
  assert not missing
  assert (found.train, found.held_out, found.test) == splits
  assert (found.name, found.dir) == (f"{chosen.tfds}:1.10.0", str(tmp_path))
  assert found.label == chosen.label


def test_tfds_data_set_without_a_split_is_left_out(tmp_path):
  write_info(tmp_path, "dtd/3.0.1", train=9, test=9)
  write_info(tmp_path, "kitti/3.3.0", train=9, test=9, validation=9)
  (tmp_path / "dmlab/2.0.1").mkdir(parents=True)
  info = tmp_path / "dmlab/2.0.1/dataset_info.json"
  info.write_text('{"splits": [{"name": "train"}]}')
  found, missing = layout.find(tmp_path, choose(["dtd", "kitti", "dmlab"]))
  assert [data.task.name for data in found] == ["kitti"]
  assert missing["dtd"] == "dtd has no split 'validation'"
  assert "how many examples" in missing["dmlab"]


def test_prepared_folder_takes_precedence_over_tfds(tmp_path):
  vtab_miniature.write_folder(tmp_path, ["dtd"], train=2, held_out=2, test=2)
  write_info(tmp_path, "dtd/3.0.1", train=9, validation=9, test=9)
  (found,), _ = layout.find(tmp_path, [task("dtd")])
  assert found.name == "list"
