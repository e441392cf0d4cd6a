"""Compare tasks in one model with each task alone, and with the plain ViT."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from memory_vit.data import batching
from memory_vit.data.split import Split
from memory_vit.errors import ConfigError
from memory_vit.evaluation import unknown_images
from memory_vit.evaluation.evaluate import evaluate_source
from memory_vit.evaluation.timing import median_seconds
from memory_vit.evaluation.unknown_images import UnknownImages
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.kinds.scores import Scores, finite
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import (
  BACKBONE,
  EvalPreprocessing,
  Task,
  TaskSpec,
)
from memory_vit.runtime import sharding
from memory_vit.runtime.messages import utf8
from memory_vit.tasks import compose, inference
from memory_vit.tasks.program import encode, make_program
from memory_vit.tasks.split_forward import Logits

Images = Float[Array, "b side side 3"]
# Other tasks in a pass change how a task's sums are rounded. The task's logits
# may change by this share of the greatest logit.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


class Evaluator:
  """One model with all tasks, and the models that it is compared with."""

  def __init__(
    self,
    backbone: Backbone,
    tasks: Sequence[Task],
    mesh: jax.sharding.Mesh,
    batch_size: int,
    *,
    one_shape: bool = False,
  ) -> None:
    """Make a program of all tasks, and a program of each task alone.

    Args:
      backbone: the backbone, on the devices of the mesh.
      tasks: all tasks of the model; or one task that cannot share a pass, and
        is therefore compared with nothing.
      mesh: devices over which batches are sharded.
      batch_size: number of images in a batch, over all processes.
      one_shape: whether to pad each task's program to the cells and classes of
        the largest task, so that all tasks use the same compiled program.

    Raises:
      TaskError: if tasks need another backbone, or cannot share a pass.
    """
    self._backbone, self._mesh = backbone, mesh
    self._batch_size = batch_size
    self._evaluate = functools.partial(
      evaluate_source, batch_size=batch_size, mesh=mesh
    )
    self._specs = [task.spec for task in tasks]
    compose.require_one_pass(tasks)
    tasks = sharding.put(tuple(tasks), mesh)
    self._together = make_program(backbone, tasks)
    self._preprocessing = tasks[0].spec.preprocessing  # equal for all tasks
    specs = [task.spec for task in tasks if one_shape]
    most = {
      "cells": max((spec.cells for spec in specs), default=0),
      "classes": max((spec.num_classes for spec in specs), default=0),
    }
    # Each program contains one task and the tasks that this task attends to.
    self._alone = {
      task.spec.name: make_program(
        backbone, compose.with_parents(tasks, task.spec.name), **most
      )
      for task in tasks
    }

  def evaluate(
    self,
    source: Split,
    names: Sequence[str],
    *,
    verify: bool,
    predictions: bool = False,
  ) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Evaluate tasks on a data set, with all tasks in the pass.

    `verify` compares outputs to those of each task alone and of the plain ViT.

    Returns:
      {name: entry of the result}, and {name: predictions}, which are None
      without `predictions`; see `evaluate_source`.

    Raises:
      ConfigError: if `verify` is True for a task that cannot share a pass.
    """
    if verify:
      require_comparable(self._specs)
    differences = _Differences()

    def predict(images: Images) -> Logits:
      out = self._together(self._backbone, images)
      shown = {name: out[name] for name in names}
      if verify:
        _, context = encode(self._backbone, images, check=False)
        differences.add(BACKBONE, out[BACKBONE], self._plain(images))
        for name in names:
          alone = self._alone[name].read(self._backbone, context)[name]
          differences.add(name, out[name], alone)
          shown[f"{name} alone"] = alone
      return shown

    kinds = {spec.name: spec.kind for spec in self._specs}
    evaluations = self._evaluate(
      predict,
      source,
      self._preprocessing,
      kinds=kinds | {f"{name} alone": kinds[name] for name in names},
      also=["predictions"] if predictions else [],
      # Omit the predictions of "NAME alone", because they are not used.
      predictions_of=names,
    )
    results = {}
    for name in names:
      kind, scores = kinds[name], evaluations[name].scores
      entry = {"name": name, "kind": kind.name, **_evaluated(source, scores)}
      if evaluations[name].majority is not None:
        entry["majority"] = evaluations[name].majority
      if evaluations[name].thresholds:
        entry["thresholds"] = list(evaluations[name].thresholds)
      if rejection := evaluations[name].rejection:
        entry["rejection"] = dataclasses.asdict(rejection)
      if kind.temperature != 1:
        entry["temperature"] = kind.temperature
      if kind.units:
        entry["units"] = list(kind.units)
      results[name] = entry
      if verify:
        alone = {
          "score": evaluations[f"{name} alone"].scores.score,
          "max_difference": differences.relative(name),
          "outputs_bit_equal": differences.equal(BACKBONE),
        }
        dtype = self._backbone.config.dtype
        entry["alone"] = {**alone, "verified": agrees(alone, dtype)}
    return results, {name: evaluations[name].predictions for name in names}

  def unknown_images(
    self, directory: Path, known: Mapping[str, SplitPredictions]
  ) -> dict[str, UnknownImages]:
    """Evaluate tasks on unknown images; see `unknown_images.evaluate`."""
    return unknown_images.evaluate(
      functools.partial(self._together, self._backbone),
      directory,
      [spec for spec in self._specs if spec.name in known],
      known,
      mesh=self._mesh,
      batch_size=self._batch_size,
    )

  def upstream(
    self, source: Split, preprocessing: EvalPreprocessing
  ) -> dict[str, Any]:
    """Evaluate the original head, with all tasks in the pass and without tasks.

    Scores are None if the data set has another number of classes than the head.

    Raises:
      ConfigError: for a task that cannot share a pass: its pass has no original
        output.
    """
    require_comparable(self._specs)
    differences = _Differences()

    def predict(images: Images) -> Logits:
      out = self._together(self._backbone, images)[BACKBONE]
      plain = self._plain(images)
      differences.add(BACKBONE, out, plain)
      return {"with": out, "plain": plain}

    own_classes = self._backbone.config.num_classes
    evaluations = self._evaluate(
      predict,
      source,
      preprocessing,
      other_classes=source.num_classes != own_classes,
    )
    return {
      **_evaluated(source, evaluations["with"].scores),
      "score_plain": evaluations["plain"].scores.score,
      "outputs_bit_equal": differences.equal(BACKBONE),
    }

  def timing(self, source: Split) -> dict[str, Any]:
    """Time the plain ViT, all tasks together, and each task in its own pass.

    Times are those of `median_seconds` for one batch, without reading images.
    """
    batches = batching.eval_batches(
      source, self._preprocessing, batch_size=self._batch_size
    )
    images = next(sharding.prefetch(batches, self._mesh))["image"]
    seconds = median_seconds(
      {
        "plain": lambda: self._plain(images),
        "together": lambda: self._together(self._backbone, images),
        "one_by_one": lambda: [
          alone(self._backbone, images) for alone in self._alone.values()
        ],
      }
    )
    return {
      "batch_size": self._batch_size,
      "tasks": len(self._alone),
      **seconds,
    }

  def _plain(self, images: Images) -> Float[Array, "b c0"]:
    """Return the original outputs, from a program without tasks."""
    config = self._backbone.config
    return inference.plain_program(
      self._backbone.for_programs, images, config=config
    )


