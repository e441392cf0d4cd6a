"""Measure the accuracy of a task with the memories of others beside its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import memory_vit as mv
from memory_vit.data import Split, open_run_split
from memory_vit.evaluation import evaluate_source, predict_fn
from memory_vit.runtime import make_mesh
from studies.paper.study import Study


def measure(
  study: Study,
  tasks: Mapping[str, Sequence[Path]],
  backbone: mv.Backbone,
) -> dict[str, Any]:
  """Evaluate the first of `best_tasks`, for `interference.json`."""
  config = study.config
  mesh, source = (
    make_mesh(fsdp=config.mesh.fsdp),
    open_run_split(config, "test"),
  )
  naive_tasks, masked_tasks = (
    [mv.load_task(directory, backbone) for directory in tasks[regime]]
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


def naive(first: mv.Task, others: Sequence[mv.Task]) -> mv.Task:
  """Concatenate the memories of `memory` tasks; the rest is the first's."""
  for task in (first, *others):
    if (task.spec.regime, task.spec.memory_norm) != (
      "memory",
      first.spec.memory_norm,
    ):
      raise mv.MemoryVitError(
        f"task {task.spec.name!r} was learned by {task.spec.regime!r} with "
        f"memory_norm {task.spec.memory_norm}: expected tasks of 'memory' with "
        f"memory_norm {first.spec.memory_norm}."
      )
  memory = jnp.concatenate(
    [task.params["memory"] for task in (first, *others)], axis=1
  )
  spec = dataclasses.replace(first.spec, cells=memory.shape[1])
  return mv.Task(spec, {**first.params, "memory": memory})


def naive_accuracies(
  backbone: mv.Backbone,
  tasks: Sequence[mv.Task],
  source: Split,
  *,
  batch_size: int,
  mesh: jax.sharding.Mesh,
) -> list[float]:
  """Accuracy of the first task with 0, 1, 2, ... others, unmasked."""
  first, *others = tasks
  outputs = [
    predict_fn(backbone, [naive(first, others[:n])], mesh)
    for n in range(len(tasks))
  ]

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    return {str(n): out(images)[first.name] for n, out in enumerate(outputs)}

  found = evaluate_source(
    predict, source, first.spec.preprocessing, batch_size=batch_size, mesh=mesh
  )
  return [_accuracy(result.scores) for result in found.values()]


def masked_accuracies(
  backbone: mv.Backbone,
  tasks: Sequence[mv.Task],
  source: Split,
  *,
  batch_size: int,
  mesh: jax.sharding.Mesh,
) -> list[tuple[float, float]]:
  """Accuracy of the first masked task with 0, 1, 2, ... others in its pass.

  Beside it the largest difference of a logit from those of the task alone.
  """
  first = tasks[0]
  # Slots of one size, so that only the other tasks differ.
  size = {"slots": len(tasks), "cells": max(task.spec.cells for task in tasks)}
  slots = [
    mv.fill_slots(backbone, tasks[:n], **size) for n in range(1, len(tasks) + 1)
  ]
  differences = []

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    _, context = mv.encode(backbone, images, check=False)
    logits = [mv.read(backbone, some, context)[first.name] for some in slots]
    differences.append([jnp.abs(logits[0] - other).max() for other in logits])
    return {str(n): out for n, out in enumerate(logits)}

  found = evaluate_source(
    predict, source, first.spec.preprocessing, batch_size=batch_size, mesh=mesh
  )
  largest = jnp.asarray(differences).max(axis=0)
  return [
    (_accuracy(result.scores), float(difference))
    for result, difference in zip(found.values(), largest, strict=True)
  ]


def _accuracy(scores: mv.Scores) -> float:
  assert scores.accuracy is not None
  return scores.accuracy
