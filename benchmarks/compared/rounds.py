"""Time programs in turn, so that a slow moment of the machine affects all."""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

FORWARD = "forward"
# On a shared machine, CPU time says more than wall time. It needs one thread,
# as waiting threads use CPU time too.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Programs = dict[str, Callable[[], Any]]


def measure(
  programs: Programs, rounds: int, clock: str = "wall"
) -> dict[str, Any]:
  """Call every program once in each round, after two calls of each.

  Programs return when their work is done. The result has the median seconds of
  `FORWARD`, and the quartiles of the others as ratios to it.
  """
  now = CLOCKS[clock]
  for program in programs.values():
    for _ in range(2):  # the first may compile
      program()
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(rounds):
    for name, program in programs.items():
      began = now()
      program()
      times[name].append(now() - began)
  forward = float(np.median(times[FORWARD]))
  ratios = {
    name: [float(q) / forward for q in np.percentile(taken, [25, 50, 75])]
    for name, taken in times.items()
  }
  return {"seconds_forward": forward, "ratios": ratios}


def difference(a: Any, b: Any) -> float:
  """The largest difference; refuses outputs that images do not change."""
  a, b = np.asarray(a), np.asarray(b)
  if not spread([a]):
    raise ValueError(
      "the outputs are equal for all images, as if the head were zero, so "
      "their difference says nothing: initialize the head randomly."
    )
  if a.tobytes() == b.tobytes():
    return 0.0
  return float(np.abs(a - b).max())


def spread(outputs: Iterable[Any]) -> float:
  """The least change of the outputs of any task over images."""
  ranges = [np.ptp(np.asarray(one), axis=0).max() for one in outputs]
  return float(min(ranges))


def hand_over(**result: Any) -> None:
  """Print the result as the last line, which the caller reads."""
  print(json.dumps(result), flush=True)
