"""Measure the cost of tasks, as multiples of a forward pass of the plain ViT.

  python -m benchmarks.passes [--variant=B/32] [--batch=16] [--dtype=float32]
    [--tasks 1 4 16 64] [--rounds=9] [--more] [--what PROGRAM ...]
    [--json=FILE]

Compares the implementation of the package with the usual one, a long sequence
under a mask (`masked_sequence.py`). All programs are compiled, then timed in
turn, round by round, so that a machine that slows down affects all of them
alike; ratios are between medians. Brackets and "*_quartiles" are the lower and
the upper quartile. Peak memory is measured first, in processes of their own
(see `peaks.py`).

"infer" runs backbone and tasks, "read" tasks alone, on a given context. "train"
takes steps from images, "kept_train" from cached contexts; rows of every batch
are drawn at random, and fetching them is included. "side" tasks have a side
stream of width 16, and no memory; "heads" are linear, on the pooled output. The
first call of a program, which compiles it, is timed separately. A program that
fails, for example for lack of memory, is named, and the others are timed.

Needs jax, flax, optax and numpy only.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks import peaks, workloads

Program = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print a table, and write --json, whose content it returns."""
  argv = sys.argv[1:] if argv is None else argv
  arguments = _arguments(argv)
  if arguments.peak:
    peak = peaks.measure(_setting(arguments), arguments.peak)
    print(json.dumps(peak))
    return {}
  # Before this process uses a device, see `peaks`.
  memory = {} if arguments.no_peaks else _peaks(argv, arguments.more)
  result = {**_measure(arguments), **memory}
  _print(result)
  if arguments.json:
    with open(arguments.json, "w", encoding="utf-8") as file:
      json.dump(result, file, indent=2)
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  """Read the flags without a device; `_setting` completes them."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.passes", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", default="B/32")
  add("--image_size", type=int, default=224)
  add("--batch", type=int, help="16 on CPU, 512 elsewhere")
  add("--dtype", help="float32 on CPU, bfloat16 elsewhere")
  add("--cells", type=int, default=5)
  add("--classes", type=int, default=100)
  add("--tasks", type=int, nargs="+", default=[1, 4, 16, 64])
  add("--heads", type=int, nargs="+", default=[1, 16, 256])
  add("--train_tasks", type=int, nargs="+", default=[1, 20])
  add("--keep_where", choices=("device", "host"), default="device",
      help="where kept_train caches its contexts")  # fmt: skip
  add("--rounds", type=int, default=9)
  add("--more", action="store_true", help="the baseline at every number of "
      "tasks, and full fine-tuning")  # fmt: skip
  add("--what", nargs="*", metavar="PROGRAM", help="time only programs with "
      "these prefixes, such as infer or kept_train")  # fmt: skip
  add("--compile_seconds", type=float, default=math.inf,
      help="skip programs that are not compiled by then")  # fmt: skip
  add("--no_peaks", action="store_true", help="leave out peak memory")
  add("--json", help="file for the numbers")
  add("--peak", choices=peaks.TRAININGS, help=argparse.SUPPRESS)
  return parser.parse_args(argv)


def _setting(arguments: argparse.Namespace) -> workloads.Setting:
  on_cpu = jax.default_backend() == "cpu"
  return workloads.make_setting(
    variant=arguments.variant,
    image_size=arguments.image_size,
    dtype=arguments.dtype or ("float32" if on_cpu else "bfloat16"),
    batch=arguments.batch or (16 if on_cpu else 512),
    cells=arguments.cells,
    classes=arguments.classes,
  )


def _peaks(argv: Sequence[str], more: bool) -> dict[str, Any]:
  names = ["train_1", "full_finetune"]
  names += ["masked_sequence_train_1"] if more else []
  result: dict[str, Any] = {}
  for name in names:
    peak = peaks.in_process(argv, name)
    result[f"peak_bytes_{name}"] = peak.bytes
    result[f"peak_bytes_{name}_is"] = peak.how
  return result


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
  setting = _setting(arguments)
  config, batch = setting.backbone.config, len(setting.images)
  products, operations = workloads.matrix_products(config.dtype)
  first, failed = _compiled(
    {
      "forward": lambda: lambda: workloads.plain(setting),
      "matrix_products": lambda: products,
      **_programs(setting, arguments),
    },
    arguments.compile_seconds,
  )
  times = _times({n: p for n, (p, _) in first.items()}, arguments.rounds)
  forward = float(np.median(times["forward"]))
  peak_rate = operations / float(np.median(times.pop("matrix_products")))
  rate = batch * workloads.forward_operations(config) / forward
  return {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "variant": config.variant,
    "image_size": config.image_size,
    "dtype": config.dtype,
    "batch": batch,
    "cells": setting.task.spec.cells,
    "classes": setting.task.spec.num_classes,
    "rounds": arguments.rounds,
    "keep_where": arguments.keep_where,
    "memory": jax.devices()[0].memory_stats(),
    "seconds_of_first_call": {n: seconds for n, (_, seconds) in first.items()},
    "failed": failed,
    "seconds_forward": forward,
    "seconds_forward_quartiles": _quartiles(times.pop("forward"), 1.0),
    "images_per_second_forward": batch / forward,
    "tflops_forward": rate / 1e12,
    "tflops_matrix_products": peak_rate / 1e12,
    "forward_over_matrix_products": rate / peak_rate,
    **_ratios(times, forward),
    "outputs_bit_equal": _bit_equal(
      setting, [n for n in arguments.tasks if f"infer_{n}" in first]
    ),
  }


def _programs(
  setting: workloads.Setting, arguments: argparse.Namespace
) -> dict[str, Callable[[], Program]]:
  """Map the name of each result to a function that makes its program."""
  infer, train = arguments.tasks, arguments.train_tasks
  made: dict[str, Callable[[], Program]] = {
    "encode": lambda: workloads.encoding(setting)
  }

  def add(name: str, make: Callable[..., Program], *given: Any) -> None:
    made[name] = functools.partial(make, setting, *given)

  def add_without_memory(
    regime: str, name: str, make: Callable[..., Program], *given: Any
  ) -> None:
    made[name] = lambda: make(workloads.with_regime(setting, regime), *given)

  add_side = functools.partial(add_without_memory, "side_masked")

  is_float32 = setting.backbone.config.dtype == "float32"
  other = "bfloat16" if is_float32 else "float32"
  add(f"forward_{other}", workloads.plain_in, other)
  for count in infer:
    add(f"infer_{count}", workloads.inference, count)
  for count in infer[:1] + infer[-1:]:
    add_side(f"infer_side_{count}", workloads.inference, count)
  for count in arguments.heads:
    add_without_memory(
      "head", f"infer_heads_{count}", workloads.inference, count
    )
  for count in infer:
    add(f"read_{count}", workloads.cached_inference, count)
  for count in infer if arguments.more else infer[-1:]:
    add(f"masked_sequence_infer_{count}", workloads.masked_inference, count)
  for count in train:
    add(f"train_{count}", workloads.training, count)
    add(f"kept_train_{count}", workloads.cached_training, count,
        arguments.keep_where)  # fmt: skip
    add_side(f"train_side_{count}", workloads.training, count)
  add_side(f"kept_side_{train[0]}", workloads.cached_training, train[0],
           arguments.keep_where)  # fmt: skip
  for count in train if arguments.more else train[:1]:
    add(f"masked_sequence_train_{count}", workloads.masked_training, count)
  if arguments.more:
    add("full_finetune", workloads.full_finetuning)
  wanted = arguments.what
  if wanted is None:
    return made
  return {n: make for n, make in made.items() if n.startswith((*wanted,))}


def _compiled(
  programs: Mapping[str, Callable[[], Program]], limit: float
) -> tuple[dict[str, tuple[Program, float]], dict[str, str]]:
  """Call each program twice, once to compile; names those that failed."""
  ready: dict[str, tuple[Program, float]] = {}
  failed: dict[str, str] = {}
  start = time.perf_counter()
  for name, make in programs.items():
    if time.perf_counter() - start > limit and len(ready) > 1:
      failed[name] = "no time was left to compile it"
      continue
    try:
      program = make()
      began = time.perf_counter()
      jax.block_until_ready(program())
      seconds = time.perf_counter() - began
      jax.block_until_ready(program())
    except jax.errors.JaxRuntimeError as error:
      if name == "forward":
        raise
      failed[name] = str(error).partition("\n")[0][:200]
    else:
      ready[name] = program, seconds
  return ready, failed


def _times(
  programs: Mapping[str, Program], rounds: int
) -> dict[str, list[float]]:
  """Seconds of each program in every round."""
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(rounds):
    for name, program in programs.items():
      began = time.perf_counter()
      jax.block_until_ready(program())
      times[name].append(time.perf_counter() - began)
  return times


def _ratios(times: dict[str, list[float]], forward: float) -> dict[str, Any]:
  ratios: dict[str, Any] = {}
  for name, seconds in times.items():
    key = f"{name}_over_forward"
    ratios[key] = float(np.median(seconds)) / forward
    ratios[f"{key}_quartiles"] = _quartiles(seconds, forward)
  return ratios


def _quartiles(values: list[float], unit: float) -> list[float]:
  return [float(q) / unit for q in np.percentile(values, [25, 75])]


def _bit_equal(
  setting: workloads.Setting, counts: Sequence[int]
) -> dict[str, bool]:
  """Original outputs: with tasks against without, and against `plain`."""
  alone, _ = mv.encode(setting.backbone, setting.images)
  equal = {
    f"{count}_tasks": _same_bits(
      workloads.inference(setting, count)()["backbone"], alone
    )
    for count in counts
  }
  return {**equal, "plain_program": _same_bits(workloads.plain(setting), alone)}


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _print(result: dict[str, Any]) -> None:
  """Print settings, a table of ratios, memory."""
  print(
    "ViT-{variant}, {image_size} px, batch {batch}, {dtype}; tasks of {cells} "
    "cells and {classes} classes\n{device}, jax {jax}, {rounds} rounds\n\n"
    "forward pass: {seconds_forward:.4g} s, {images_per_second_forward:,.0f} "
    "images/s, {tflops_forward:.3g} TFLOP/s;\nproducts of large matrices: "
    "{tflops_matrix_products:.3g} TFLOP/s\n".format(**result)
  )
  print(f"{'in forward passes':32} median  (quartiles)")
  for key, ratio in result.items():
    if key.endswith("_over_forward"):
      low, high = result[f"{key}_quartiles"]
      name = key.removesuffix("_over_forward")
      print(f"{name:32} {ratio:6.2f}  ({low:.2f} to {high:.2f})")
  for name, why in result["failed"].items():
    print(f"{name:32} failed: {why}")
  print()
  for key in result:
    if key.startswith("peak_bytes_") and key.endswith("_is"):
      print(_memory(key.removesuffix("_is"), result))
  equal = result["outputs_bit_equal"]
  print(f"original outputs equal to the bit: {all(equal.values())}", equal)


def _memory(key: str, result: dict[str, Any]) -> str:
  size, how = result[key], result[f"{key}_is"]
  shown = "not known" if size is None else f"{size / 2**20:,.0f} MiB"
  return f"{key:32} {shown} ({how})"


if __name__ == "__main__":
  main()
