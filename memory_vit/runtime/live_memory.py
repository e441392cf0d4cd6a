"""An estimate of the memory of a traced program, before it is compiled.

Values that are alive at the same time need room beside each other, except those
that a compiler computes where they are read. Which they are is guessed, so the
estimate has a margin. With the batches and contexts beside it, a training step
is estimated at one to two times what XLA takes on a CPU. The frozen pass of
long sequences is estimated at up to five times: XLA does not keep all of its
attention.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# Inlined: a value within is one of the program.
_CALLS = frozenset(
  ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call",
   "custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "checkpoint")
)  # fmt: skip
# The same values, in another form.
_VIEWS = frozenset(
  ("reshape", "transpose", "squeeze", "expand_dims", "split", "unstack",
   "stop_gradient", "copy", "reshard", "sharding_constraint")
)  # fmt: skip
# Computed within the one operation that reads them, unless that is a product.
_FUSED = frozenset(
  ("add", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "expm1",
   "tanh", "logistic", "erf", "erf_inv", "rsqrt", "sqrt", "square", "max",
   "min", "pow", "integer_pow", "abs", "sign", "floor", "round", "clamp", "sin",
   "cos", "not", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
   "is_finite", "select_n", "convert_element_type", "broadcast_in_dim", "iota",
   "pad", "slice", "rev", "add_any")
)  # fmt: skip
_MARGIN = 1.75


def temporary_bytes(
  traced: Any, bytes_of: Callable[[Any], int] | None = None
) -> int:
  """Estimate the bytes that a program takes beside arguments and results.

  Args:
    traced: of `jax.jit(f).trace(...)`.
    bytes_of: the size of a value on one device, of its abstract value; by
      default the whole.
  """
  bytes_of = bytes_of or whole_bytes
  jaxpr = traced.jaxpr.jaxpr
  names: dict[Any, Hashable] = {v: v for v in (*jaxpr.invars, *jaxpr.constvars)}
  operations: list[_Operation] = []
  results = {*_inlined(jaxpr, names, operations)}
  readers = _readers(operations)
  # A value that is not written stands for the written ones behind it.
  behind: dict[Hashable, set[Hashable]] = {}
  size: dict[Hashable, int] = {}
  first: dict[Hashable, int] = {}
  last: dict[Hashable, int] = {}
  for place, (primitive, read, made) in enumerate(operations):
    written = set().union(*(behind.get(name, ()) for name in read))
    last.update(dict.fromkeys(written, place))
    for name, aval in made:
      if name in results:
        behind[name] = set()
      elif _is_fused(primitive, readers.get(name, [])):
        behind[name] = written
      else:
        behind[name] = {name}
        size[name], first[name], last[name] = bytes_of(aval), place, place
  # At each place values begin before others end.
  changes = [(first[name], 0, size[name]) for name in size]
  changes += [(last[name], 1, -size[name]) for name in size]
  alive = most = 0
  for _, _, change in sorted(changes):
    alive += change
    most = max(most, alive)
  return int(_MARGIN * most)


def compiled_bytes(
  traced: Any, bytes_of: Callable[[Any], int] | None = None
) -> int:
  """The bytes that XLA allocates for it, once compiled."""
  used = traced.lower().compile().memory_analysis()
  return used.temp_size_in_bytes if used else 0


# A primitive, the names that it reads, and those that it makes.
_Operation = tuple[str, list[Hashable], list[tuple[Hashable, Any]]]


def _inlined(
  jaxpr: Any, names: dict[Any, Hashable], operations: list[_Operation]
) -> list[Hashable]:
  """Append the operations of a program and its calls; names of its results."""

  def known(variables: Any) -> list[Hashable]:
    return [
      None if isinstance(v, core.Literal) else names[v] for v in variables
    ]

  for equation in jaxpr.eqns:
    primitive, read = equation.primitive.name, known(equation.invars)
    inner = _called(equation)
    if inner is None:
      made = [((len(operations), i), v) for i, v in enumerate(equation.outvars)]
      names.update({v: name for name, v in made})
      operations.append(
        (
          primitive,
          [name for name in read if name is not None],
          [(name, v.aval) for name, v in made],
        )
      )
    else:
      within = {v: v for v in inner.constvars}
      within |= zip(inner.invars, read, strict=True)
      outputs = _inlined(inner, within, operations)
      names.update(zip(equation.outvars, outputs, strict=True))
  return known(jaxpr.outvars)


def _called(equation: Any) -> Any:
  """The program that an equation calls; None if it calls none."""
  if equation.primitive.name not in _CALLS:
    return None
  keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
  called = next(equation.params[k] for k in keys if k in equation.params)
  return getattr(called, "jaxpr", called)


def _readers(operations: list[_Operation]) -> dict[Hashable, list[str]]:
  """{name: the primitives that read the value, itself or as a view}."""
  seen: dict[Hashable, Hashable] = {}
  found: dict[Hashable, list[str]] = {}
  for primitive, read, made in operations:
    for name in read:
      if primitive in _VIEWS:
        seen |= {view: seen.get(name, name) for view, _ in made}
      else:
        found.setdefault(seen.get(name, name), []).append(primitive)
  return found


def _is_fused(primitive: str, readers: list[str]) -> bool:
  """Whether a value is not written; one with several readers is."""
  if primitive in _VIEWS:
    return True
  return (
    primitive in _FUSED
    and len(readers) < 2
    and all(
      name in _FUSED or name.startswith(("reduce_", "arg")) for name in readers
    )
  )


def whole_bytes(aval: Any) -> int:
  """The bytes of an array of this shape and dtype; 0 of anything else."""
  if not hasattr(aval, "shape") or jnp.issubdtype(
    aval.dtype, jax.dtypes.extended
  ):
    return 0
  return math.prod(aval.shape) * aval.dtype.itemsize
