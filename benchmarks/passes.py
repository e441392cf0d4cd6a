"""What tasks cost, as multiples of one forward pass of the plain ViT.

  python -m benchmarks.passes [--variant=B/32] [--batch=16] [--dtype=float32]
    [--rounds=9] [--json=FILE]

All programs are timed in turn, round by round, so that a machine that becomes
slower slows all of them; the ratios are between medians. Peak memory is
measured in processes of their own, over three steps after the one that
compiles: the resident set on CPU, the allocator's peak on an accelerator, in
both cases above the weights.

Needs jax, flax, optax and numpy only.
"""

import argparse
import ctypes
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memory_vit as mv
from memory_vit import optim, regimes, sharding, step
from memory_vit.config import OptimConfig
from memory_vit.model import MemoryViT

CELLS, CLASSES = 5, 100


def main() -> None:
  """Measures, prints a table, and writes a file where one is named."""
  arguments = _arguments()
  if arguments.peak:
    print(_peak_bytes(arguments, arguments.peak))
    return
  result = _measure(arguments)
  for what in ("train_1", "full_finetune"):
    result[f"peak_bytes_{what}"] = _peak_in_process(what)
  _print(result)
  if arguments.json:
    with open(arguments.json, "w", encoding="utf-8") as file:
      json.dump(result, file, indent=2)


def _arguments() -> argparse.Namespace:
  on_cpu = jax.default_backend() == "cpu"
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--variant", default="B/32")
  parser.add_argument("--image_size", type=int, default=224)
  parser.add_argument("--batch", type=int, default=16 if on_cpu else 512)
  parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json", help="file for the numbers")
  parser.add_argument("--peak", help=argparse.SUPPRESS)
  return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
  backbone, images, labels = _inputs(arguments)
  programs_to_time = {
    "forward": lambda: plain(backbone.params, images, backbone.config)
  }
  for count in (1, 4, 16, 64):
    programs_to_time[f"infer_{count}"] = _inference(backbone, images, count)
  for count in (1, 20):
    programs_to_time[f"train_{count}"] = _training(
      backbone, images, labels, count
    )
  seconds = _medians(programs_to_time, arguments.rounds)
  forward = seconds.pop("forward")
  return {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "variant": arguments.variant,
    "dtype": arguments.dtype,
    "batch": arguments.batch,
    "seconds_forward": forward,
    "images_per_second_forward": arguments.batch / forward,
    **{f"{name}_over_forward": s / forward for name, s in seconds.items()},
    "outputs_bit_equal": _bit_equal(backbone, images),
  }


def _inputs(
  arguments: argparse.Namespace,
) -> tuple[mv.Backbone, jax.Array, jax.Array]:
  size, batch = arguments.image_size, arguments.batch
  backbone = mv.random_backbone(
    arguments.variant,
    image_size=size,
    num_classes=1000,
    key=jax.random.key(0),
    dtype=arguments.dtype,
  )
  images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
  labels = jnp.arange(batch) % CLASSES
  return backbone, images, labels


@jax.jit(static_argnums=2)
def plain(params: Any, images: jax.Array, config: mv.ViTConfig) -> jax.Array:
  """The plain ViT, which hands nothing out to tasks."""
  model = MemoryViT(config)
  return model.apply({"params": {"backbone": params}}, images, method="encode")[
    0
  ]


def _tasks(backbone: mv.Backbone, count: int) -> list[mv.Task]:
  task = mv.init_task(
    jax.random.key(2), backbone, name="t", num_classes=CLASSES, cells=CELLS
  )
  return [
    mv.Task(dataclasses.replace(task.spec, name=f"t{i}"), task.params)
    for i in range(count)
  ]


def _inference(
  backbone: mv.Backbone, images: jax.Array, count: int
) -> Callable[[], Any]:
  tasks = _tasks(backbone, count)
  return lambda: mv.forward(backbone, tasks, images)


def _training(
  backbone: mv.Backbone, images: jax.Array, labels: jax.Array, count: int
) -> Callable[[], Any]:
  """A step of the real training loop, with its optimiser."""
  tasks = _tasks(backbone, count)
  regime = regimes.memory_masked(
    backbone.config, tuple(task.spec for task in tasks)
  )
  params = {task.spec.name: task.params for task in tasks}
  frozen = {"backbone": backbone.params, "tasks": {}}
  return _repeated(regime, params, frozen, images, labels)


