"""The engine of studies: dependencies between runs, and a list of your own."""

import functools

import pytest
from conftest import tiny_backbone
from fake_studies import FakeRuns

import memory_vit as mv
from studies import example, grid

FLAGS = (
  "--config.upstream.name=",
  "--config.total_steps=2", "--config.batch_size=8",
  "--config.batch_size_eval=64",
)  # fmt: skip


def made(config, results):
  """The second run is made of what the first one found."""
  runs = [
    grid.Run(name="first", configure=lambda: config),
    grid.Run(name="second", configure=None, kind="half the rate"),
  ]
  if "first" in results:
    rate = results["first"].tasks[0].learning_rate
    runs[1] = grid.Run(
      name="second",
      configure=lambda: config.replaced({"learning_rate": rate / 2}),
    )
  return runs


def test_run_may_depend_on_results_of_other_runs(
  backbone_file, tmp_path, monkeypatch
):
  rates = []

  def accuracy(config):
    rates.append(config.learning_rate)
    return 0.5, 0.5

  fake = FakeRuns(accuracy).install(monkeypatch)
  config = mv.read_config(
    "digits", {"learning_rate": 0.2, "backbone": str(backbone_file)}, FLAGS
  )
  engine = grid.open_grid(config, tmp_path)
  config = engine.config
  plan = functools.partial(made, config)
  assert "2 runs, 0 of them finished." in grid.forecast(plan, {})
  assert engine.finished(plan) == {}
  results = {}
  engine.train(plan, results)
  assert [*results] == fake.calls == ["first", "second"]
  assert rates == [0.2, 0.1]
  assert engine.finished(plan).keys() == results.keys()
  # Runs of another configuration are neither used nor replaced.
  other = functools.partial(made, config.replaced({"task.cells": 7}))
  assert engine.finished(other) == {}
  with pytest.raises(
    mv.MemoryVitError, match=r"(?s)first was .*task.cells: 5, now"
  ):
    engine.train(other, {})


@pytest.mark.slow
def test_example_list_trains_once_and_is_read_again(tmp_path, capsys):
  """It trains, and the second time reads the results."""
  backbone = tmp_path / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5, depth=1), backbone)
  given = ["digits", str(tmp_path / "runs"), *FLAGS]
  printed, trained = [], []
  for _ in range(2):
    example.main(*given, f"--config.backbone={backbone}")
    printed.append(capsys.readouterr().out)
    found = (tmp_path / "runs").rglob("result.json")
    trained.append({path: path.stat().st_mtime_ns for path in found})
  assert printed[0] == printed[1]
  assert printed[0].count("%\n") == len(trained[0]) == 6
  assert trained[0] == trained[1]
