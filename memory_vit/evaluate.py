"""Evaluates tasks in one model, each on its own data set.

  python -m memory_vit.evaluate --backbone=NPZ --task=DIR [--task=DIR ...]

The data set of a task is that of the run that made it. With --verify every task
is compared with itself alone, and the original outputs with those of the plain
ViT; the exit status is then 1 where something differs. It is 2 for bad input.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit import (
  commands,
  compose,
  config,
  data,
  evaluation,
  preprocess,
  programs,
  records,
  sharding,
)
from memory_vit.backbone import Backbone
from memory_vit.errors import TaskError
from memory_vit.model import MemoryViT
from memory_vit.tables import table
from memory_vit.tasks import BACKBONE, EvalPreprocessing, Task
from memory_vit.variants import ViTConfig

# Greatest difference of a logit, as a share of the greatest logit, between a
# task among others and alone: the same sums in another order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Where:
  """A split on which something is evaluated; the fields are as in `config`."""

  name: str
  dir: str
  split: str
  cache_gib: float


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  arguments = _parser().parse_args(argv)
  return commands.run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m memory_vit.evaluate",
    description="Evaluates tasks in one model, each on its own data set.",
  )
  for name, options in {
    "--backbone": {
      "required": True,
      "metavar": "NPZ",
      "help": "an .npz file, its address or a short name",
    },
    "--task": {
      "required": True,
      "action": "append",
      "metavar": "DIR",
      "help": "a task, or a directory of tasks; may be given several times",
    },
    "--data_dir": {"help": "where the data sets are, if not where they were"},
    "--split": {"help": "evaluate this one, instead of the test split"},
    "--verify": {
      "action": "store_true",
      "help": "compare with each task alone, and with the plain ViT",
    },
    "--json": {"metavar": "FILE", "help": "write the numbers to a file"},
    "--batch_size": {"type": int, "default": 256},
    "--dtype": {"choices": ("float32", "bfloat16"), "default": "float32"},
  }.items():
    parser.add_argument(name, **options)
  return parser


def _run(arguments: argparse.Namespace) -> int:
  backbone, tasks = commands.load_model(
    arguments.backbone, arguments.task, arguments.dtype
  )
  mesh = sharding.make_mesh()
  sharding.require_divisible(arguments.batch_size, mesh, "--batch_size")
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  backbone = dataclasses.replace(backbone, params=params)
  evaluator = Evaluator(backbone, tasks, mesh, arguments.batch_size)
  # All data sets first: a wrong one must not cost an evaluation.
  opened = _open_all(tasks, arguments)
  upstream = _open_upstream(tasks, arguments) if arguments.verify else None

  results = {}
  for source, names in opened:
    results |= evaluator.evaluate(source, names, verify=arguments.verify)
  result = {
    "backbone": {
      "fingerprint": backbone.fingerprint,
      "variant": backbone.config.variant,
      "dtype": arguments.dtype,
    },
    "tasks": [results[task.spec.name] for task in tasks],
    "timing": evaluator.timing(opened[0][0]),
  }
  if arguments.verify:
    result["backbone"]["upstream"] = upstream and evaluator.upstream(*upstream)
    result["verified"] = _verified(result, arguments.dtype)
  commands.show(_text(result))
  if arguments.json:
    text = json.dumps(result, indent=2) + "\n"
    Path(arguments.json).write_text(text, encoding="utf-8")
  return 0 if result.get("verified", True) else 1


def _open_all(
  tasks: Sequence[Task], arguments: argparse.Namespace
) -> list[tuple[data.Source, list[str]]]:
  """Every data set that is needed, with the tasks that are evaluated on it."""
  names: dict[Where, list[str]] = {}
  for task in tasks:
    where = _where(task, arguments.data_dir, arguments.split)
    names.setdefault(where, []).append(task.spec.name)
  found = []
  for where, of in names.items():
    source = data.open_source(
      where.name, where.split, where.dir, where.cache_gib
    )
    for task in tasks:
      if task.spec.name in of:
        _require_classes(task, source)
    found.append((source, of))
  return found


def _open_upstream(
  tasks: Sequence[Task], arguments: argparse.Namespace
) -> tuple[data.Source, EvalPreprocessing] | None:
  """The backbone's own task, where the run of one of the tasks named it."""
  for task in tasks:
    made = task.provenance["config"]
    where = records.build(
      config.UpstreamConfig,
      made["upstream"],
      f"task {task.spec.name!r}: upstream",
      TaskError,
    )
    if where.name:
      directory = arguments.data_dir or where.dir
      source = data.open_source(where.name, where.split, directory)
      size = task.spec.backbone.image_size
      return source, preprocess.evaluation_of(
        where.eval_crop, where.resize, size
      )
  return None


