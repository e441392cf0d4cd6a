"""The benchmark beside other libraries, on the smallest models."""

import pytest

from benchmarks import comparison


@pytest.fixture(scope="module")
def measured():
  sizes = ["--variant=Ti/16", "--image_size=32", "--batch=2", "--classes=7"]
  once = ["--rounds=1", "--processes=1"]
  result = comparison.main([*sizes, "--tasks", "1", "2", *once])
  return {one["name"].split(",")[0]: one for one in result["libraries"]}


def test_every_library_answers(measured):
  assert set(measured) == {"memory_vit", "PEFT", "vit-pytorch"}
  for one in measured.values():
    timed = {"forward", "train", "train_all_weights", "infer_1", "infer_2"}
    assert set(one["ratios"]) >= timed
    assert all(low <= mid <= up for low, mid, up in one["ratios"].values())
    assert one["parameters"] * 4 < one["file_bytes"] < 1_000_000


def test_outputs_that_are_compared_depend_on_the_image(measured):
  """A head of zeros would make all of them equal, whatever is computed."""
  for one in measured.values():
    assert one["outputs_spread"] > 1e-3, one["name"]


def test_the_original_outputs_are_the_same_bits_here(measured):
  assert measured["memory_vit"]["original_difference"] == 0


def test_a_task_in_slots_of_one_size_has_the_same_bits_here(measured):
  assert measured["memory_vit"]["task_difference_same_slots"] == 0
  assert measured["memory_vit"]["task_difference"] < 1e-5


def test_peft_has_the_same_model(measured):
  assert measured["PEFT"]["converted_difference"] < 1e-5
