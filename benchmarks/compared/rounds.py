"""Time programs in turn, so that a slow moment of the machine hits all."""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

FORWARD = "forward"
# Where others use the machine, the time that this process computed says more
# than the time that passed. It wants one thread: those that wait compute too.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Programs = dict[str, Callable[[], Any]]


def measure(
  programs: Programs, rounds: int, clock: str = "wall"
) -> dict[str, Any]:
  """Call every program once in each round.

  Args:
    programs: by name; each returns when its work is done. `FORWARD` is what
      the others are multiples of.
    rounds: how many, after two calls of each that count for nothing.
    clock: a name of `CLOCKS`.

  Returns:
    {"seconds_forward": median, "ratios": {name: [lower quartile, median, upper
    quartile]}}, in medians of `FORWARD`.
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
  """The largest difference of any value; 0 where all bits are equal.

  Args:
    a: outputs for a batch of images.
    b: the same outputs, computed in another way.

  Raises:
    ValueError: for outputs that do not depend on the image: these would be
      equal whatever is computed.
  """
  a, b = np.asarray(a), np.asarray(b)
  if not spread([a]):
    raise ValueError(
      "the outputs are the same for each image, as of a head that is zero: "
      "that they are equal says nothing. Draw its weights."
    )
  if a.tobytes() == b.tobytes():
    return 0.0
  return float(np.abs(a - b).max())


def spread(outputs: Iterable[Any]) -> float:
  """By how much the outputs of every task at least change with the image.

  Args:
    outputs: of each task, (images, classes).
  """
  ranges = [np.ptp(np.asarray(one), axis=0).max() for one in outputs]
  return float(min(ranges))


def hand_over(**result: Any) -> None:
  """Print the result as the last line, where the caller looks for it."""
  print(json.dumps(result), flush=True)
