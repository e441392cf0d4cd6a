"""An estimate of the memory of a traced program, before it is compiled.

The estimate is the largest total size of values that are alive at the same
time. It leaves out values that the compiler probably fuses into the operation
that reads them, and adds a margin for wrong guesses. For a training step with
its batches and cache, the estimate is one to two times the memory that XLA uses
on a CPU. For the frozen pass of long sequences, it is up to five times as much,
because XLA does not hold all attention weights at once.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# Operations that call a program; `_inlined` replaces them by that program.
_CALLS = frozenset(
  ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call",
   "custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "checkpoint")
)  # fmt: skip
# Operations that only change the form of a value and need no new memory.
_VIEWS = frozenset(
  ("reshape", "transpose", "squeeze", "expand_dims", "split", "unstack",
   "stop_gradient", "copy", "reshard", "sharding_constraint")
)  # fmt: skip
# XLA fuses an operation of this set with the only reader of its result, if this
# reader is a reduction or an operation of this set.
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
  """Estimate the bytes that a program needs besides arguments and results.

  Args:
    traced: result of `jax.jit(f).trace(...)`.
    bytes_of: returns the bytes of an abstract value on one device; by default
      the bytes of the whole value.
  """
  bytes_of = bytes_of or whole_bytes
  jaxpr = traced.jaxpr.jaxpr
  names: dict[Any, Hashable] = {v: v for v in (*jaxpr.invars, *jaxpr.constvars)}
  operations: list[_Operation] = []
  results = {*_inlined(jaxpr, names, operations)}
  readers = _readers(operations)
  # {value: arrays that must be in memory when an operation reads the value}. A
  # fused value has no array of its own, so its entry has its operands' arrays.
  behind: dict[Hashable, set[Hashable]] = {}
  size: dict[Hashable, int] = {}
  first: dict[Hashable, int] = {}
  last: dict[Hashable, int] = {}
  for place, (primitive, read, outputs) in enumerate(operations):
    written = set().union(*(behind.get(name, ()) for name in read))
    last.update(dict.fromkeys(written, place))
    for name, aval in outputs:
      if name in results:
        behind[name] = set()
      elif _is_fused(primitive, readers.get(name, [])):
        behind[name] = written
      else:
        behind[name] = {name}
        size[name], first[name], last[name] = bytes_of(aval), place, place
  # An operation allocates its outputs before its operands are freed. So at each
  # place, sort allocations (number 0) before releases (number 1).
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
  """Compile a traced program; return the bytes that XLA allocates for it."""
  used = traced.lower().compile().memory_analysis()
  return used.temp_size_in_bytes if used else 0


# (primitive, names of its operands, (name, abstract value) of each output).
_Operation = tuple[str, list[Hashable], list[tuple[Hashable, Any]]]


def _inlined(
  jaxpr: Any, names: dict[Any, Hashable], operations: list[_Operation]
) -> list[Hashable]:
  """Append program `jaxpr` to `operations`; return the names of its results."""

  def known(variables: Any) -> list[Hashable]:
    return [
      None if isinstance(v, core.Literal) else names[v] for v in variables
    ]

  for equation in jaxpr.eqns:
    primitive, read = equation.primitive.name, known(equation.invars)
    inner = _called(equation)
    if inner is None:
      outs = [((len(operations), i), v) for i, v in enumerate(equation.outvars)]
      names.update({v: name for name, v in outs})
      operations.append(
        (
          primitive,
          [name for name in read if name is not None],
          [(name, v.aval) for name, v in outs],
        )
      )
    else:
      within = {v: v for v in inner.constvars}
      within |= zip(inner.invars, read, strict=True)
      outputs = _inlined(inner, within, operations)
      names.update(zip(equation.outvars, outputs, strict=True))
  return known(jaxpr.outvars)


def _called(equation: Any) -> Any:
  """Return the program that an equation calls, or None if it calls none."""
  if equation.primitive.name not in _CALLS:
    return None
  keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
  called = next(equation.params[k] for k in keys if k in equation.params)
  return getattr(called, "jaxpr", called)


def _readers(operations: list[_Operation]) -> dict[Hashable, list[str]]:
  """Return {value: primitives that read it, directly or through a view}."""
  viewed: dict[Hashable, Hashable] = {}
  readers: dict[Hashable, list[str]] = {}
  for primitive, read, outputs in operations:
    for name in read:
      if primitive in _VIEWS:
        viewed |= {view: viewed.get(name, name) for view, _ in outputs}
      else:
        readers.setdefault(viewed.get(name, name), []).append(primitive)
  return readers


def _is_fused(primitive: str, readers: list[str]) -> bool:
  """Return whether the result of `primitive` needs no memory of its own.

  Views need none, and neither do results that XLA fuses with their reader.
  `readers` are the primitives that read the result.
  """
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
  """Return the bytes of an abstract array; 0 for any other abstract value."""
  if not hasattr(aval, "shape") or jnp.issubdtype(
    aval.dtype, jax.dtypes.extended
  ):
    return 0
  return math.prod(aval.shape) * aval.dtype.itemsize
