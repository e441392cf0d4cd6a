"""Measure all tasks of a benchmark in one model, against each alone.

On every test image, `Evaluator` compares the original outputs with those of the
plain ViT to the bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from memory_vit.data import open_run_split
from memory_vit.evaluation import Evaluator
from memory_vit.model import get_regime
from memory_vit.runtime import make_mesh, on_process_0
from studies.grid import Grid, logger
from studies.record import read_json
from studies.vtab import protocol
from studies.vtab.protocol import Benchmark
from studies.vtab.report import TOGETHER
from studies.vtab.scores import Score


def best_regime(bench: Benchmark, scores: Sequence[Score]) -> str | None:
  """The masked regime that is best on validation of all tasks."""
  found = {}
  for regime in bench.regimes:
    mine = [s for s in scores if s.regime == regime and s.test is not None]
    known = [s.validation for s in mine if s.validation is not None]
    if get_regime(regime).has_token and len(known) == len(bench.tasks):
      found[regime] = sum(known) / len(known)
  return max(found, key=lambda regime: found[regime], default=None)


def task_directory(workdir: Path, task: str, regime: str) -> Path:
  """The exported task of the first seed."""
  return workdir / "tasks" / regime / task


def measure_once(
  engine: Grid, bench: Benchmark, scores: Sequence[Score]
) -> None:
  """Measure into `together.json`, unless it has the same tasks."""
  file = engine.workdir / TOGETHER
  regime = best_regime(bench, scores)
  if regime is None:
    logger.info(
      "no masked regime has all tasks: they are not measured in one model"
    )
    on_process_0(lambda: file.unlink(missing_ok=True))
    return
  directories = [
    task_directory(engine.workdir, data.task.name, regime)
    for data in bench.tasks
  ]
  engine.measure_once(
    TOGETHER,
    lambda: key(bench, regime, directories),
    lambda: measure(engine, bench, regime, directories),
  )


def measure(
  engine: Grid, bench: Benchmark, regime: str, directories: Sequence[Path]
) -> dict[str, Any]:
  """Evaluate all tasks in one model, each on its test split."""
  config = bench.config
  evaluator = Evaluator(
    engine.backbone,
    [mv.load_task(directory, engine.backbone) for directory in directories],
    make_mesh(fsdp=config.mesh.fsdp),
    config.batch_size_eval,
    one_shape=True,
  )
  results: dict[str, Any] = {}
  readers = []
  for data in bench.tasks:
    readers.append(open_run_split(protocol.test_config(bench, data), "test"))
    name = data.task.name
    logger.info("%s among %d tasks", name, len(directories))
    results |= evaluator.evaluate(readers[-1], [name], verify=True)[0]
  return {
    "regime": regime,
    "dtype": config.dtype,
    "tasks": results,
    "timing": evaluator.timing(readers[0]),
    "verified": all(found["alone"]["verified"] for found in results.values()),
  }


def key(
  bench: Benchmark, regime: str, directories: Sequence[Path]
) -> dict[str, Any]:
  """Everything that the numbers depend on."""
  return {
    "regime": regime,
    "tasks": [read_json(path / "task.json")["sha256"] for path in directories],
    "tests": [[data.name, data.dir, data.test] for data in bench.tasks],
    "dtype": bench.config.dtype,
  }
