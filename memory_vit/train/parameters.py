"""Counts of parameters, and norms part by part and layer by layer."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from clu import parameter_overview as clu_overview
from jax.sharding import Mesh

from memory_vit.model import trees
from memory_vit.runtime import sharding


def parameter_counts(trained: trees.Tree, frozen: trees.Tree) -> str:
  """The counts of trained and frozen parameters, in one line."""
  t, f = trees.count(trained), trees.count(frozen)
  return f"trained: {t:,} ({100 * t / (t + f):.2f} %), frozen: {f:,}"


def parameter_table(trained: trees.Tree) -> str:
  """A row for every trained array."""
  found: str = clu_overview.get_parameter_overview(trained, include_stats=False)
  return found


def part_norms(
  params: Mapping[str, Mapping[str, Any]], names: Iterable[str], mesh: Mesh
) -> dict[str, dict[str, float]]:
  """Compute norms of the parameters of tasks; all processes must call.

  A program of its own does it, once for all tasks of the same shapes: the step
  stays as it is, and costs nothing more where nothing is logged.

  Args:
    params: {name: parameters of a task}.
    names: of those that are wanted.
    mesh: over which parameters may be split.

  Returns:
    {name: {"norm/head": the norm of all its values, "norm/cls", ...,
    "norm/memory/layer_01": the mean norm of the cells of a layer, ...}}.
  """
  norms = _program(mesh)
  found = jax.device_get({name: norms(params[name]) for name in names})
  return {name: _by_tag(parts) for name, parts in found.items()}


@functools.cache
def _program(mesh: Mesh) -> Any:
  """`_norms`, compiled to leave its results on every device."""
  return jax.jit(_norms, out_shardings=sharding.replicated(mesh))


def _norms(params: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Norms () of the parts of a task; of memory (l, m, d) one a layer (l,)."""
  return {
    part: jnp.linalg.norm(values, axis=-1).mean(axis=-1)
    if part == "memory"
    else optax.tree.norm(values)
    for part, values in params.items()
    if part != "memory" or values.size  # a masked task may have no cells
  }


def _by_tag(parts: Mapping[str, Any]) -> dict[str, float]:
  """The norms of a task, as TensorBoard shows them."""
  found = {}
  for part, norm in parts.items():
    if part != "memory":
      found[f"norm/{part}"] = float(norm)
      continue
    for layer, value in enumerate(norm, start=1):
      found[f"norm/memory/layer_{layer:02}"] = float(value)
  return found
