"""Scores: the same fields for every kind, and short names of classes."""

import pytest

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.kinds.scores import Scores

LABELS = ("map", "f1_macro", "calibration_error")
VALUES = ("r2", "mae", "rmse", "spearman")
SHORT = ("accuracy", "top5", "per_class")


def test_short_names_are_numbers_of_classes():
  scores = Scores(
    score=0.5, metrics={"top1": 0.5, "top5": 0.875},
    per_output={"accuracy": [1.0, None, 0.25]}, examples=8,
  )  # fmt: skip
  assert scores.accuracy == 0.5
  assert scores.top5 == 0.875
  assert scores.per_class == [1.0, None, 0.25]


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(
  ("names", "each"),
  [(LABELS, ("average_precision", "f1")), (VALUES, VALUES)],
)
def test_other_kinds_have_no_short_names(name, names, each):
  """The words name what there is; also where no number is defined."""
  for number in (0.5, None):
    scores = Scores(
      score=number, metrics=dict.fromkeys(names, number),
      per_output={key: [number] for key in each}, examples=8,
    )  # fmt: skip
    with pytest.raises(TaskError) as raised:
      getattr(scores, name)
    said = str(raised.value)
    assert f"read .score or .metrics ({', '.join(names)})" in said
    assert ".per_output" in said


@pytest.mark.parametrize("name", SHORT)
def test_scores_without_a_split_are_none(name):
  assert getattr(Scores(), name) is None


@pytest.mark.parametrize("name", ["boxes", ["labels"], {}, None, 3])
def test_unknown_kind_is_refused(name):
  with pytest.raises(
    TaskError, match="expected one of classes, labels, values"
  ):
    mv.TaskKind(name=name)
