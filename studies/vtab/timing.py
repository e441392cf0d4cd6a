"""Seconds of a training step and of a pass, on random images."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.data.reader import Reader
from memory_vit.evaluation.evaluate import predict_fn
from memory_vit.frozen.layout import RowLayout
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BACKBONE
from memory_vit.runtime import sharding
from memory_vit.train import sweep
from memory_vit.train.run_context import RunContext
from memory_vit.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
  """What a step of a regime takes.

  Attributes:
    seconds: of all its trials; without the frozen part, where that is kept.
    row_bytes: of what is kept of an image; 0 where nothing is.
  """

  seconds: float
  row_bytes: int


def step_cost(
  config: Config, backbone: Backbone, mesh: Mesh, train: Reader
) -> StepCost:
  """Time a training step, after one that compiles; nothing is read.

  Args:
    config: of a run, with the size of its images and the number of its steps.
    backbone: on the devices of the mesh.
    mesh: over which the batch is split.
    train: the training split, for its number of classes.
  """
  trainer = Trainer(
    config=config, context=RunContext(mesh), backbone=backbone, train=train
  )
  trials = sweep.trials_of(config, "timed")
  if not config.learned.shares_pass:
    trials = trials[:1]
  start = trainer.start(trials)
  rows, size = config.batch_size // jax.process_count(), config.image_size
  batch: dict[str, Any] = sharding.shard_batch(
    {
      "image": _images(rows, size),
      "label": np.zeros(rows, np.int32),
    },
    mesh,
  )
  row_bytes = 0
  if trainer.kept:
    inputs = trainer.frozen_pass(start.step)(batch.pop("image"))
    row_bytes = RowLayout.of(inputs, config.keep.dtype).nbytes
    batch["inputs"] = inputs
  frozen, state = trainer.frozen(), start.state

  def step() -> Any:
    nonlocal state
    state, metrics = start.step(state, frozen, batch)
    return metrics

  return StepCost(seconds=_second_call(step), row_bytes=row_bytes)


def pass_seconds(config: Config, backbone: Backbone, mesh: Mesh) -> float:
  """Time the plain backbone, after a batch that compiles; of one image."""
  rows = config.batch_size_eval
  host = _images(rows // jax.process_count(), backbone.config.image_size)
  images = sharding.shard_batch({"image": host}, mesh)["image"]
  predict = predict_fn(backbone, (), mesh, outputs=(BACKBONE,))
  return _second_call(lambda: predict(images)) / rows


def _images(rows: int, size: int) -> np.ndarray:
  """Random images float32 (b, side, side, 3), of this process."""
  drawn = np.random.default_rng(0).uniform(-1, 1, (rows, size, size, 3))
  return drawn.astype(np.float32)


def _second_call(call: Callable[[], Any]) -> float:
  """Seconds of the second of two calls."""
  seconds = 0.0
  for _ in range(2):
    began = time.perf_counter()
    jax.block_until_ready(call())
    seconds = time.perf_counter() - began
  return seconds
