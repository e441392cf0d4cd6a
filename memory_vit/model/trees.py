"""Parameter trees: plain nested dictionaries, addressed by "a/b/c" names."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

Tree = dict[str, Any]
AnyArray = jax.Array | np.ndarray


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Convert a nested dictionary to {"outer/inner": leaf}."""
  return traverse_util.flatten_dict(tree, sep="/")


def unflatten(flat: Mapping[str, Any]) -> Tree:
  """Convert {"outer/inner": leaf} to a nested dictionary."""
  return traverse_util.unflatten_dict(flat, sep="/")


def differences(
  expected: Mapping[str, Any], found: Mapping[str, Any]
) -> list[str]:
  """Compare names and shapes of two flat trees; return a line per problem."""
  lines = [
    f"missing: {name} {tuple(expected[name].shape)}"
    for name in sorted(expected.keys() - found.keys())
  ]
  lines += [
    f"extra: {name} {tuple(found[name].shape)}"
    for name in sorted(found.keys() - expected.keys())
  ]
  lines += [
    f"shape of {name}: {tuple(found[name].shape)}, expected "
    f"{tuple(expected[name].shape)}"
    for name in sorted(expected.keys() & found.keys())
    if tuple(found[name].shape) != tuple(expected[name].shape)
  ]
  return lines


def count(tree: Any) -> int:
  """Return the number of values in a tree of arrays, shapes or numbers."""
  return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def unstack(tree: Any) -> list[Any]:
  """Split the arrays of a tree along their first axis.

  jax stacks gradients of these rows; with `a[i]`, it would pad and add them.
  """
  leaves, structure = jax.tree.flatten(tree)
  rows = zip(*map(jnp.unstack, leaves), strict=True)
  return [jax.tree.unflatten(structure, row) for row in rows]


def is_traced(tree: Any) -> bool:
  """Return whether a tree contains tracers, whose values are unknown."""
  return any(
    isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)
  )


def bytes_of(tree: Any) -> int:
  """Return the number of bytes of a tree of arrays (or of their shapes)."""
  return sum(
    int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def array_digest(array: Any) -> str:
  """Return a hexadecimal SHA-256 over an array's dtype, shape and bytes."""
  digest = hashlib.sha256()
  _update(digest, np.asarray(array))
  return digest.hexdigest()


def fingerprint(tree: Mapping[str, Any]) -> str:
  """Return a SHA-256 over names, dtypes, shapes and bytes, in any key order."""
  digest = hashlib.sha256()
  for name, leaf in sorted(flatten(tree).items()):
    digest.update(name.encode() + b"\0")
    _update(digest, np.asarray(leaf))
  return digest.hexdigest()


def _update(digest: Any, array: np.ndarray) -> None:
  """Feed an array to a hash, in little-endian byte order."""
  if array.dtype.byteorder == ">":
    array = array.astype(array.dtype.newbyteorder("<"))
  digest.update(f"{array.dtype.name}{array.shape}".encode() + b"\0")
  digest.update(np.ascontiguousarray(array).view(np.uint8).data)
