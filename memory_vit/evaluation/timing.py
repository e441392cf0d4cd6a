"""Time programs in turns, so that a slowdown of the machine affects all."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from memory_vit.errors import ConfigError
from memory_vit.runtime import processes


def median_seconds(
  functions: Mapping[str, Callable[[], Any]],
  *,
  rounds: int = 5,
  budget: float = 30.0,
) -> dict[str, float]:
  """Time functions in rounds, in which each function is called once.

  The first call of each function compiles, and is not timed. A call ends when
  the arrays that it returns are computed. All processes must call this: a
  function may wait for another process.

  Args:
    functions: {name: function}.
    rounds: the maximum number of rounds.
    budget: seconds after which no further round begins; the first always runs.

  Returns:
    {name: the median of its times, in seconds}.

  Raises:
    ConfigError: if `rounds` is less than 1.
  """
  if rounds < 1:
    raise ConfigError(f"rounds is {rounds}, expected at least 1.")
  times: dict[str, list[float]] = {name: [] for name in functions}
  for function in functions.values():
    jax.block_until_ready(function())
  started = time.perf_counter()
  for _ in range(rounds):
    for name, function in functions.items():
      began = time.perf_counter()
      jax.block_until_ready(function())
      times[name].append(time.perf_counter() - began)
    # Process 0 decides, so that all processes run the same number of rounds.
    over = time.perf_counter() - started > budget
    if processes.broadcast_from_process_0(over):
      break
  return {name: statistics.median(values) for name, values in times.items()}
