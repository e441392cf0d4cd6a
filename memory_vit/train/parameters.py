"""Counts and norms of trained parameters, part by part and layer by layer."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from memory_vit.model import trees
from memory_vit.model.parts import PARTS
from memory_vit.runtime import sharding


def parameter_counts(trained: trees.Tree, frozen: trees.Tree) -> str:
  t, f = trees.count(trained), trees.count(frozen)
  return f"trained: {t:,} ({100 * t / (t + f):.2f} %), frozen: {f:,}"


def parameter_table(trained: trees.Tree) -> str:
  from clu import parameter_overview as clu_overview

  found: str = clu_overview.get_parameter_overview(trained, include_stats=False)
  return found


def part_norms(
  params: Mapping[str, Mapping[str, Any]], names: Iterable[str], mesh: Mesh
) -> dict[str, dict[str, float]]:
  """Norms of the parameters of tasks, by part; of memory also by layer.

  Memory has the mean norm of its cells. All processes must call. A separate
  program computes the norms, once for all tasks of the same shapes: the
  training step stays the same, and costs nothing more if nothing is logged.
  """
  norms = _program(mesh)
  found = jax.device_get({name: norms(params[name]) for name in names})
  return {name: _by_tag(parts) for name, parts in found.items()}


@functools.cache
def _program(mesh: Mesh) -> Any:
  """`_norms`, compiled with results on every device."""
  return jax.jit(_norms, out_shardings=sharding.replicated(mesh))


def _norms(params: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Norms of the parts of a task: () or, one per layer, (l,)."""
  return {
    name: PARTS[name].norm(values)
    if name in PARTS
    else optax.tree.norm(values)  # a backbone of its own
    for name, values in params.items()
    if trees.count(values)  # a masked task may have no cells
  }


def _by_tag(parts: Mapping[str, Any]) -> dict[str, float]:
  """The norms of a task by their tags in TensorBoard."""
  found = {}
  for part, norm in parts.items():
    if not np.ndim(norm):
      found[f"norm/{part}"] = float(norm)
      continue
    for layer, value in enumerate(norm, start=1):
      found[f"norm/{part}/layer_{layer:02}"] = float(value)
  return found
