"""Estimate memory and communication of a training step on many devices.

  python -m benchmarks.scale [--variant=B/32 ...] [--devices=64] [--fsdp=8]
    [--batch=8] [--dtype=float32] [--topology=v5e:4x4]

Compiles the programs of a step (one task of 5 cells, 100 classes, SGD with
momentum) for a mesh of absent devices, and prints what XLA reports beside a
formula. The devices are virtual ones of the CPU; with --topology those of a
TPU, which needs libtpu but no TPU. Nothing is run. The source of the table in
docs/dev/memory.md.

Letters as in `model/vit_config.py`; s = n + 1 tokens, b images on a device, f
devices over which the backbone is sharded, e bytes of a number in the
computation.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

MEBI = 2**20


@dataclasses.dataclass(frozen=True)
class Row:
  """A quantity of a program, in bytes on a device; 0 for none."""

  variant: str
  what: str
  formula: float
  xla: float


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
  parser.add_argument("--variant", action="append")
  parser.add_argument("--devices", type=int, default=64)
  parser.add_argument("--fsdp", type=int, default=8)
  parser.add_argument("--batch", type=int, default=8, help="on a device")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--topology", help="of a TPU, for example v5e:4x4")
  arguments = parser.parse_args(argv)
  # Before jax is imported. On CPU, XLA by default gathers early regardless of
  # memory, as the devices are threads of one machine.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={arguments.devices}"
    " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    " --xla_backend_optimization_level=0"
  )
  print("| backbone | on a device | formula, MiB | XLA, MiB | ratio |")
  print("|---|---|---|---|---|")
  for variant in arguments.variant or ["B/32", "B/16", "L/16", "H/14"]:
    for row in measure(variant, arguments):
      formula, ratio = "-", "-"
      if row.formula:
        formula = f"{row.formula / MEBI:.2f}"
        ratio = f"{row.xla / row.formula:.2f}"
      print(
        f"| {row.variant} | {row.what} | {formula} "
        f"| {row.xla / MEBI:.2f} | {ratio} |",
        flush=True,
      )


def measure(variant: str, arguments: argparse.Namespace) -> list[Row]:
  """Compile the programs of a step for a backbone."""
  import jax

  from benchmarks import compiled_programs
  from memory_vit.model.vit_config import vit_config
  from memory_vit.runtime.compiler_report import exchanged

  mesh = _mesh(arguments)
  config = vit_config(
    variant, num_classes=1000, dtype=arguments.dtype,
    platform="tpu" if arguments.topology else "cpu",
  )  # fmt: skip
  target = compiled_programs.Target(config, arguments.batch * mesh.size, mesh)
  taken, state, frozen = compiled_programs.step_of(target, 1)
  known = compiled_programs.programs(target)
  prepare = jax.jit(taken.prepare).lower(frozen, target.images)
  gradient, update = known["gradient 1"].lower(), known["update 1"].lower()
  found = {
    name: program.compile()
    for name, program in (
      ("prepare", prepare), ("gradient", gradient), ("update", update),
    )
  }  # fmt: skip
  # None if the platform does not report it.
  memory: dict[str, Any] = {n: c.memory_analysis() for n, c in found.items()}
  moved = {name: exchanged(c.as_text() or "") for name, c in found.items()}
  by_formula = formulas(
    config, state.params, arguments.batch, mesh.shape["fsdp"]
  )
  by_xla = {
    "weights and images": memory["prepare"].argument_size_in_bytes,
    "context": memory["prepare"].output_size_in_bytes,
    "forward pass, in between": memory["prepare"].temp_size_in_bytes,
    "task, momentum, gradient": memory["update"].argument_size_in_bytes,
    "gathered in the forward pass": moved["prepare"].get("all-gather", 0),
    "gathered for the gradient": moved["gradient"].get("all-gather", 0),
    "reduced: gradient of the task": moved["gradient"].get("all-reduce", 0),
    "other exchange": sum(
      size
      for kinds in moved.values()
      for kind, size in kinds.items()
      if kind not in ("all-gather", "all-reduce")
    ),
    "gradient, in between": memory["gradient"].temp_size_in_bytes,
  }
  return [Row(variant, what, by_formula[what], by_xla[what]) for what in by_xla]


def formulas(
  config: Any, task: Any, b: int, f: int, wide: int = 2**14
) -> dict[str, float]:
  """Bytes on a device; arrays of `wide` or more parameters are sharded."""
  from memory_vit.model import trees

  d, l, m, s = (
    config.width,
    config.depth,
    config.mlp_dim,
    config.num_patches + 1,
  )
  e = 2 if config.dtype == "bfloat16" else 4
  patches = config.patch_size**2 * 3 * d
  positions = s * d
  # Unused outputs are not computed: the last block has only keys and values.
  large = patches + (l - 1) * (4 * d * d + 2 * d * m) + 2 * d * d
  small = d + d + (l - 1) * (4 * d + m + d + 4 * d) + 2 * d + 2 * d
  if positions >= wide:
    large += positions
  else:
    small += positions
  images = 4 * b * config.image_size**2 * 3
  trained = 4 * trees.count(task)
  mlp = b * s * (2 * m + 2 * d)
  split = f > 1
  tokens = e * l * f * b * d
  return {
    "weights and images": e * large / f + 4 * small + images,
    "context": e * b * l * 2 * s * d,
    # The MLP before and after its activation, its input, its output, and the
    # matrix that multiplies it.
    "forward pass, in between": e * mlp + split * 4 * d * m,
    "task, momentum, gradient": 3 * trained,
    "gathered in the forward pass": split * 4 * large,
    # The projections. MLPs stay sharded: the few tokens of tasks go to them,
    # forward and back, and so do their sums.
    "gathered for the gradient": split * (4 * l * 4 * d * d + 6 * tokens),
    "reduced: gradient of the task": trained + split * 2 * tokens,
    "other exchange": 0,
    "gradient, in between": 0,
  }


def gathered_on_tpus(config: Any) -> dict[str, float]:
  """Bytes that each program gathers where TPUs hold a backbone in parts.

  In bfloat16, with kernels rounded as they are loaded. The backward pass of a
  task gathers each layer again, but for the MLP of the last one.
  """
  d, l, m = config.width, config.depth, config.mlp_dim
  layer = 2 * (4 * d * d + 2 * d * m)
  patches = 2 * config.patch_size**2 * 3 * d
  positions = 4 * (config.num_patches + 1) * d
  head = 2 * config.num_classes * d
  return {
    "encode": patches + positions + l * layer + head,
    "read 1": l * layer,
    "gradient 1": 2 * l * layer - 2 * 2 * d * m,
  }


def _mesh(arguments: argparse.Namespace) -> Any:
  from memory_vit.runtime import sharding

  if not arguments.topology:
    return sharding.make_mesh(fsdp=arguments.fsdp)
  from memory_vit.runtime import absent_devices

  found = absent_devices.devices(arguments.topology)
  return sharding.make_mesh(found, fsdp=arguments.fsdp)


if __name__ == "__main__":
  main()
