"""Tests of VTAB-1k runs in one pass: as each alone, in few programs."""

import json
import logging

import jax
import pytest
from conftest import one_device, random_task
from fake_benchmarks import small_benchmark

import memory_vit as mv
from memory_vit.data import datasets
from memory_vit.errors import MemoryVitError
from memory_vit.evaluation import evaluate
from memory_vit.model.regimes import REGIMES
from memory_vit.runtime.preemption import Interrupted, StopSignal
from studies.grid import Grid
from studies.record import directory_of
from studies.vtab import protocol, runner, testing

REGIMES_TESTED = ("head", "cls_masked", "norms_masked")


def engine_of(tmp_path, bench, backbone, stop=None):
  return Grid(
    config=bench.config, workdir=tmp_path / "run", backbone=backbone, stop=stop
  )


def finished_runs(engine, bench, data):
  """Runs whose tasks have random values, all under the name of a run."""
  runs = {}
  for i, regime in enumerate(bench.regimes):
    cells = 2 + i if REGIMES[regime].has("memory") else 0
    for seed in bench.seeds:
      task = random_task(
        engine.backbone, protocol.NAME_IN_RUNS, regime=regime, cells=cells,
        classes=data.task.classes, seed=10 * i + seed,
      )  # fmt: skip
      name = runner.final_name(data.task.name, regime, seed)
      path = directory_of(engine.workdir, name)
      mv.save_task(task, path / "tasks" / protocol.NAME_IN_RUNS)
      runs[regime, seed] = path
  return runs


@pytest.fixture
def bench(tmp_path, backbone_file):
  names = ["kitti", "dsprites_ori"]
  return small_benchmark(tmp_path, backbone_file, names, regimes=REGIMES_TESTED)


@pytest.mark.slow
def test_tasks_tested_side_by_side_score_as_alone(
  bench, backbone_file, tmp_path, monkeypatch, caplog
):
  """In one pass; a second data set, of other classes, compiles nothing."""
  mesh, backbone = one_device(), mv.load_backbone(backbone_file)
  monkeypatch.setattr(testing, "make_mesh", lambda fsdp: mesh)
  engine = engine_of(tmp_path, bench, backbone)
  readings = []
  evaluate_source = testing.evaluate_source

  def counted(*arguments, **options):
    readings.append(arguments[1].size)
    return evaluate_source(*arguments, **options)

  monkeypatch.setattr(testing, "evaluate_source", counted)
  first, second = bench.tasks
  runs = finished_runs(engine, bench, first)
  found = testing.finish(engine, bench, first, runs)
  assert readings == [4]
  assert [*found] == [*runs]
  reader = datasets.open_run_split(protocol.test_config(bench, first), "test")
  for run, path in runs.items():
    task = mv.load_task(path / "tasks" / protocol.NAME_IN_RUNS, backbone)
    alone = evaluate.evaluate_source(
      evaluate.predict_fn(backbone, [task], mesh), reader,
      task.spec.preprocessing, batch_size=8, mesh=mesh,
    )[task.name].scores  # fmt: skip
    assert found[run].loss == pytest.approx(alone.loss, rel=1e-5)
    assert found[run].accuracy == alone.accuracy
    assert (found[run].examples, found[run].skipped) == (4, 0)
  assert len({outcome.loss for outcome in found.values()}) == len(runs)

  others = finished_runs(engine, bench, second)
  # Two diverged: numbers of slots are rounded up, so one would not matter.
  del others["cls_masked", 1], others["norms_masked", 1]
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    testing.finish(engine, bench, second, others)
  compiled = [record.getMessage() for record in caplog.records]
  for program in ("encode_program", "read_program"):
    assert not any(f"Compiling jit({program})" in text for text in compiled)

  # The second time stored tests are read.
  assert testing.finish(engine, bench, first, runs) == found
  assert readings == [4, 4]


@pytest.mark.slow
def test_scores_tested_before_a_stop_are_kept(
  bench, backbone_file, tmp_path, monkeypatch
):
  """And a damaged file is named."""
  data, stop = bench.tasks[0], StopSignal()
  engine = engine_of(tmp_path, bench, mv.load_backbone(backbone_file), stop)
  runs = finished_runs(engine, bench, data)
  first = {run: path for run, path in runs.items() if run[0] == "head"}
  testing.finish(engine, bench, data, first)
  monkeypatch.setattr(stop, "is_wanted", lambda: True)
  with pytest.raises(Interrupted):
    testing.finish(engine, bench, data, runs)
  done = {run for run, path in runs.items() if (path / testing.TEST).exists()}
  assert done == {*first}
  file = runs["head", 0] / testing.TEST
  file.write_text(json.dumps({**json.loads(file.read_text()), "found": {}}))
  with pytest.raises(MemoryVitError, match=r"test\.json"):
    testing.finish(engine, bench, data, first)


def test_only_tasks_that_share_a_pass_are_tested_side_by_side():
  runs = [(name, seed) for name in ("full", "head", "memory_masked")
          for seed in (0, 1)]  # fmt: skip
  assert testing.in_one_pass(runs) == [runs[2:], runs[:1], runs[1:2]]
  assert testing.in_one_pass(runs[:1]) == [runs[:1]]
