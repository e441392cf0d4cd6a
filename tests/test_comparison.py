"""The table of `benchmarks.comparison`, and what every library is given."""

import numpy as np

from benchmarks import comparison
from benchmarks.compared import rounds, setting

SETTING = setting.Setting(
  variant="Ti/16", image_size=8, batch=3, classes=2, cells=1, rank=1,
  tasks=(1, 4), rounds=1, threads=1,
)  # fmt: skip


def one(name, ratios, **more):
  return {
    "name": name, "version": "1", "runs_on": "here", "parameters": 1234,
    "file_bytes": 2048, "seconds_forward": 0.25, "original_difference": 0.0,
    "task_difference": 2e-7, "ratios": ratios, **more,
  }  # fmt: skip


def test_a_row_for_all_that_any_library_has():
  found = comparison.table(
    [
      one("A", {"train": [1.0, 1.25, 1.5], "infer_1": [1, 1, 1]}),
      one(
        "B",
        {"train": [2, 2, 2], "infer_4_one_batch": [3, 4, 5]},
        original_difference_one_batch=1e-6,
      ),
    ],
    SETTING,
  )
  assert found[:2] == ["|  | A | B |", "|---|---|---|"]
  cells = [[c.strip() for c in line.split("|")[1:-1]] for line in found]
  rows = {name: values for name, *values in cells}
  assert rows["training step, one task"] == [
    "1.25 (1.00 to 1.50)", "2.00 (2.00 to 2.00)"
  ]  # fmt: skip
  assert rows["original and 1 task"] == ["1.00 (1.00 to 1.00)", ""]
  assert rows["4 tasks, in one batch"] == ["", "4.00 (3.00 to 5.00)"]
  assert "original and 4 tasks" not in rows
  assert rows["original outputs moved by"] == [
    "0 (same bits)", "0 (same bits), 1.0e-06"
  ]  # fmt: skip
  assert rows["a task moved by the others"] == ["2.0e-07", "2.0e-07"]
  assert rows["file of a task"] == ["2 KiB", "2 KiB"]


def test_all_libraries_get_the_same(tmp_path):
  SETTING.write(tmp_path)
  assert setting.Setting.read(tmp_path) == SETTING
  images = setting.images(tmp_path)
  assert (images.shape, images.dtype) == ((3, 8, 8, 3), np.float32)
  assert np.abs(images).max() <= 1
  assert setting.labels(tmp_path).tolist() == [0, 1, 0]


def test_ratios_are_to_the_forward_pass():
  calls = []
  found = rounds.measure(
    {"forward": lambda: calls.append("f"), "train": lambda: calls.append("t")},
    rounds=2,
  )
  assert calls == ["f", "f", "t", "t", *"ftft"]
  assert found["ratios"]["forward"][1] == 1
  assert set(found["ratios"]) == {"forward", "train"}


def test_a_difference_of_nothing_means_equal_bits():
  zero = np.zeros(2, np.float32)
  assert rounds.difference(zero, zero.copy()) == 0
  assert rounds.difference(zero, zero + np.float32(1e-9)) > 0
