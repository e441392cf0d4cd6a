"""Memory: cells that the token of a task attends to in each layer (the paper).

The block's own projections turn cells into keys and values, the same for all
images. In masked regimes and in `memory`, cells have no query, no MLP and no
residual (Figure 2 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import (
  Axes,
  InitialValues,
  Part,
  normal,
  too_small,
)

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt

if TYPE_CHECKING:
  from memory_vit.model.masks import TaskMask
  from memory_vit.model.task import TaskSpec


class Memory(Part):
  """Cells (l, m, d); m is 0 in tasks without memory."""

  name = "memory"
  listed = in_every = True
  unit = 8
  fields = ("cells",)
  lengths = {"memory": "memory"}

  def size(self, spec: TaskSpec) -> int:
    return spec.cells

  def shapes(self, size: int, axes: Axes) -> Any:
    return (axes.memory, size, axes.width)

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    return normal(key, shapes.shape, start.memory_std)

  def problem(self, spec: TaskSpec) -> str:
    return too_small(spec, "cells", 0)

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    place = "before" if spec.memory_norm else "after"
    return [
      ("cells", f"{spec.cells} per layer"),
      ("memory", f"concatenated {place} the LayerNorm "
                 f"(memory_norm {spec.memory_norm})"),
    ]  # fmt: skip

  def norm(self, params: Any) -> jt.Float[jax.Array, " l"]:
    """Return the mean norm of the cells of each layer."""
    return jnp.linalg.norm(params, axis=-1).mean(axis=-1)

  def cost(self, options: Any) -> tuple[int, ...]:
    return (options.cells,)

  def ready(
    self, stacked: Any, mask: TaskMask, keys_values: Callable[..., Any]
  ) -> Any:
    return keys_values(stacked, mask.memory_norm)
