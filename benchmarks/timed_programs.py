"""Time the programs of `compiled_programs` on the device that is here.

  python -m benchmarks.timed_programs [--variant=B/32] [--dtype=bfloat16]
    [--batch 128] [--layers=N] [--rounds=7] [--only=PROGRAM ...]
    [--compile_seconds=300] [--json=FILE]

The same programs that `benchmarks.compiled` compiles for devices that are not
there, so that its estimates can be compared; all floats are random and all
integers zero. Arguments are not donated, unlike the state in training. Programs
are compiled one by one, then timed in turn, round by round: calls are queued
for about `_ROUND_SECONDS`, as a training loop does, and awaited at the end.
--batch takes several numbers; each is a table, and begins to compile no program
once --compile_seconds have passed.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compiled, compiled_programs
from memory_vit.runtime import sharding
from memory_vit.runtime.compiler_report import CompilerReport
from memory_vit.runtime.tables import markdown_table

_ROUND_SECONDS = 0.05
_MOST_CALLS = 200


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Time every program, print tables, and write --json."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks.timed_programs")
  parser.add_argument("--variant", default="B/32")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--batch", type=int, nargs="+", default=[128])
  parser.add_argument("--layers", type=int, help="by default all")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--only", action="append", metavar="PROGRAM")
  parser.add_argument("--compile_seconds", type=float, default=math.inf)
  parser.add_argument("--json", type=Path)
  arguments = parser.parse_args(argv)
  found = []
  for batch in arguments.batch:
    found.append(measure(arguments, batch))
    print(f"\n{batch} images, {found[-1]['device']}\n{table(found[-1])}")
    if arguments.json:
      arguments.json.write_text(json.dumps(found, indent=1) + "\n")
  return found


def measure(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
  """Milliseconds of each program, and seconds to compile it."""
  target = compiled_programs.Target(
    compiled.config_of(arguments, jax.default_backend()),
    batch,
    sharding.make_mesh(jax.devices()[:1]),
  )
  calls: dict[str, Callable[[], Any]] = {}
  rows: dict[str, dict[str, Any]] = {}
  start = time.perf_counter()
  for name, program in compiled.chosen(target, arguments.only).items():
    if time.perf_counter() - start > arguments.compile_seconds:
      print(f"{name}: no time was left to compile it", flush=True)
      continue
    function, shapes = program.build()
    began = time.perf_counter()
    ready = jax.jit(function).lower(*shapes).compile()
    seconds = time.perf_counter() - began
    report = CompilerReport.of(ready)
    rows[name] = {"seconds_to_compile": seconds, "kernels": report.kernels,
                  "temporaries": report.temporaries,
                  "is_ours": program.is_ours}  # fmt: skip
    calls[name] = functools.partial(ready, *jax.tree.map(_random, shapes))
    print(f"{name}: {seconds:.1f} s to compile", flush=True)
  for name, values in _times(calls, arguments.rounds).items():
    low, middle, high = (1000 * np.percentile(values, [25, 50, 75])).tolist()
    rows[name] |= {"ms": middle, "quartiles": [low, high]}
  device = jax.devices()[0].device_kind
  settings = {key: getattr(arguments, key) for key in ("variant", "dtype")}
  return {"device": device, "jax": jax.__version__, "batch": batch, **settings,
          "layers": target.config.depth, "rows": rows}  # fmt: skip


def _random(shape: Any) -> Any:
  """An array of this `ShapeDtypeStruct`; other values are as they are."""
  if not isinstance(shape, jax.ShapeDtypeStruct):
    return shape
  if not jnp.issubdtype(shape.dtype, jnp.floating):
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
  values = 0.02 * jax.random.normal(jax.random.key(0), shape.shape)
  return jax.device_put(values.astype(shape.dtype), shape.sharding)


def _times(
  calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Seconds of a call of each program, in every round."""
  counts = {}
  for name, call in calls.items():
    _seconds(call, 1)  # the first one may allocate
    seconds = max(_seconds(call, 3), 1e-6)
    counts[name] = min(max(3, int(_ROUND_SECONDS / seconds)), _MOST_CALLS)
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      times[name].append(_seconds(call, counts[name]))
  return times


def _seconds(call: Callable[[], Any], count: int) -> float:
  began = time.perf_counter()
  for _ in range(count):
    outputs = call()
  jax.block_until_ready(outputs)
  return (time.perf_counter() - began) / count


def table(result: dict[str, Any]) -> str:
  """The rows, and the sums of those that run one after the other."""
  found = result["rows"]
  plain = found["plain"]["ms"] if "plain" in found else math.nan

  def shown(label: str, parts: Sequence[str]) -> list[str]:
    ms = sum(found[part]["ms"] for part in parts)
    kernels = sum(found[part]["kernels"] for part in parts)
    return [label, f"{ms:.2f}", f"{ms / plain:.2f}", f"{kernels:,}"]

  rows = [
    shown(name if row["is_ours"] else f"*{name}*", [name])
    for name, row in found.items()
  ]
  rows += [
    shown(label, parts) for label, parts in compiled_programs.sums(found)
  ]
  return markdown_table(["program", "ms", "passes", "kernels"], rows)


if __name__ == "__main__":
  main()
