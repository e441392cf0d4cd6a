"""All tasks of a benchmark in one model: the choice of a regime, the key."""

import types

import pytest

from memory_vit.runtime import files
from studies.vtab import together
from studies.vtab.scores import Score


def bench_of(**changes):
  """A benchmark with the attributes that the function reads."""
  data = {"name": "kitti", "dir": "data", "test": "test", **changes}
  return types.SimpleNamespace(
    config=types.SimpleNamespace(dtype="float32"),
    regimes=("cls_masked", "memory_masked"),
    tasks=[types.SimpleNamespace(**data)],
  )


def test_regime_is_chosen_on_validation():
  """Not on the test split, on which the other one is better."""
  scores = [
    Score(
      task="a", regime=regime, validation=validation, tests=(test,), seeds=1
    )
    for regime, validation, test in (
      ("cls_masked", 0.9, 0.5),
      ("memory_masked", 0.5, 0.9),
    )
  ]
  assert together.best_regime(bench_of(), scores) == "cls_masked"


@pytest.mark.parametrize("key", ["name", "dir", "test"])
def test_scores_on_other_data_are_measured_again(tmp_path, key):
  files.write_json(tmp_path / "task.json", {"sha256": "0"})
  first, second = (
    together.key(bench, "cls_masked", [tmp_path])
    for bench in (bench_of(), bench_of(**{key: "other"}))
  )
  assert first != second
