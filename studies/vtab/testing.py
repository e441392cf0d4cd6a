"""Test the tasks of finished runs together, each once.

The masked tasks of all regimes and seeds of a data set share a pass of the
backbone with the heads, in slots of one number and size, so that all data sets
share its program; probes share another pass. Every other task has its own.
The result is stored beside the run, in `TEST`.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from memory_vit.data import data_differences, open_run_split, record_data
from memory_vit.evaluation import evaluate_source, predict_fn
from memory_vit.model import get_regime
from memory_vit.runtime import StopSignal, make_mesh, on_process_0
from studies.grid import Grid, logger
from studies.record import directory_of, read_json, write_json
from studies.vtab import protocol
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark

TEST = "test.json"

# A regime and a seed.
Run = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore:
  """The result of a task on the test split."""

  accuracy: float
  loss: float
  examples: int
  skipped: int  # not readable
  seconds: float  # of the pass, divided by the number of its tasks


def finish(
  engine: Grid, bench: Benchmark, data: TaskData, runs: Mapping[Run, Path]
) -> dict[Run, TaskScore]:
  """Test the tasks of runs, unless a test of the same task is stored."""
  config = protocol.test_config(bench, data)
  where = directory_of(engine.workdir, data.task.name)
  known = on_process_0(lambda: [_known(path) for path in runs.values()])
  done = {run: test for run, test in zip(runs, known, strict=True) if test}
  for digest in {tuple(test["data"].items()) for test in done.values()}:
    if lines := data_differences(config, where, {"test": dict(digest)}):
      raise mv.MemoryVitError(
        f"the data are not those on which {data.task.name} was tested. "
        "Restore them, or use another --workdir.\n  " + "\n  ".join(lines)
      )
  found = {run: _score(runs[run], test["found"]) for run, test in done.items()}
  left = {run: path for run, path in runs.items() if run not in done}
  digests = record_data(config, where, ["test"]) if left else {}
  for some in in_one_pass(left):
    logger.info("%s: testing %d tasks", data.task.name, len(some))
    outcomes = measure(engine, bench, data, {run: left[run] for run in some})
    for run, outcome in outcomes.items():
      on_process_0(
        functools.partial(_write, left[run], digests["test"], outcome)
      )
    found |= outcomes
  return found


def _score(directory: Path, values: Mapping[str, Any]) -> TaskScore:
  try:
    return TaskScore(**values)
  except TypeError as error:
    raise mv.MemoryVitError(
      f"{directory / TEST} is a test of another version ({error}): remove it."
    ) from error


def in_one_pass(runs: Sequence[Run] | Mapping[Run, Any]) -> list[list[Run]]:
  """Divide runs into groups whose tasks are tested in one pass."""
  shared = [run for run in runs if get_regime(run[0]).shares_pass]
  alone = [[run] for run in runs if run not in shared]
  return [shared, *alone] if shared else alone


def _task_directory(directory: Path) -> Path:
  return directory / "tasks" / protocol.NAME_IN_RUNS


def _known(directory: Path) -> Any:
  """The test of a run; None if there is none, or of another task."""
  file, task = directory / TEST, _task_directory(directory) / "task.json"
  if not file.exists():
    return None
  test = read_json(file)
  # A task that holds a backbone is removed after its test.
  if task.exists() and _digest(directory) != test["task"]:
    logger.info("%s is of another task: it is tested again", file)
    return None
  return test


def _digest(directory: Path) -> str:
  file = _task_directory(directory) / "task.json"
  return str(read_json(file)["sha256"])


def _write(directory: Path, data: Mapping[str, str], found: TaskScore) -> None:
  values = {"task": _digest(directory), "data": data}
  found_values = dataclasses.asdict(found)
  write_json(directory / TEST, {**values, "found": found_values})


def measure(
  engine: Grid, bench: Benchmark, data: TaskData, runs: Mapping[Run, Path]
) -> dict[Run, TaskScore]:
  """Evaluate the tasks of runs on the test split, reading images once."""
  began = time.perf_counter()
  config, backbone = bench.config, engine.backbone
  stop = engine.stop or StopSignal()
  mesh = make_mesh(fsdp=config.mesh.fsdp)
  tasks = {
    run: _named(mv.load_task(_task_directory(path), backbone), run)
    for run, path in runs.items()
  }
  # Slots of masked tasks; heads have as many.
  slots, cells = _slots(bench)
  outputs = predict_fn(
    backbone,
    list(tasks.values()),
    mesh,
    slots=slots,
    cells=cells,
    classes=config.task.padded_classes,
  )

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    stop.check()
    return outputs(images)

  found = evaluate_source(
    predict,
    open_run_split(protocol.test_config(bench, data), "test"),
    next(iter(tasks.values())).spec.preprocessing,
    batch_size=config.batch_size_eval,
    mesh=mesh,
  )
  seconds = round((time.perf_counter() - began) / len(tasks), 3)
  return {
    run: _task_score(found[task.name].scores, seconds)
    for run, task in tasks.items()
  }


def _task_score(scores: mv.Scores, seconds: float) -> TaskScore:
  assert scores.score is not None  # of classes
  return TaskScore(
    accuracy=scores.score,
    loss=math.nan if scores.loss is None else scores.loss,
    examples=scores.examples,
    skipped=scores.skipped,
    seconds=seconds,
  )


def _named(task: mv.Task, run: Run) -> mv.Task:
  """Rename a task, as names in a pass must differ."""
  regime, seed = run
  spec = dataclasses.replace(task.spec, name=f"{regime}-{seed}")
  return dataclasses.replace(task, spec=spec)


def _slots(bench: Benchmark) -> tuple[int, int]:
  """The number of slots for all masked tasks, and of cells in each."""
  masked = [name for name in bench.regimes if get_regime(name).has_token]
  if not any(get_regime(name).has("memory") for name in masked):
    return len(masked) * len(bench.seeds), 0
  task, sweep = bench.config.task, bench.config.sweep
  varied = [o.get("task.cells", 0) for o in sweep.overrides]
  cells = max(*(sweep.cells or (task.cells,)), *varied, 0)
  return len(masked) * len(bench.seeds), cells
