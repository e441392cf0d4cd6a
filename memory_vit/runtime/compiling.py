"""Compile programs that hardly run with fewer passes of the compiler."""

import os
from typing import Any

import jax

# Of LLVM. Arrays are laid out before it: what a program takes in memory is the
# same with any.
_OPTION = "xla_backend_optimization_level"


def options(level: int) -> dict[str, Any] | None:
  """Compiler options of `jax.jit` for a program that is not worth the usual 3.

  Args:
    level: 1 computed the same bits as 3 wherever we compared them, in half of
      the time to compile; 0 is for what is compiled and never run.

  Returns:
    None where the compiler is left to itself: on accelerators, which have other
    options, and where XLA_FLAGS are set, as who has set them has chosen.
  """
  if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
    return None
  return {_OPTION: level}