def _full_finetuning(
  backbone: mv.Backbone, images: jax.Array, labels: jax.Array
) -> Callable[[], Any]:
  regime = regimes.full(backbone.config)
  params = {"backbone": backbone.params}
  return _repeated(regime, params, None, images, labels)


def _repeated(
  regime: regimes.Regime, params: Any, frozen: Any, images: Any, labels: Any
) -> Callable[[], Any]:
  """A function that takes the next step each time."""
  config, mesh = OptimConfig(), sharding.make_mesh(jax.devices()[:1])
  schedule = optim.make_schedule(config, 0.01, 1000)
  optimizer = optim.make_optimizer(config, dict.fromkeys(params, schedule))
  step_fn = step.Step(regime, optimizer, mesh)
  state = step.create_state(params, optimizer, mesh)
  batch = {"image": images, "label": labels}

  def advance() -> Any:
    nonlocal state
    state, metrics = step_fn(state, frozen, batch)
    return metrics

  return advance


def _medians(
  functions: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
  """Seconds of each, in turn; the first call of each compiles."""
  for function in functions.values():
    jax.block_until_ready(function())
  times = {name: [] for name in functions}
  for _ in range(rounds):
    for name, function in functions.items():
      began = time.perf_counter()
      jax.block_until_ready(function())
      times[name].append(time.perf_counter() - began)
  return {name: float(np.median(t)) for name, t in times.items()}


def _bit_equal(backbone: mv.Backbone, images: jax.Array) -> dict[str, bool]:
  """Original outputs: with tasks against without, and against `plain`."""
  alone = np.asarray(mv.forward(backbone, [], images)["backbone"])
  equal = {
    f"{count}_tasks": np.array_equal(
      mv.forward(backbone, _tasks(backbone, count), images)["backbone"], alone
    )
    for count in (1, 4, 16, 64)
  }
  apart = np.asarray(plain(backbone.params, images, backbone.config))
  return {**equal, "plain_program": np.array_equal(apart, alone)}


def _peak_in_process(what: str) -> int:
  command = [sys.executable, "-m", "benchmarks.passes", *sys.argv[1:]]
  done = subprocess.run(
    [*command, f"--peak={what}"], check=True, stdout=subprocess.PIPE, text=True
  )
  return int(done.stdout.split()[-1])


def _peak_bytes(arguments: argparse.Namespace, what: str) -> int:
  """Peak memory of three training steps, above weights and pictures."""
  backbone, images, labels = _inputs(arguments)
  jax.block_until_ready((backbone.params, images, labels))
  _forget_peak()
  before = _bytes_in_use()
  if what == "train_1":
    advance = _training(backbone, images, labels, 1)
  else:
    advance = _full_finetuning(backbone, images, labels)
  jax.block_until_ready(advance())
  _forget_peak()
  for _ in range(3):
    jax.block_until_ready(advance())
  return _peak_so_far() - before


def _forget_peak() -> None:
  """Resets the peak resident set, which compiling has raised (Linux)."""
  if not jax.devices()[0].memory_stats():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
      file.write("5")


def _bytes_in_use() -> int:
  stats = jax.devices()[0].memory_stats()
  if stats:
    return stats["bytes_in_use"]
  with open("/proc/self/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def _peak_so_far() -> int:
  stats = jax.devices()[0].memory_stats()
  if stats:
    return stats["peak_bytes_in_use"]
  with open("/proc/self/status", encoding="ascii") as file:
    (peak,) = [line for line in file if line.startswith("VmHWM")]
  return int(peak.split()[1]) * 1024


def _print(result: dict[str, Any]) -> None:
  for name, value in result.items():
    if name.startswith("peak_bytes"):
      shown = f"{value / 2**20:,.0f} MiB"
    else:
      shown = f"{value:.3f}" if isinstance(value, float) else str(value)
    print(f"{name:28} {shown}")


if __name__ == "__main__":
  main()
