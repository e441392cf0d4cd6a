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

  table: str = clu_overview.get_parameter_overview(trained, include_stats=False)
  return table


def part_norms(
  params: Mapping[str, Mapping[str, Any]], names: Iterable[str], mesh: Mesh
) -> dict[str, dict[str, float]]:
  """Return {task: {tag: norm}} for the parts of each task.

  Memory has one norm per layer, the mean over its cells. All processes must
  call. A separate program computes the norms, so that the training step is the
  same with and without logging.
  """
  norms = _program(mesh)
  parts_by_name = jax.device_get({name: norms(params[name]) for name in names})
  return {name: _by_tag(parts) for name, parts in parts_by_name.items()}


@functools.cache
def _program(mesh: Mesh) -> Any:
  """Return `_norms` under `jax.jit`, with results on all devices of a mesh."""
  return jax.jit(_norms, out_shardings=sharding.replicated(mesh))


def _norms(params: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Return {part: norm}; memory cells have an array of norms, one per layer."""
  return {
    name: PARTS[name].norm(values)
    if name in PARTS
    else optax.tree.norm(values)  # the backbone, in the regime "full"
    for name, values in params.items()
    if trees.count(values)  # memory with 0 cells has no norm
  }


def _by_tag(parts: Mapping[str, Any]) -> dict[str, float]:
  """Return {tag in TensorBoard: norm} for the parts of a task."""
  by_tag = {}
  for part, norm in parts.items():
    if not np.ndim(norm):
      by_tag[f"norm/{part}"] = float(norm)
      continue
    for layer, value in enumerate(norm, start=1):
      by_tag[f"norm/{part}/layer_{layer:02}"] = float(value)
  return by_tag
