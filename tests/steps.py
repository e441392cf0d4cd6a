"""Single optimiser steps, for the tests of steps and of meshes."""

import functools

import jax
import numpy as np

from memory_vit.config import OptimConfig
from memory_vit.runtime import sharding
from memory_vit.tasks import split_forward
from memory_vit.train import step
from memory_vit.train.loss import HeadLoss
from memory_vit.train.optim import make_optimizer, make_schedule


@functools.cache
def step_for(config, mesh, read, trained, smoothing, parts):
  """A step: what two tests need is compiled once."""
  optim_config = OptimConfig(warmup=0.0, schedule="constant")
  rates = {
    spec.name: make_schedule(optim_config, 0.05 * (i + 1), 10)
    for i, spec in enumerate(trained)
  }
  optimizer = make_optimizer(dict.fromkeys(rates, optim_config), rates)
  cut = split_forward.make_split_forward(config, (*read, *trained))
  return step.Step(
    cut, optimizer, mesh, accumulation_steps=parts,
    losses=dict.fromkeys(rates, HeadLoss(smoothing=smoothing)),
    schedules=rates,
  )  # fmt: skip


def setting(backbone, mesh, tasks, parents=(), *, smoothing=0.0, parts=1):
  """The step of a run that trains `tasks`, and its first state."""
  params = {task.spec.name: task.params for task in tasks}
  step_fn = step_for(
    backbone.config, mesh, tuple(task.spec for task in parents),
    tuple(task.spec for task in tasks), smoothing, parts,
  )  # fmt: skip
  frozen = {
    "backbone": sharding.put_backbone(backbone.params, mesh),
    "tasks": {task.spec.name: task.params for task in parents},
  }
  return step_fn, step_fn.create_state(params), frozen


def batch(images, mesh, classes=3):
  labels = (np.arange(len(images)) % classes).astype(np.int32)
  rows = {"image": np.tile(images, (4, 1, 1, 1)), "label": np.tile(labels, 4)}
  return sharding.shard_batch(rows, mesh)


def assert_close(a, b, atol=2e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)
