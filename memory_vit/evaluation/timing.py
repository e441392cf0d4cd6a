"""Time programs in turns, so that a machine that slows down slows all."""

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
  """Time functions, round by round, each once in a round.

  The first call of each compiles, and is not timed. A call ends when the arrays
  that it returns are computed. With several processes all of them must call: a
  function may wait for another process.

  Args:
    functions: {name: function}.
    rounds: the number of rounds, at most.
    budget: seconds after which no further round is begun; there is always one.

  Returns:
    {name: the median of its times, in seconds}.

  Raises:
    ConfigError: for no round.
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
    # By the clock of process 0: all processes run equally many rounds.
    over = time.perf_counter() - started > budget
    if processes.broadcast_from_process_0(over):
      break
  return {name: statistics.median(each) for name, each in times.items()}
