"""Costs of a task here and in other libraries, each in its own forward passes.

  python -m benchmarks.comparison [--variant=Ti/16] [--image_size=128]
    [--batch=16] [--tasks 1 4 16] [--rounds=9] [--json=FILE]
    [--reproduction=VIT_PY --reproduction_python=PYTHON]

Runs in the environment of `make exchange`, which has PEFT and vit-pytorch too.
Every library runs in a process of its own, one after the other, each on the
same images and, where it can take them, the same random weights. In a process
everything is timed in turn, round by round; ratios are to that library's own
plain forward pass, so they do not tell JAX from PyTorch. The third and the
fourth option are for the reproduction of the paper: it is no package, and needs
an environment with transformers 4.30.

Prints a table for docs/comparison.md; its page says what the rows mean.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks.compared import rounds
from benchmarks.compared import setting as settings

LIBRARIES = ("memory_vit", "peft", "vit_pytorch")
_ROWS = {
  "train": "training step, one task",
  "train_kept": "the same, contexts kept",
  "train_all_weights": "training step, all weights",
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures every library, and prints a table.

  Args:
    argv: of the command; by default those of this process.

  Returns:
    What is written to --json.
  """
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  setting = _setting(arguments)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    _write(setting, folder)
    measured = [
      _run([sys.executable, "-m", f"benchmarks.compared.{library}", name])
      for library in arguments.only
    ]
    if arguments.reproduction:
      python = arguments.reproduction_python or sys.executable
      command = ["-m", "benchmarks.compared.reproduction", name]
      measured.append(_run([python, *command, arguments.reproduction]))
  result = {
    "date": datetime.date.today().isoformat(),
    "machine": platform.processor() or platform.machine(),
    "cores": _cores(),
    "setting": dataclasses.asdict(setting),
    "libraries": measured,
  }
  if arguments.json:
    Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
  print("\n".join(table(measured, setting)))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.comparison", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", default="Ti/16")
  add("--image_size", type=int, default=128)
  add("--batch", type=int, default=16)
  add("--cells", type=int, default=5)
  add("--classes", type=int, default=100)
  add("--rank", type=int, default=8, help="of LoRA")
  add("--tasks", type=int, nargs="+", default=[1, 4, 16])
  add("--rounds", type=int, default=9)
  add("--threads", type=int, default=_cores(), help="of PyTorch")
  add("--clock", choices=tuple(rounds.CLOCKS), default="wall", help="cpu on a "
      "machine that others use; on one core: taskset -c 0")  # fmt: skip
  add("--only", nargs="+", choices=LIBRARIES, default=LIBRARIES)
  add("--reproduction", help="vit.py of the PyTorch reproduction")
  add("--reproduction_python", help="of an environment that it runs in")
  add("--json", help="file for the numbers")
  return parser.parse_args(argv)


def _cores() -> int:
  """Count the cores that this process may use, where the system tells."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _setting(arguments: argparse.Namespace) -> settings.Setting:
  return settings.Setting(
    variant=arguments.variant,
    image_size=arguments.image_size,
    batch=arguments.batch,
    classes=arguments.classes,
    cells=arguments.cells,
    rank=arguments.rank,
    tasks=tuple(arguments.tasks),
    rounds=arguments.rounds,
    threads=arguments.threads,
    clock=arguments.clock,
  )


def _write(setting: settings.Setting, folder: Path) -> None:
  """Write the model in the layouts of all, and what it says of the images."""
  setting.write(folder)
  backbone = mv.random_backbone(
    setting.variant,
    image_size=setting.image_size,
    num_classes=setting.classes,
    key=jax.random.key(0),
  )
  # A head of a new model is zero: outputs would be alike whatever is computed.
  head = backbone.params["head"]
  head["kernel"] = 0.02 * jax.random.normal(
    jax.random.key(1), head["kernel"].shape
  )
  mv.save_backbone(backbone, folder / "backbone.npz")
  backbone = mv.load_backbone(folder / "backbone.npz")
  mv.save_backbone(backbone, folder / "hf", format="hf")
  outputs = mv.forward(backbone, [], settings.images(folder))
  np.save(folder / "logits.npy", np.asarray(outputs["backbone"]))


def _run(command: list[str]) -> dict[str, Any]:
  """Read what a library's process prints last; show its lines if it fails."""
  root = Path(__file__).resolve().parents[1]
  done = subprocess.run(command, capture_output=True, text=True, cwd=root)
  if done.returncode:
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
  found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
  return found


def table(
  measured: list[dict[str, Any]], setting: settings.Setting
) -> list[str]:
  """Lines of Markdown: a column for each library.

  Args:
    measured: what the programs of `benchmarks.compared` have printed.
    setting: what they were run with.
  """
  rows = {
    "": [one["name"] for one in measured],
    "runs on": [f"{one['version']}, {one['runs_on']}" for one in measured],
    "forward pass": [
      f"{1e3 * one['seconds_forward']:.0f} ms" for one in measured
    ],
  }
  for key, words in _names(setting.tasks).items():
    cells = [_ratio(one["ratios"].get(key)) for one in measured]
    if any(cells):
      rows[words] = cells
  rows["original outputs moved by"] = [
    _moved(one, "original") for one in measured
  ]
  rows["a task moved by the others"] = [_moved(one, "task") for one in measured]
  rows["parameters of a task"] = [f"{one['parameters']:,}" for one in measured]
  rows["file of a task"] = [
    f"{one['file_bytes'] / 1024:,.0f} KiB" for one in measured
  ]
  lines = [f"| {words} | {' | '.join(row)} |" for words, row in rows.items()]
  return [lines[0], "|---" * (len(measured) + 1) + "|", *lines[1:]]


def _names(counts: Sequence[int]) -> dict[str, str]:
  """Words for each ratio, in the order of the table."""
  names = dict(_ROWS)
  for count in counts:
    plural = "" if count == 1 else "s"
    names[f"infer_{count}"] = f"original and {count} task{plural}"
    names[f"infer_{count}_one_batch"] = f"{count} task{plural}, in one batch"
  return names


def _ratio(quartiles: list[float] | None) -> str:
  if quartiles is None:
    return ""
  low, median, high = quartiles
  return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _moved(one: dict[str, Any], what: str) -> str:
  values = [one[f"{what}_difference"]]
  if f"{what}_difference_one_batch" in one:
    values.append(one[f"{what}_difference_one_batch"])
  return ", ".join("0 (same bits)" if not v else f"{v:.1e}" for v in values)


if __name__ == "__main__":
  main()
