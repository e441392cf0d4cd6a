"""What is shown of a run at its end."""

import dataclasses
import re

from memory_vit.kinds.scores import Scores
from memory_vit.run_result import RunResult, TrialResult
from memory_vit.train import summary


def scores(accuracy, examples=0):
  return Scores(
    score=accuracy, metrics={"top1": accuracy, "top5": 1.0}, examples=examples
  )


TASK = TrialResult(
  name="pets", cells=5, learning_rate=0.1, trainable_params=12_345,
  val=scores(0.75), test=scores(0.5, examples=1_234),
  chance=0.125, majority=0.4375,
)  # fmt: skip
RESULT = RunResult(tasks=(TASK,), wall_seconds=3.0, images_per_second=17.0)


def rows_of(result, tmp_path):
  _, header, _, *rows = summary.summary(result, tmp_path).splitlines()
  columns, *cells = (
    re.split(r"  +", line) for line in (header, *rows[: len(result.tasks)])
  )
  return [dict(zip(columns, row, strict=True)) for row in cells]


def test_summary_shows_chance_and_majority(tmp_path):
  (row,) = rows_of(RESULT, tmp_path)
  assert row["test"] == "50.00 %"
  assert row["chance"] == "12.50 %"
  assert row["majority"] == "43.75 %"


def test_summary_without_a_test_split_has_no_majority(tmp_path):
  untested = dataclasses.replace(TASK, test=Scores(), majority=None)
  (row,) = rows_of(dataclasses.replace(RESULT, tasks=(untested,)), tmp_path)
  assert (row["test"], row["majority"]) == ("-", "-")
  assert row["chance"] == "12.50 %"


def test_summary_states_the_standard_error_of_few_validation_images(tmp_path):
  few = dataclasses.replace(TASK, val=scores(13 / 18, 18))
  said = summary.summary(dataclasses.replace(RESULT, tasks=(few,)), tmp_path)
  assert "validation: 18 images, a standard error of 10.6 points" in said
  # All of them right: not a certainty, either.
  sure = dataclasses.replace(few, val=scores(1.0, 18))
  said = summary.summary(dataclasses.replace(RESULT, tasks=(sure,)), tmp_path)
  assert "validation: 18 images, a standard error of 3.9 points" in said
  none = dataclasses.replace(TASK, val=Scores())
  said = summary.summary(dataclasses.replace(RESULT, tasks=(none,)), tmp_path)
  assert "a standard error" not in said