def require_comparable(specs: Sequence[TaskSpec]) -> None:
  if alone := [spec for spec in specs if not spec.learned.composes]:
    raise ConfigError(
      f"--verify needs tasks that can share a pass, but {alone[0].name!r} has "
      f"the regime {alone[0].regime!r}, which needs a separate pass. "
      "Leave out --verify; in Python, leave out verify=True and calls of "
      "Evaluator.upstream()."
    )


class _Differences:
  """Greatest differences between two programs' outputs, over all batches."""

  def __init__(self) -> None:
    self._greatest: dict[str, float] = collections.defaultdict(float)
    self._scale: dict[str, float] = collections.defaultdict(float)
    self._equal: dict[str, bool] = collections.defaultdict(lambda: True)

  def add(
    self,
    name: str,
    actual: Float[Array, "b c"],
    expected: Float[Array, "b c"],
  ) -> None:
    """Compare the outputs of a batch; every process must call this."""
    a, b = sharding.to_host((actual, expected))
    self._equal[name] &= a.tobytes() == b.tobytes()
    # Use np.maximum instead of max, because np.maximum keeps NaN.
    greatest = np.abs(a - b).max()
    self._greatest[name] = float(np.maximum(self._greatest[name], greatest))
    scale = np.abs(b).max()
    self._scale[name] = float(np.maximum(self._scale[name], scale))

  def equal(self, name: str) -> bool:
    return self._equal[name]

  def relative(self, name: str) -> float | None:
    """Return greatest difference / greatest output; None if not finite."""
    return finite(self._greatest[name] / max(self._scale[name], 1e-30))


def _evaluated(source: Split, scores: Scores) -> dict[str, Any]:
  """Return {key: value} for the JSON result: data set, split and scores."""
  return {
    "data": source.name,
    "directory": utf8(source.directory),
    "split": source.split,
    **dataclasses.asdict(scores),
  }


def agrees(alone: Mapping[str, Any], dtype: str) -> bool:
  """Return whether original outputs are equal and differences are small."""
  difference = alone["max_difference"]
  close = difference is not None and difference <= TOLERANCE[dtype]
  return bool(alone["outputs_bit_equal"] and close)


def verified(result: Mapping[str, Any]) -> bool:
  upstream = result["backbone"]["upstream"]
  if upstream and not upstream["outputs_bit_equal"]:
    return False
  return all(task["alone"]["verified"] for task in result["tasks"])
