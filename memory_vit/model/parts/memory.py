"""Memory: cells that the token of a task attends to in each layer (the paper).

The block's own projections make keys and values of them, the same for all
images. They have no query, no MLP and no residual (Figure 2 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from etils import epy
from jaxtyping import Float

from memory_vit.model.parts.part import Axes, InitialValues, Part, round_up_to

with epy.lazy_imports():
  import flax.linen as nn
  import jax
  import jax.numpy as jnp

if TYPE_CHECKING:
  from memory_vit.model.masks import TaskMask
  from memory_vit.model.task import TaskSpec


class Memory(Part):
  """Cells (l, m, d); a task without memory has 0 of them."""

  name = "memory"
  listed = in_every = sized = True
  fields = ("cells",)
  lengths = {"depth": "memory"}

  def size(self, spec: TaskSpec) -> int:
    return spec.cells

  def shapes(self, size: int, axes: Axes) -> Any:
    return (axes.depth, size, axes.width)

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    return nn.initializers.normal(start.memory_std)(key, shapes.shape)

  def problem(self, spec: TaskSpec) -> str:
    if spec.cells >= 0:
      return ""
    return f"cells is {spec.cells}, expected at least 0"

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    place = "before" if spec.memory_norm else "after"
    return [
      ("cells", f"{spec.cells} per layer"),
      ("memory", f"concatenated {place} the LayerNorm "
                 f"(memory_norm {spec.memory_norm})"),
    ]  # fmt: skip

  def norm(self, params: Any) -> Float[jax.Array, " l"]:
    """The mean norm of the cells of each layer."""
    return jnp.linalg.norm(params, axis=-1).mean(axis=-1)

  def cost(self, options: Any) -> tuple[int, ...]:
    return (options.cells,)

  def room(self, specs: Sequence[TaskSpec]) -> int:
    return max(map(self.size, specs), default=0)

  def grown(self, room: int | None, needed: int) -> int:
    return round_up_to(max(room or 0, needed, 1), 8)

  def ready(
    self, stacked: Any, mask: TaskMask, keys_values: Callable[..., Any]
  ) -> Any:
    return keys_values(stacked, mask.memory_norm)
