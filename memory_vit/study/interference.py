"""Interference of other tasks' memories, without a mask and with one.

The paper's study of section 4.4 (`memory_naive` in its terms): memories that
were trained apart are put side by side, and every token attends to all.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from memory_vit.data import datasets
from memory_vit.errors import TaskError
from memory_vit.evaluation import evaluate
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task, require_backbone
from memory_vit.tasks import inference


def naive(first: Task, others: Sequence[Task]) -> Task:
  """A task with the memories of others beside its own, in every layer.

  Args:
    first: of the regime "memory"; its class token and its head stay.
    others: of the same regime.

  Raises:
    TaskError: for tasks of another regime or backbone.
  """
  for task in (first, *others):
    require_backbone(task.spec, first.spec.backbone, first.spec.name)
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
  return Task(spec, {**first.params, "memory": memory})


def naive_accuracies(
  backbone: Backbone,
  tasks: Sequence[Task],
  source: datasets.Source,
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
  name = tasks[0].name
  outputs = [
    evaluate.predict_fn(backbone, [naive(tasks[0], tasks[1:n])], mesh)
    for n in range(1, len(tasks) + 1)
  ]

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    return {str(i): output(images)[name] for i, output in enumerate(outputs)}

  found = evaluate.evaluate_source(
    predict,
    source,
    tasks[0].spec.evaluation,
    batch_size=batch_size,
    mesh=mesh,
  )
  return [found[str(i)]["top1"] for i in range(len(tasks))]


def masked_accuracies(
  backbone: Backbone,
  tasks: Sequence[Task],
  source: datasets.Source,
  *,
  batch_size: int,
  mesh: Mesh,
) -> list[tuple[float, float]]:
  """Accuracy of the first of masked tasks as others join its pass.

  Args:
    backbone: of the tasks.
    tasks: of masked regimes; the first is evaluated.
    source: split of its data set.
    batch_size: of all processes together.
    mesh: over which batches are split.

  Returns:
    Accuracy, and the largest difference of a logit from those of the first task
    alone; alone, then with one other, with two, ...
  """
  name = tasks[0].spec.name
  # Slots of one size, so that nothing but the neighbours differs.
  size = {
    "slots": len(tasks),
    "cells": max(task.spec.cells for task in tasks),
  }
  slots = [
    inference.fill_slots(backbone, tasks[:n], **size)
    for n in range(1, len(tasks) + 1)
  ]
  differences = []

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    _, context = inference.encode(backbone, images, check=False)
    found = [inference.read(backbone, some, context)[name] for some in slots]
    differences.append([jnp.abs(found[0] - other).max() for other in found])
    return {str(i): found[i] for i in range(len(found))}

  found = evaluate.evaluate_source(
    predict,
    source,
    tasks[0].spec.evaluation,
    batch_size=batch_size,
    mesh=mesh,
  )
  largest = jnp.asarray(differences).max(axis=0)
  return [(found[str(i)]["top1"], float(d)) for i, d in enumerate(largest)]
