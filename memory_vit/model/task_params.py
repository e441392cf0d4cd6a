"""Declare the parameters of tasks, and their initial values."""

# As text, `help` shows jax.Array by its name.
from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from memory_vit.model.regimes import regime
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit_config import ViTConfig


class TaskParams(nn.Module):
  """Declares what one task learns; but for the backbone, which is there."""

  config: ViTConfig
  spec: TaskSpec
  # Of memory as it is drawn; the paper's.
  memory_std: float = 0.02

  @nn.compact
  def __call__(self) -> dict[str, Any]:
    """Returns the parameters of `Task`, memory drawn from N(0, std^2)."""
    cfg, spec = self.config, self.spec
    kind = regime(spec.regime)
    # At zero, as vit_jax starts a head: in the first step class token and
    # memory get no gradient yet, and no random head pulls at them.
    params = {
      "head": self.param("head", _zero_head, cfg.width, spec.num_classes)
    }
    if "cls" in kind.trained:
      cls_init = nn.initializers.normal(0.02)
      params["cls"] = self.param("cls", cls_init, (cfg.width,))
    # `cls_masked` and `norms_masked` are masked tasks with no cells.
    if "memory" in kind.trained or kind.composes:
      layers = 1 if kind.attention == "propagated" else cfg.depth
      shape = (layers, spec.cells, cfg.width)
      memory_init = nn.initializers.normal(self.memory_std)
      params["memory"] = self.param("memory", memory_init, shape)
    if "norms" in kind.trained:
      params["norms"] = self.param("norms", _norms, cfg.depth, cfg.width)
    if "adapters" in kind.trained:
      params["adapters"] = self.param(
        "adapters", _adapters, cfg.depth, cfg.width, spec.bottleneck
      )
    return params


def _adapters(
  key: jax.Array, depth: int, width: int, bottleneck: int
) -> dict[str, Any]:
  """Adapters of all layers, which start as the identity.

  See `encoder.bottleneck_adapter`.
  """
  down = nn.initializers.lecun_normal(batch_axis=0)

  def adapter(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    return {
      "down": {
        "kernel": down(key, (depth, width, bottleneck)),
        "bias": jnp.zeros((depth, bottleneck)),
      },
      "up": {
        "kernel": jnp.zeros((depth, bottleneck, width)),
        "bias": jnp.zeros((depth, width)),
      },
    }

  attention, mlp = jax.random.split(key)
  return {"attention": adapter(attention), "mlp": adapter(mlp)}


def _norms(key: jax.Array, depth: int, width: int) -> dict[str, jax.Array]:
  """Added to the LayerNorms of all blocks, and the last: at first nothing."""
  del key
  shape = (2 * depth + 1, width)
  return {"scale": jnp.zeros(shape), "bias": jnp.zeros(shape)}


def _zero_head(
  key: jax.Array, width: int, classes: int
) -> dict[str, jax.Array]:
  del key
  return {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros((classes,))}


class Tasks(nn.Module):
  """The parameters of all tasks of a model, under their names."""

  config: ViTConfig
  specs: tuple[TaskSpec, ...]

  @nn.compact
  def __call__(self) -> list[dict[str, Any]]:
    """Returns one tree for each of `specs`, in their order."""
    return [TaskParams(self.config, s, name=s.name)() for s in self.specs]
