"""Compiled programs of a forward pass.

`encode_program` is one executable per backbone, whatever the tasks are, so that
the original outputs stay bitwise identical. `read_program` is small, and
computes everything that depends on the tasks.
"""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32

from memory_vit.model.context import Cells, Context
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.pieces import ImageProgram


@ImageProgram
def encode_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> tuple[Float32[Array, "b c0"], Context]:
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")


@ImageProgram
def plain_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b c0"]:
  """Compute only the original outputs: XLA drops the unused context."""
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")[0]


@ImageProgram
def summary_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b n d"]:
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="summarize")


def read_tasks(
  task_params: Any,
  backbone_params: Any,
  context: Context,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> dict[str, Float32[Array, "b _"]]:
  """Run `MemoryViT.read`; training differentiates it w.r.t. `task_params`."""
  params = {"backbone": backbone_params, "tasks": task_params}
  model = MemoryViT(config, specs)
  return apply(model, params, context, method="read")


@functools.partial(jax.jit, static_argnames="config")
def read_program(
  backbone_params: Any,
  slots: SlotArrays,
  context: Context,
  *,
  config: ViTConfig,
) -> Float32[Array, "b t c"]:
  """Run `MemoryViT.read_slots`, compiled once for tasks that fit the slots."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, slots, context, method="read_slots")


@functools.partial(jax.jit, static_argnames="config")
def memory_program(
  backbone_params: Any,
  memory: Float[Array, "l t m d"],
  norm: Bool[Array, " t"],
  *,
  config: ViTConfig,
) -> Cells:
  """Compute keys and values of memory, which are the same for all images."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, memory, norm, method="keys_values")
