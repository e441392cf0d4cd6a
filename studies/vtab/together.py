"""All tasks of a benchmark in one model, compared with each alone.

One pass of the backbone answers all of them, and its original outputs are those
of the plain ViT to the bit: `evaluation.verify` compares them on every test
image.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit.data import datasets
from memory_vit.evaluation.verify import Evaluator
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import get_regime
from memory_vit.runtime import files, processes
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import store
from studies.vtab import protocol
from studies.vtab.protocol import Benchmark
from studies.vtab.record import TOGETHER, Score, task_directory

logger = logging.getLogger(__name__)


def best_regime(bench: Benchmark, scores: Sequence[Score]) -> str | None:
  """The regime whose tasks compose that is best on validation, over all tasks.

  None where none composes and was learned on every task.
  """
  found = {}
  for regime in bench.regimes:
    mine = [s for s in scores if s.regime == regime and s.test is not None]
    known = [s.validation for s in mine if s.validation is not None]
    if get_regime(regime).composes and len(known) == len(bench.tasks):
      found[regime] = sum(known) / len(known)
  return max(found, key=lambda regime: found[regime], default=None)


def measure_once(
  bench: Benchmark,
  scores: Sequence[Score],
  backbone: Backbone,
  mesh: jax.sharding.Mesh,
  stop: StopSignal,
) -> None:
  """Measure into `together.json`, unless it holds this already."""
  file = bench.workdir / TOGETHER
  regime = best_regime(bench, scores)
  if regime is None:
    logger.info("no regime composes on all tasks: nothing is put together")
    processes.on_process_0(lambda: file.unlink(missing_ok=True))
    return
  directories = [
    task_directory(bench.workdir, data.task.name, regime)
    for data in bench.tasks
  ]
  what = processes.on_process_0(lambda: _key(bench, regime, directories))
  known = processes.on_process_0(lambda: _known(file))
  if known == what:
    return
  stop.check()
  found = measure(bench, regime, directories, backbone, mesh)
  files.write_json(file, {"what": what, "found": found})


def measure(
  bench: Benchmark,
  regime: str,
  directories: Sequence[Path],
  backbone: Backbone,
  mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
  """Evaluate all tasks in one model, each on its test split.

  Returns:
    {"regime", "dtype", "tasks": {name: an entry of `Evaluator.evaluate`},
    "timing": as `Evaluator.timing`, "verified": whether all is as promised}.
  """
  tasks = [store.load_task(directory, backbone) for directory in directories]
  size, dtype = bench.config.batch_size_eval, bench.config.dtype
  evaluator = Evaluator(backbone, tasks, mesh, size, one_shape=True)
  results: dict[str, Any] = {}
  first = None
  for data in bench.tasks:
    ref = protocol.test_split(bench, data)
    reader = datasets.open_on_all_processes(ref)
    first = first or reader
    name = data.task.name
    logger.info("%s among %d tasks", name, len(tasks))
    results |= evaluator.evaluate(reader, [name], verify=True)
  return {
    "regime": regime,
    "dtype": dtype,
    "tasks": results,
    "timing": evaluator.timing(first) if first else None,
    "verified": all(found["alone"]["verified"] for found in results.values()),
  }


def _key(
  bench: Benchmark, regime: str, directories: Sequence[Path]
) -> dict[str, Any]:
  """Everything that the numbers depend on."""
  digests = [
    files.read_object(directory / "task.json", "sha256")["sha256"]
    for directory in directories
  ]
  return {
    "regime": regime,
    "tasks": digests,
    "tests": [[data.name, data.dir, data.test] for data in bench.tasks],
    "dtype": bench.config.dtype,
  }


def _known(file: Path) -> Any:
  """What was measured by now, as `_key`."""
  if not file.exists():
    return None
  return files.read_object(file, "what", "found")["what"]
