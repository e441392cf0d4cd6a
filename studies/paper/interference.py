"""Interference of other tasks' memories, without a mask and with one.

The paper's study of section 4.4 (`memory_naive` in its terms): memories that
were trained apart are put side by side, and every token attends to all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.config import Config
from memory_vit.errors import TaskError
from memory_vit.runtime import files
from studies.paper import paper_numbers, runs
from studies.paper.section import Row, Section
from studies.paper.selection import best, select
from studies.paper.trials import StudyTrial

with epy.lazy_imports():  # to measure; the table does without
  import jax
  import jax.numpy as jnp

  from memory_vit.data import datasets
  from memory_vit.evaluation import evaluate
  from memory_vit.model import task as task_lib
  from memory_vit.tasks import inference, program, store

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from memory_vit.data.reader import Reader
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.task import Task


def best_tasks(
  config: Config, trials: Sequence[StudyTrial]
) -> dict[str, list[Path]]:
  """Find the tasks to put side by side: the first one, then the others.

  Returns:
    {regime: directories of tasks}; empty where one of them diverged.
  """
  found = {}
  shared = {"cells": config.task.cells, "seed": config.study.seeds[0]}
  for regime in ("memory", "memory_masked"):
    directories = []
    for name in runs.data_sets(config):
      trial = best(select(trials, regime=regime, data=name, **shared))
      if trial is None or trial.task is None:
        return {}
      directories.append(Path(trial.task))
    found[regime] = directories
  return found


def key(config: Config, tasks: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
  """Everything that the accuracies depend on."""
  return {
    "tasks": [
      files.read_object(directory / "task.json", "sha256")["sha256"]
      for directories in tasks.values()
      for directory in directories
    ],
    "data": [config.data.name, config.data.test],
    "dtype": config.dtype,
  }


def measure(
  config: Config,
  tasks: Mapping[str, Sequence[Path]],
  backbone: Backbone,
  mesh: Mesh,
) -> dict[str, Any]:
  """Evaluate the first of `best_tasks`, as `interference.json` keeps it."""
  where = config.data
  source = datasets.open_split(
    where, where.test, config.stall_timeout, config.trust_data_code
  )
  naive_tasks, masked_tasks = (
    [store.load_task(directory, backbone) for directory in tasks[regime]]
    for regime in ("memory", "memory_masked")
  )
  size = config.batch_size_eval
  return {
    "naive": naive_accuracies(
      backbone, naive_tasks, source, batch_size=size, mesh=mesh
    ),
    "masked": masked_accuracies(
      backbone, masked_tasks, source, batch_size=size, mesh=mesh
    ),
  }


def naive(first: Task, others: Sequence[Task]) -> Task:
  """Put the memories of other tasks beside a task's own, in every layer.

  All are of the regime "memory"; class token and head stay the first one's.

  Raises:
    TaskError: for tasks of another regime or backbone.
  """
  for task in (first, *others):
    task_lib.require_backbone(task.spec, first.spec.backbone, first.spec.name)
    if (task.spec.regime, task.spec.memory_norm) != (
      "memory",
      first.spec.memory_norm,
    ):
      raise TaskError(
        f"task {task.spec.name!r} was learned by {task.spec.regime!r} with "
        f"memory_norm {task.spec.memory_norm}: expected tasks of 'memory' with "
        f"memory_norm {first.spec.memory_norm}."
      )
  memory = jnp.concatenate(
    [task.params["memory"] for task in (first, *others)], axis=1
  )
  spec = dataclasses.replace(first.spec, cells=memory.shape[1])
  return task_lib.Task(spec, {**first.params, "memory": memory})


def naive_accuracies(
  backbone: Backbone,
  tasks: Sequence[Task],
  source: Reader,
  *,
  batch_size: int,
  mesh: Mesh,
) -> list[float]:
  """Accuracy of the first task as memories of the others are added, unmasked.

  Args:
    backbone: of the tasks.
    tasks: of the regime "memory"; the first is evaluated.
    source: split of its data set.
    batch_size: of all processes together.
    mesh: over which batches are split.

  Returns:
    Of the first task alone, then with one other, with two, ...
  """
  first, *others = tasks
  outputs = [
    evaluate.predict_fn(backbone, [naive(first, others[:n])], mesh)
    for n in range(len(tasks))
  ]

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    return {str(n): out(images)[first.name] for n, out in enumerate(outputs)}

  found = evaluate.evaluate_source(
    predict, source, first.spec.evaluation, batch_size=batch_size, mesh=mesh
  )
  return [result["top1"] for result in found.values()]


def masked_accuracies(
  backbone: Backbone,
  tasks: Sequence[Task],
  source: Reader,
  *,
  batch_size: int,
  mesh: Mesh,
) -> list[tuple[float, float]]:
  """Accuracy of the first of masked tasks as others join its pass.

  The arguments are those of `naive_accuracies`, the tasks of masked regimes.

  Returns:
    Accuracy, and the largest difference of a logit from those of the first task
    alone; alone, then with one other, with two, ...
  """
  first = tasks[0]
  # Slots of one size, so that nothing but the neighbours differs.
  size = {"slots": len(tasks), "cells": max(task.spec.cells for task in tasks)}
  slots = [
    inference.fill_slots(backbone, tasks[:n], **size)
    for n in range(1, len(tasks) + 1)
  ]
  differences = []

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    _, context = program.encode(backbone, images, check=False)
    logits = [
      program.read(backbone, some, context)[first.name] for some in slots
    ]
    differences.append([jnp.abs(logits[0] - other).max() for other in logits])
    return {str(n): out for n, out in enumerate(logits)}

  found = evaluate.evaluate_source(
    predict, source, first.spec.evaluation, batch_size=batch_size, mesh=mesh
  )
  largest = jnp.asarray(differences).max(axis=0)
  return [
    (result["top1"], float(difference))
    for result, difference in zip(found.values(), largest, strict=True)
  ]


def section(
  config: Config, naive: Sequence[float], masked: Sequence[tuple[float, float]]
) -> Section:
  """Accuracy of the first task as memories of others are added.

  `naive_accuracies` and `masked_accuracies` are empty where a task diverged.
  """
  first, *others = runs.data_sets(config)
  names = [f"own ({first})", *(f"+ {other}" for other in others)]
  paper = [*paper_numbers.INTERFERENCE, *[None] * len(names)]
  measured = enumerate(zip(naive, masked, strict=True))
  rows: list[Row] = [
    {
      "memories": names[i],
      "no mask": unmasked,
      "difference, no mask": unmasked - naive[0],
      "masked": kept,
      "difference, masked": kept - masked[0][0],
      "largest difference of a logit": largest,
      "paper, no mask": paper[i],
    }
    for i, (unmasked, (kept, largest)) in measured
  ]
  missing = "Not measured: a task diverged at every learning rate."
  return Section(
    title="Interference of memories that are put side by side",
    rows=rows,
    notes=(
      *(() if rows else (missing,)),
      f"Tasks of {config.task.cells} cells with the first of the seeds, each "
      "at the learning rate that is best on validation; test split of "
      f"{config.data.name}. A row has the memories of those above it, too, and "
      "its differences are to the first. The paper's numbers are of "
      "i-Naturalist, then + Places, + CIFAR, + SUN.",
    ),
  )