def _where(task: Task, directory: str | None, split: str | None) -> Where:
  """The data set of the run that made a task, or what was said instead."""
  made = task.provenance.get("config")
  if not isinstance(made, Mapping) or "data" not in made:
    raise TaskError(
      f"task {task.spec.name!r} does not know its data set: it was not made by "
      "memory_vit.main."
    )
  where = records.build(
    config.DataConfig, made["data"], f"task {task.spec.name!r}: data", TaskError
  )
  split = split or where.test or where.validation
  if not split:
    raise TaskError(
      f"task {task.spec.name!r} was made without a test split: give --split."
    )
  directory = where.dir if directory is None else directory
  return Where(where.name, directory, split, where.cache_gib)


def _require_classes(task: Task, source: data.Source) -> None:
  """Refuses a data set with other classes than the task has learned."""
  if task.spec.class_names != source.class_names:
    raise TaskError(
      f"task {task.spec.name!r} has {task.spec.num_classes} classes "
      f"({', '.join(task.spec.class_names[:3])}, ...), the data set "
      f"{source.name!r} has {source.num_classes} "
      f"({', '.join(source.class_names[:3])}, ...)."
    )


class Evaluator:
  """One model with all tasks, and what it is compared with."""

  def __init__(
    self,
    backbone: Backbone,
    tasks: Sequence[Task],
    mesh: jax.sharding.Mesh,
    batch_size: int,
  ) -> None:
    self._backbone, self._mesh = backbone, mesh
    self._batch_size = batch_size
    self._slots = programs.fill_slots(backbone, tasks)
    # A task is never without those that it reads.
    self._alone = {
      task.spec.name: programs.fill_slots(
        backbone, compose.with_parents(tasks, task.spec.name)
      )
      for task in tasks
    }

  def evaluate(
    self, source: data.Source, names: Sequence[str], *, verify: bool
  ) -> dict[str, dict[str, Any]]:
    """Evaluates tasks on a data set, with all tasks in the pass.

    Args:
      source: the data set.
      names: of the tasks.
      verify: whether to compare every output with that of other programs.

    Returns:
      {name: an entry of the result}.
    """
    differences = _Differences()

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      out = programs.forward(self._backbone, self._slots, images)
      shown = {name: out[name] for name in names}
      if verify:
        plain, alone = self._compared(images, names)
        differences.add(BACKBONE, out[BACKBONE], plain)
        for name in names:
          differences.add(name, out[name], alone[name])
          shown[f"{name} alone"] = alone[name]
      return shown

    began = time.perf_counter()
    batches = self._batches(source, self._evaluation)
    found = evaluation.evaluate(predict, batches, self._mesh)
    seconds = time.perf_counter() - began
    results = {}
    for name in names:
      results[name] = _entry(name, source, found[name], seconds)
      if verify:
        results[name]["alone"] = {
          "accuracy": found[f"{name} alone"]["top1"],
          "max_difference": differences.relative(name),
          "outputs_bit_equal": differences.equal(BACKBONE),
        }
    return results

  def upstream(
    self, source: data.Source, preprocessing: EvalPreprocessing
  ) -> dict[str, Any]:
    """Evaluates the original head, with all tasks in the pass and without."""
    differences = _Differences()

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      out = programs.forward(self._backbone, self._slots, images)[BACKBONE]
      plain = plain_program(self._backbone, images)
      differences.add(BACKBONE, out, plain)
      return {"with": out, "plain": plain}

    batches = self._batches(source, preprocessing)
    found = evaluation.evaluate(predict, batches, self._mesh)
    return {
      "data": source.name,
      "split": source.split,
      "examples": found["with"]["examples"],
      "accuracy": found["with"]["top1"],
      "accuracy_plain": found["plain"]["top1"],
      "outputs_bit_equal": differences.equal(BACKBONE),
    }

  def timing(self, source: data.Source, rounds: int = 5) -> dict[str, Any]:
    """Seconds of a batch: the plain ViT, all tasks, and each in its own pass.

    The median of several rounds, in turn; reading pictures is left out.
    """
    backbone, slots = self._backbone, self._slots
    batches = iter(self._batches(source, self._evaluation))
    images = next(sharding.prefetch(batches, self._mesh))["image"]
    seconds = _medians(
      {
        "plain": lambda: plain_program(backbone, images),
        "together": lambda: programs.forward(backbone, slots, images),
        "one_by_one": lambda: [
          programs.forward(backbone, alone, images)
          for alone in self._alone.values()
        ],
      },
      rounds,
    )
    return {
      "batch_size": self._batch_size,
      "tasks": len(self._alone),
      **seconds,
    }

  def _compared(
    self, images: jax.Array, names: Sequence[str]
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Outputs of the plain ViT, and of every task alone."""
    _, context = programs.encode(self._backbone, images)
    alone = {
      name: programs.read(self._backbone, self._alone[name], context)[name]
      for name in names
    }
    return plain_program(self._backbone, images), alone

  @property
  def _evaluation(self) -> EvalPreprocessing:
    """How all tasks want their pictures."""
    return self._slots.specs[0].evaluation

  def _batches(
    self, source: data.Source, preprocessing: EvalPreprocessing
  ) -> Any:
    return data.eval_batches(
      source,
      preprocessing,
      batch_size=self._batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )


@functools.partial(jax.jit, static_argnames="config")
def _plain(params: Any, images: jax.Array, config: ViTConfig) -> jax.Array:
  model = MemoryViT(config)
  variables = {"params": {"backbone": params}}
  return model.apply(variables, images, method="encode")[0]


def plain_program(backbone: Backbone, images: jax.Array) -> jax.Array:
  """The original outputs, by a program that hands nothing out to tasks."""
  return _plain(backbone.params, images, backbone.config)


class _Differences:
  """The greatest difference of outputs, over all batches."""

  def __init__(self) -> None:
    self._greatest = collections.defaultdict(float)
    self._scale = collections.defaultdict(float)

  def add(self, name: str, found: jax.Array, expected: jax.Array) -> None:
    """Compares the outputs of a batch."""
    found, expected = np.asarray(found), np.asarray(expected)
    difference = float(np.abs(found - expected).max())
    # What is not a number must not pass for equal.
    if not np.array_equal(found, expected):
      difference = difference if difference > 0 else math.inf
    self._greatest[name] = max(self._greatest[name], difference)
    scale = float(np.abs(expected).max())
    self._scale[name] = max(self._scale[name], scale)

  def equal(self, name: str) -> bool:
    """Whether all outputs were equal to the bit."""
    return self._greatest[name] == 0

  def relative(self, name: str) -> float:
    """The greatest difference as a share of the greatest output."""
    return self._greatest[name] / max(self._scale[name], 1e-30)


def _medians(
  functions: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
  """Seconds of each function, in turn; the first call compiles."""
  times: dict[str, list[float]] = {name: [] for name in functions}
  for i in range(rounds + 1):
    for name, function in functions.items():
      began = time.perf_counter()
      jax.block_until_ready(function())
      if i:
        times[name].append(time.perf_counter() - began)
  return {name: statistics.median(t) for name, t in times.items()}


def _entry(
  name: str, source: data.Source, found: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
  """What is reported of a task."""
  return {
    "name": name,
    "data": source.name,
    "split": source.split,
    "examples": found["examples"],
    "accuracy": found["top1"],
    "top5": found["top5"],
    "loss": found["loss"],
    "per_class": found["per_class"],
    "images_per_second": round(found["examples"] / seconds, 1),
  }


def _verified(result: Mapping[str, Any], dtype: str) -> bool:
  """Whether all is as the method promises."""
  upstream = result["backbone"]["upstream"]
  if upstream and not upstream["outputs_bit_equal"]:
    return False
  return all(
    task["alone"]["outputs_bit_equal"]
    and task["alone"]["max_difference"] <= TOLERANCE[dtype]
    for task in result["tasks"]
  )


def _text(result: Mapping[str, Any]) -> str:
  """The result for people."""
  verified = "verified" in result
  header = ("task", "data set", "split", "examples", "top-1", "top-5")
  if verified:
    header += ("alone", "max. difference")
  rows = []
  for task in result["tasks"]:
    row = [
      task["name"],
      task["data"],
      task["split"],
      f"{task['examples']:,}",
      f"{100 * task['accuracy']:.2f} %",
      f"{100 * task['top5']:.2f} %",
    ]
    if verified:
      row.append(f"{100 * task['alone']['accuracy']:.2f} %")
      row.append(f"{task['alone']['max_difference']:.1e}")
    rows.append(tuple(row))
  timing = result["timing"]
  plain = timing["plain"]
  lines = [
    table(header, rows),
    "",
    f"a batch of {timing['batch_size']}: plain ViT {plain:.3f} s; "
    f"{timing['tasks']} task(s) in one pass {timing['together'] / plain:.2f} "
    f"times that, one after the other {timing['one_by_one'] / plain:.2f} times",
  ]
  if verified:
    equal = all(t["alone"]["outputs_bit_equal"] for t in result["tasks"])
    lines += [
      f"original outputs equal to the bit to those of the plain ViT: "
      f"{'yes' if equal else 'NO'}",
      *_upstream_line(result["backbone"]["upstream"]),
      f"verified: {'yes' if result['verified'] else 'NO'}",
    ]
  return "\n".join(lines)


def _upstream_line(upstream: Mapping[str, Any] | None) -> list[str]:
  if not upstream:
    return []
  return [
    f"original task, {upstream['data']} ({upstream['examples']:,} pictures): "
    f"{100 * upstream['accuracy']:.2f} % with all tasks in the pass, "
    f"{100 * upstream['accuracy_plain']:.2f} % by the plain ViT; equal to the "
    f"bit: {'yes' if upstream['outputs_bit_equal'] else 'NO'}"
  ]


if __name__ == "__main__":
  sys.exit(main())
