"""Initialization of the parameters of tasks, as Flax modules."""

# Annotations stay strings, so that `help` shows jax.Array by its name.
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax

from memory_vit.model.parts import PARTS, InitialValues
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import compilation


class TaskParams(nn.Module):
  """The parameters of one task, without a fine-tuned backbone."""

  config: ViTConfig
  spec: TaskSpec
  start: InitialValues = InitialValues()

  @nn.compact
  def __call__(self) -> dict[str, Any]:
    shapes = self.spec.expected_shapes(
      self.config.width, self.config.depth, self.config.summary_tokens
    )
    return {
      name: self.param(
        name, functools.partial(PARTS[name].init, start=self.start), shape
      )
      for name, shape in shapes.items()
    }


class TaskParameters(nn.Module):
  """The parameters of all tasks of a model, under the names of the tasks."""

  config: ViTConfig
  specs: tuple[TaskSpec, ...]

  @nn.compact
  def __call__(self) -> list[dict[str, Any]]:
    return [TaskParams(self.config, s, name=s.name)() for s in self.specs]


def init_task_params(
  config: ViTConfig, spec: TaskSpec, start: InitialValues, key: jax.Array
) -> dict[str, Any]:
  """Initialize the parameters of a new task."""
  # Initial values depend on neither name nor parents: replace these, so that
  # tasks of equal shapes share a program.
  spec = dataclasses.replace(
    spec.for_programs, name="task", attends_to=(), parent_digests=()
  )
  module = TaskParams(config, spec, start)
  if isinstance(key, jax.core.Tracer):  # `_init` is compiled with its caller
    return _init(module, key)
  # The program runs once per task, so it is compiled with less optimization.
  init = jax.jit(
    _init, static_argnums=0, compiler_options=compilation.options()
  )
  with jax.ensure_compile_time_eval():  # run now, even within a trace
    params: dict[str, Any] = init(module, key)
  return params


def _init(module: TaskParams, key: jax.Array) -> dict[str, Any]:
  params: dict[str, Any] = module.init(key)["params"]
  return params
