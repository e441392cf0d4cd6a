"""Tests of finished runs: the tasks of a data set side by side, each once.

The masked tasks of all regimes and seeds share a pass of the backbone, in slots
of one number and size, so that all data sets share its program; heads and
probes share another, on the same images. Every other task has a pass of its
own. What a test says lies beside the run, in `TEST`.
"""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.reader import Reader
from memory_vit.errors import ConfigError
from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import get_regime
from memory_vit.model.task import Task
from memory_vit.runtime import files, processes, schema
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import store
from memory_vit.train import sweep
from studies.vtab import changed_data, protocol
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark
from studies.vtab.record import tested_directory

logger = logging.getLogger(__name__)

TEST = "test.json"

# A regime and a seed.
Run = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore:
  """What the test split says of a task.

  Attributes:
    accuracy: in [0, 1].
    loss: mean cross-entropy.
    examples: how many were tested.
    skipped: how many could not be read.
    seconds: of the pass, divided among its tasks.
  """

  accuracy: float
  loss: float
  examples: int
  skipped: int
  seconds: float


def finish(
  bench: Benchmark,
  data: TaskData,
  runs: Mapping[Run, Path],
  backbone: Backbone,
  mesh: Mesh,
  stop: StopSignal,
) -> dict[Run, TaskScore]:
  """Test the tasks of runs; a test of the same task is read.

  Args:
    bench: that they belong to.
    data: of the task.
    runs: {which: the directory of a final run that has exported its task}.
    backbone: on the devices of the mesh.
    mesh: over which batches are split.
    stop: is asked before every batch.

  Raises:
    ConfigError: where a task was tested on other data than are there now.
    Interrupted: where `stop` says so.
  """
  ref = protocol.test_split(bench, data)
  known = processes.on_process_0(
    lambda: [_known(path) for path in runs.values()]
  )
  done = {run: test for run, test in zip(runs, known, strict=True) if test}
  where = tested_directory(bench.workdir, data.task.name)
  for digest in {tuple(test["data"].items()) for test in done.values()}:
    changed_data.require_same({"test": ref}, {"test": dict(digest)}, where)
  found = {
    run: schema.build(
      TaskScore, test["found"], str(runs[run] / TEST), ConfigError
    )
    for run, test in done.items()
  }
  left = {run: path for run, path in runs.items() if run not in done}
  if not left:
    return found
  reader = datasets.open_on_all_processes(ref)
  record = DataRecord(
    directory=where / "inventory",
    by=bench.config.data.digest,
    inventories={"test": reader.source.inventory},
  )
  record.keep()
  for some in in_one_pass(left):
    logger.info("%s: testing %d tasks", data.task.name, len(some))
    outcomes = measure(
      bench,
      data,
      {run: left[run] for run in some},
      reader,
      backbone,
      mesh,
      stop,
    )
    for run, outcome in outcomes.items():
      _write(left[run], record.digests["test"], outcome)
    found |= outcomes
  return found


def in_one_pass(runs: Sequence[Run] | Mapping[Run, Any]) -> list[list[Run]]:
  """Divide runs into those whose tasks are tested side by side."""
  shared = [run for run in runs if get_regime(run[0]).shares_pass]
  alone = [[run] for run in runs if run not in shared]
  return [shared, *alone] if shared else alone


def backbone_passes(runs: Sequence[Run]) -> int:
  """Passes of the backbone over the images on which these runs are tested.

  One answers all masked tasks, one all heads and one all probes.
  """
  count = 0
  for some in in_one_pass(runs):
    kinds = [get_regime(regime) for regime, _ in some]
    count += len({(kind.composes, kind.has_probe) for kind in kinds})
  return count


def _task_directory(directory: Path) -> Path:
  """The task that a run has exported."""
  return directory / "tasks" / protocol.NAME_IN_RUNS


def _known(directory: Path) -> Any:
  """The test of a run; None where there is none, or of another task."""
  file, task = directory / TEST, _task_directory(directory) / "task.json"
  if not file.exists():
    return None
  test = files.read_object(file, "task", "data", "found")
  # A task that holds a backbone is removed once it is tested.
  if task.exists() and _digest(directory) != test["task"]:
    logger.info("%s is of another task: it is tested again", file)
    return None
  return test


def _digest(directory: Path) -> str:
  """What tells the task of a run from others."""
  file = _task_directory(directory) / "task.json"
  return str(files.read_object(file, "sha256")["sha256"])


def _write(directory: Path, data: Mapping[str, str], found: TaskScore) -> None:
  """Keep what a test says; all processes must call."""
  digest = processes.on_process_0(lambda: _digest(directory))
  values = {"task": digest, "data": data, "found": dataclasses.asdict(found)}
  files.write_json(directory / TEST, values)


def measure(
  bench: Benchmark,
  data: TaskData,
  runs: Mapping[Run, Path],
  reader: Reader,
  backbone: Backbone,
  mesh: Mesh,
  stop: StopSignal,
) -> dict[Run, TaskScore]:
  """Evaluate the tasks of runs on a split, reading its images once."""
  began = time.perf_counter()
  tasks = {
    run: _named(store.load_task(_task_directory(path), backbone), run)
    for run, path in runs.items()
  }
  # Of masked tasks the slots have one size; others have none.
  slots, cells = _slots(bench, data)
  outputs = predict_fn(
    backbone,
    list(tasks.values()),
    mesh,
    slots=slots,
    cells=cells,
    classes=bench.config.task.padded_classes,
  )

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    stop.check()
    return outputs(images)

  results = evaluate_source(
    predict,
    reader,
    next(iter(tasks.values())).spec.evaluation,
    batch_size=bench.config.batch_size_eval,
    mesh=mesh,
  )
  seconds = round((time.perf_counter() - began) / len(tasks), 3)
  return {
    run: TaskScore(
      accuracy=results[task.name]["top1"],
      loss=results[task.name]["loss"],
      examples=results[task.name]["examples"],
      skipped=results[task.name]["skipped"],
      seconds=seconds,
    )
    for run, task in tasks.items()
  }


def _named(task: Task, run: Run) -> Task:
  """A task under a name that no other of its pass has."""
  regime, seed = run
  spec = dataclasses.replace(task.spec, name=f"{regime}-{seed}")
  return dataclasses.replace(task, spec=spec)


def _slots(bench: Benchmark, data: TaskData) -> tuple[int, int]:
  """How many slots all masked tasks take, and cells the largest can have."""
  masked = [name for name in bench.regimes if get_regime(name).composes]
  cells = [
    trial.config.task.cells
    for name in masked
    if get_regime(name).has_memory
    for trial in sweep.trials_of(
      protocol.search_config(bench, data, name), protocol.NAME_IN_RUNS
    )
  ]
  return len(masked) * len(bench.seeds), max(cells, default=0)
