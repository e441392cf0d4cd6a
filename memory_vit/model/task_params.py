"""Initialization of the parameters of tasks, as modules of Flax."""

# As text, `help` shows jax.Array by its name.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memory_vit.model.task import TaskSpec
from memory_vit.model.vit_config import ViTConfig


class TaskParams(nn.Module):
  """The parameters of one task, but for the backbone that it may hold."""

  config: ViTConfig
  spec: TaskSpec
  # Of the initial memory, N(0, std^2); the paper's.
  memory_std: float = 0.02

  @nn.compact
  def __call__(self) -> dict[str, Any]:
    init = {
      # As in vit_jax: no random head pulls at class token and memory, which get
      # no gradient in the first step.
      "head": _zeros,
      "cls": _normal(0.02),
      "memory": _normal(self.memory_std),
      "norms": _zeros,
      "layers": _zeros,
      "side": _side,
      "probe": _probe,
      "adapters": _adapters,
    }
    shapes = self.spec.expected_shapes(
      self.config.width, self.config.depth, self.config.summary_tokens
    )
    return {
      part: self.param(part, init[part], shape)
      for part, shape in shapes.items()
    }


def _zeros(key: jax.Array, shapes: Any) -> Any:
  del key
  # Of numpy: jnp.zeros compiles a program for every shape.
  return jax.tree.map(
    lambda one: jnp.asarray(np.zeros(one.shape, np.float32)), shapes
  )


def _normal(std: float) -> Callable[[jax.Array, Any], jax.Array]:
  init = nn.initializers.normal(std)
  return lambda key, one: init(key, one.shape)


def _adapters(key: jax.Array, shapes: Any) -> dict[str, Any]:
  """Adapters of all layers, which start as the identity."""
  down = nn.initializers.lecun_normal(batch_axis=0)

  def adapter(key: jax.Array, shapes: Any) -> dict[str, Any]:
    params = _zeros(key, shapes)
    params["down"]["kernel"] = down(key, shapes["down"]["kernel"].shape)
    return params

  attention, mlp = jax.random.split(key)
  return {
    "attention": adapter(attention, shapes["attention"]),
    "mlp": adapter(mlp, shapes["mlp"]),
  }


def _side(key: jax.Array, shapes: Any) -> dict[str, Any]:
  """A side stream whose output starts at zero."""
  params = _zeros(key, shapes)
  down, conv, first, second = jax.random.split(key, 4)
  kernel = shapes["down"]["kernel"].shape
  std = kernel[1] ** -0.5
  params["down"]["kernel"] = std * jax.random.normal(down, kernel)
  if "conv" not in shapes:
    return params
  params["conv"] = jax.random.normal(conv, shapes["conv"].shape) / 3
  for norm in ("conv_norm", "mlp_norm"):
    params[norm]["scale"] = params[norm]["scale"] + 1.0
  lecun = nn.initializers.lecun_normal(batch_axis=0)
  for name, subkey in (("Dense_0", first), ("Dense_1", second)):
    layer = params["mlp"][name]
    layer["kernel"] = lecun(subkey, layer["kernel"].shape)
  return params


def _probe(key: jax.Array, shapes: Any) -> dict[str, Any]:
  """A probe that starts as the mean of all tokens, unchanged."""
  params = _zeros(key, shapes)
  params["scale"] = params["scale"] + 1.0
  down = nn.initializers.lecun_normal(batch_axis=0)
  return {**params, "down": down(key, shapes["down"].shape)}


class TaskParameters(nn.Module):
  """The parameters of all tasks of a model, under their names."""

  config: ViTConfig
  specs: tuple[TaskSpec, ...]

  @nn.compact
  def __call__(self) -> list[dict[str, Any]]:
    return [TaskParams(self.config, s, name=s.name)() for s in self.specs]
