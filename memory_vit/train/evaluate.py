"""Evaluate the trials of a pack on a split, in one pass."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from memory_vit.data.split import Split
from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
from memory_vit.kinds.scores import Also, Evaluation
from memory_vit.model.task import Task
from memory_vit.train import padded_head
from memory_vit.train.inputs import RunInputs


def evaluate(
  inputs: RunInputs,
  tasks: Sequence[Task],
  split: Split,
  cached: Iterable[dict[str, Any]] | None = None,
  *,
  also: Collection[Also] = (),
  predictions_of: str | None = None,
) -> dict[str, Evaluation]:
  """Evaluate the tasks of a pack.

  `cached` are batches with cached outputs of the frozen pass. For the result,
  `also` and `predictions_of`, see `evaluate_source`. A task with a temperature
  is also evaluated at temperature 1, under the name `uncalibrated(name)`.
  """
  if cached is None and inputs.cache and split.embedded:
    cached = inputs.cache.eval_batches(split, "test")
  padded = inputs.config.task.padded_classes
  outputs = predict_fn(
    inputs.rounded_backbone,
    [*inputs.parents, *tasks],
    inputs.mesh,
    outputs=[task.name for task in tasks],
    classes=padded,
    cached=cached is not None,
  )
  if padded:
    classes = inputs.splits["train"].num_classes
    outputs = padded_head.of_classes(outputs, classes)

  kinds = {
    task.name: task.spec.kind if task.spec.class_names else inputs.kind
    for task in tasks
  }
  plain = {
    uncalibrated(name): dataclasses.replace(kind, temperature=1.0)
    for name, kind in kinds.items()
    if kind.temperature != 1
  }

  def predict(images: Any) -> dict[str, jax.Array]:
    inputs.stop.check()
    logits = outputs(images)
    again = {uncalibrated(name): rows for name, rows in logits.items()}
    return logits | {name: again[name] for name in plain}

  return evaluate_source(
    predict,
    split,
    tasks[0].spec.preprocessing,
    batch_size=inputs.config.batch_size_eval,
    mesh=inputs.mesh,
    kinds=kinds | plain,
    also=also,
    batches=cached,
    predictions_of=predictions_of,
  )


def validate(
  inputs: RunInputs,
  tasks: Mapping[str, Task],
  params: Mapping[str, Any],
  also: Collection[Also] = (),
) -> dict[str, Evaluation]:
  """Evaluate parameters of a pack on the validation split."""
  split = inputs.splits["validation"]
  trained = [
    dataclasses.replace(task, params=params[name])
    for name, task in tasks.items()
  ]
  cached = inputs.cache.eval_batches(split) if inputs.cache else None
  return evaluate(inputs, trained, split, cached, also=also)


def uncalibrated(name: str) -> str:
  """Return the name of a task's evaluation at temperature 1."""
  return f"{name} uncalibrated"
