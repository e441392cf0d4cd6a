"""Compile the package's programs for a TPU or GPU that is not there.

  python -m benchmarks.compiled --out=FILE [--device=v5e] [--variant=B/32]
    [--dtype=bfloat16] [--batch=128] [--layers=N] [--only=PROGRAM ...]

Nothing is run: all numbers are estimated by the compiler, not measured. TPUs
need libtpu, GPUs jax's CUDA plugin; `make compiled` installs libtpu. FILE
receives a row after each program, and rows that it has are not compiled again.

Of a TPU, time is the sum of the cycles that its compiler expects of each
instruction, at the clock of `absent_devices`. GPUs' compiler expects none.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from benchmarks import compiled_programs
from memory_vit.runtime import absent_devices, sharding
from memory_vit.runtime.compiler_report import CompilerReport
from memory_vit.runtime.tables import markdown_table

MEBI = 2**20
_KEYS = ("device", "variant", "dtype", "batch", "layers", "compiler")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compile, print a table, and write --out."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled")
  parser.add_argument("--out", required=True, type=Path)
  parser.add_argument("--device", default="v5e")
  parser.add_argument("--variant", default="B/32")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--batch", type=int, default=128)
  parser.add_argument("--layers", type=int, help="by default all")
  parser.add_argument("--only", action="append")
  arguments = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")  # a device is not looked for
  result = measure(arguments)
  print(table(result))
  return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
  """Compile what --out does not have yet; returns its content."""
  chip = absent_devices.chip_of(arguments.device)
  made = target(arguments)
  result = {
    "device": arguments.device,
    "variant": arguments.variant,
    "dtype": arguments.dtype,
    "batch": arguments.batch,
    "layers": made.config.depth,
    "compiler": absent_devices.compiler(arguments.device),
    "rows": {},
  }
  if arguments.out.exists():
    earlier = json.loads(arguments.out.read_text())
    if any(earlier[key] != result[key] for key in _KEYS):
      raise SystemExit(f"{arguments.out} has rows of another setting")
    result = earlier
  for name, program in chosen(made, arguments.only).items():
    if name not in result["rows"]:
      row = compile_program(program, chip.options)
      result["rows"][name] = row
      arguments.out.write_text(json.dumps(result, indent=2) + "\n")
      print(f"{name}: {row['seconds']:.0f} s", flush=True)
  return result


def target(arguments: argparse.Namespace) -> compiled_programs.Target:
  """The model and the devices; only `layers` of its blocks."""
  name = arguments.device
  platform = absent_devices.chip_of(name).platform
  is_kind = platform == "tpu" and ":" not in name
  devices = absent_devices.devices(f"{name}:1" if is_kind else name)
  config = config_of(arguments, platform)
  return compiled_programs.Target(
    config, arguments.batch, sharding.make_mesh(devices)
  )


def chosen(
  made: compiled_programs.Target, only: Sequence[str] | None
) -> dict[str, compiled_programs.Program]:
  """The programs of --only, by default all."""
  known = compiled_programs.programs(made)
  for name in only or ():
    if name not in known:
      raise SystemExit(f"--only={name}, expected one of {', '.join(known)}")
  return {name: known[name] for name in only or known}


def config_of(arguments: argparse.Namespace, platform: str) -> mv.ViTConfig:
  """The model of --variant, --dtype and --layers."""
  config = mv.vit_config(
    arguments.variant, num_classes=1000, dtype=arguments.dtype,
    platform=platform,
  )  # fmt: skip
  if arguments.layers:
    config = dataclasses.replace(config, depth=arguments.layers)
  return config


def compile_program(
  program: compiled_programs.Program, options: Mapping[str, Any]
) -> dict[str, Any]:
  """A row of the table."""
  began = time.perf_counter()
  compiled = program.lower().compile(compiler_options=dict(options))
  report = dataclasses.asdict(CompilerReport.of(compiled))
  seconds = time.perf_counter() - began
  return {**report, "seconds": seconds, "is_ours": program.is_ours}


def table(result: Mapping[str, Any]) -> str:
  """The rows, and the sums of those that run one after the other."""
  rows = dict(result["rows"])
  for label, parts in compiled_programs.sums(result["rows"]):
    rows[label] = _sum(rows, parts)
  clock = absent_devices.chip_of(result["device"]).gigahertz
  plain = rows.get("plain")
  shown = []
  for name, row in rows.items():
    cycles, passes = row["cycles"], "-"
    if plain and plain["cycles"]:
      passes = f"{cycles / plain['cycles']:.2f}"
    moved = ", ".join(
      f"{kind} {size / MEBI:.2f}" for kind, size in row["exchanged"].items()
    )
    shown.append(
      [
        name if row["is_ours"] else f"*{name}*",
        f"{row['flops'] / 1e9:,.0f}" if row["flops"] else "-",
        f"{cycles / 1e6:.2f}" if cycles else "-",
        f"{cycles / clock / 1e6:.2f}" if clock and cycles else "-",
        passes,
        *(f"{row[key] / MEBI:,.0f}" for key in ("traffic", "arguments")),
        f"{row['temporaries'] / MEBI:,.0f}",
        moved or "-",
        f"{row['kernels']:,}",
      ]
    )
  header = ["program", "GFLOP", "million cycles", "ms", "passes",
            "traffic, MiB", "arguments, MiB", "temporary, MiB",
            "exchanged, MiB", "kernels"]  # fmt: skip
  return markdown_table(header, shown)


def _sum(rows: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
  total = dict(rows[parts[0]])
  for part in parts[1:]:
    for key in ("flops", "cycles", "traffic", "kernels", "seconds"):
      total[key] += rows[part][key]
    # What one holds as arguments and results the next one reads.
    for key in ("arguments", "temporaries"):
      total[key] = max(total[key], rows[part][key])
    moved = {**total["exchanged"]}
    for kind, size in rows[part]["exchanged"].items():
      moved[kind] = moved.get(kind, 0) + size
    total["exchanged"] = moved
  return total


if __name__ == "__main__":
  main()
