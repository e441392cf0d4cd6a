"""Measure the cost of attention maps, in forward passes of the plain ViT.

  python -m benchmarks.token_attention [--variant=B/16] [--batch=8]
    [--tasks=8] [--rounds=9] [--json=FILE]

All programs are compiled, then timed in turn, round by round, so that a machine
that slows down affects all of them alike; ratios are between medians. "of a
context" is the cost of the maps if `encode` has already run.

Needs jax, flax and numpy only.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks import workloads
from memory_vit.looking.token_attention import read_attention


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print a table, and write --json, whose content it returns."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.token_attention",
    description=__doc__.split("\n")[0],
  )
  parser.add_argument("--variant", default="B/16")
  parser.add_argument("--image_size", type=int, default=224)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--tasks", type=int, default=8)
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json", help="file for the numbers")
  arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
  setting = workloads.make_setting(
    variant=arguments.variant,
    image_size=arguments.image_size,
    dtype=arguments.dtype,
    batch=arguments.batch,
    cells=5,
    classes=100,
  )
  seconds = _times(_programs(setting, arguments.tasks), arguments.rounds)
  forward = float(np.median(seconds["forward, no task"]))
  ratios = {
    name: [float(q) / forward for q in np.percentile(each, [50, 25, 75])]
    for name, each in seconds.items()
  }
  result = {
    **vars(arguments),
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "seconds_forward": forward,
    "over_forward": ratios,
  }
  print(f"forward pass of {arguments.batch} images: {forward:.4g} s\n")
  print(f"{'in forward passes':36} median  (quartiles)")
  for name, (median, low, high) in ratios.items():
    print(f"{name:36} {median:6.2f}  ({low:.2f} to {high:.2f})")
  if arguments.json:
    with open(arguments.json, "w", encoding="utf-8") as file:
      json.dump(result, file, indent=2)
  return result


def _programs(
  setting: workloads.Setting, count: int
) -> dict[str, Callable[[], Any]]:
  """Programs by the names of the table."""
  backbone, images = setting.backbone, setting.images
  tasks = workloads.make_tasks(setting, count)
  slots = mv.fill_slots(backbone, tasks)
  _, context = mv.encode(backbone, images)
  return {
    "forward, no task": lambda: workloads.plain(setting),
    f"forward, {count} tasks": lambda: mv.forward(backbone, slots, images),
    "token_attention": lambda: mv.token_attention(backbone, slots, images),
    "token_attention, of each head": lambda: mv.token_attention(
      backbone, slots, images, per_head=True
    ),
    "token_attention, of a context": lambda: read_attention(
      backbone, slots, context
    ),
    "attention_rollout": lambda: mv.attention_rollout(backbone, slots, images),
  }


def _times(
  programs: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Seconds of each in every round, after a call that compiles."""
  for program in programs.values():
    jax.block_until_ready(program())
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(rounds):
    for name, program in programs.items():
      began = time.perf_counter()
      jax.block_until_ready(program())
      times[name].append(time.perf_counter() - began)
  return times


if __name__ == "__main__":
  main()
