"""Compare costs of a task in several libraries, in their own forward passes.

  python -m benchmarks.comparison [--variant=Ti/16] [--image_size=128]
    [--batch=16] [--tasks 1 4 16] [--processes=3] [--rounds=5] [--json=FILE]
    [--page=FILE] [--reproduction=VIT_PY --reproduction_python=PYTHON]

Runs in the environment of `make exchange`, which also has PEFT and vit-pytorch.
Every library runs in processes of its own, the libraries in turn, each on the
same images and, if its layers allow it, the same random weights. A process
times everything in turn, round by round; ratios are to the library's own plain
forward pass, so they do not compare JAX with PyTorch. Brackets show the range
over processes. The last two options are for the reproduction of the paper,
which is no package and needs an environment with transformers 4.30.

Prints a table, and writes it into --page: docs/reference/comparison.md, which
explains the rows.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks.compared import rounds
from benchmarks.compared import setting as settings
from memory_vit.runtime.tables import markdown_table

# The figures of a page are between these.
_BEGINS, _ENDS = "<!-- figures -->", "<!-- end of figures -->"
LIBRARIES = ("memory_vit", "peft", "vit_pytorch")
_ROWS = {
  "train": "training step, one task",
  "train_kept": "the same, keys and values cached",
  "train_side": "training step, one task with a side stream",
  "train_side_kept": "the same with a side stream, keys and values cached",
  "train_all_weights": "training step, all weights",
}
_COUNTED = {
  "wall": "What is counted is the time that passed.",
  "cpu": "What is counted is the time that the process computed, not the time "
  "that passed.",
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure every library, and print a table; returns --json."""
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  setting = _setting(arguments)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    _write(setting, folder)
    commands = _commands(arguments, name)
    passes = [
      [_run(command) for command in commands]
      for _ in range(arguments.processes)
    ]
  result = {
    "date": datetime.date.today().isoformat(),
    "machine": platform.processor() or platform.machine(),
    "python": platform.python_version(),
    "cores": _cores(),
    "processes": arguments.processes,
    "setting": dataclasses.asdict(setting),
    "libraries": [merged(found) for found in zip(*passes, strict=True)],
  }
  print("\n".join(figures(result)))
  if arguments.json:
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
  if arguments.page:
    arguments.page.write_text(with_figures(arguments.page.read_text(), result))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  """Read the flags, and refuse wrong ones before measuring."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.comparison", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", default="Ti/16", choices=tuple(settings.SIZES))
  add("--image_size", type=_count, default=128)
  add("--batch", type=_count, default=16)
  add("--cells", type=_count, default=5)
  add("--classes", type=_count, default=100)
  add("--rank", type=_count, default=8, help="of LoRA")
  add("--tasks", type=_count, nargs="+", default=[1, 4, 16])
  add("--processes", type=_count, default=3, help="of each library, one after "
      "another; with 1, brackets are quartiles of its rounds")  # fmt: skip
  add("--rounds", type=_count, default=5, help="in each process")
  add("--threads", type=_count, default=_cores(), help="of PyTorch")
  add("--clock", choices=tuple(rounds.CLOCKS), default="wall", help="cpu on a "
      "shared machine; on one core: taskset -c 0")  # fmt: skip
  add("--only", nargs="+", choices=LIBRARIES, default=LIBRARIES)
  add("--reproduction", type=_file, help="vit.py of the PyTorch reproduction")
  add("--reproduction_python", type=_program, default=sys.executable,
      help="of its environment")  # fmt: skip
  add("--json", type=_writable, help="file for the numbers")
  add("--page", type=_page, help="file of Markdown whose table is replaced")
  return parser.parse_args(argv)


def _count(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more")
  return int(text)


def _file(text: str) -> Path:
  path = Path(text).resolve()  # libraries run in another directory
  if not path.is_file():
    raise argparse.ArgumentTypeError(f"{path} is no file")
  return path


def _program(text: str) -> str:
  found = shutil.which(text)
  if found is None:
    raise argparse.ArgumentTypeError(f"{text} is no program")
  return os.path.abspath(found)  # keeps links, as in .venv


def _writable(text: str) -> Path:
  path = Path(text).resolve()
  try:
    path.open("a").close()
  except OSError as problem:
    raise argparse.ArgumentTypeError(f"cannot be written: {problem}") from None
  return path


def _page(text: str) -> Path:
  path = _file(text)
  try:
    with_figures(path.read_text(), None)
  except ValueError as problem:
    raise argparse.ArgumentTypeError(f"{path}: {problem}") from None
  return _writable(text)


def _commands(arguments: argparse.Namespace, folder: str) -> list[list[str]]:
  """The command that measures each library in a process."""
  commands = [
    [sys.executable, "-m", f"benchmarks.compared.{library}", folder]
    for library in arguments.only
  ]
  if arguments.reproduction:
    module = "benchmarks.compared.reproduction"
    source = str(arguments.reproduction)
    python = arguments.reproduction_python
    commands.append([python, "-m", module, folder, source])
  return commands


def _cores() -> int:
  """The number of cores that this process may use, if known."""
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
  """Write the model in all layouts, and its outputs for the images."""
  setting.write(folder)
  backbone = mv.random_backbone(
    setting.variant,
    image_size=setting.image_size,
    num_classes=setting.classes,
    key=jax.random.key(0),
  )
  # A new head is zero, so outputs would be equal whatever is computed.
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
  """Read the last line that a library's process prints."""
  root = Path(__file__).resolve().parents[1]
  done = subprocess.run(command, capture_output=True, text=True, cwd=root)
  if done.returncode:
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
  found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
  return found


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Merge the results of the processes of a library.

  Medians of times, and the largest differences of outputs. `ratios` are the
  lowest, the median and the highest of the processes' medians; for one process,
  its quartiles.
  """
  first, *others = found
  if not others:
    return first
  medians = {
    name: sorted(one["ratios"][name][1] for one in found)
    for name in first["ratios"]
  }
  seconds = [one["seconds_forward"] for one in found]
  return {
    **first,
    **{
      key: max(one[key] for one in found)
      for key in first
      if "_difference" in key
    },
    "seconds_forward": statistics.median(seconds),
    "ratios": {
      name: [each[0], statistics.median(each), each[-1]]
      for name, each in medians.items()
    },
    "processes": [
      {key: one[key] for key in ("seconds_forward", "ratios")} for one in found
    ],
  }


def with_figures(page: str, result: dict[str, Any] | None) -> str:
  """Replace the figures between the marks of a page; None removes them."""
  before, begins, rest = page.partition(_BEGINS)
  _, ends, after = rest.partition(_ENDS)
  if not ends:
    raise ValueError(f"expected the lines {_BEGINS!r} and {_ENDS!r}")
  if result and not result["libraries"]:
    raise ValueError("no library was measured: the page stays as it is")
  lines = figures(result) if result else []
  return "\n".join([before + begins, "", *lines, "", ends + after])


def figures(result: dict[str, Any]) -> list[str]:
  """Lines of Markdown: the table, its brackets, the machine."""
  values = result["setting"]
  setting = settings.Setting(**{**values, "tasks": tuple(values["tasks"])})
  count = result.get("processes", 1)
  if count == 1:
    how = (
      f"Medians of {setting.rounds} rounds in one process of each library; in "
      "brackets the quartiles of these rounds. They do not say how much a "
      "library differs from one process to the next."
    )
  else:
    how = (
      f"Medians of {count} processes of each library, {setting.rounds} rounds "
      "in each; in brackets the least and the greatest of the processes. Where "
      "brackets overlap, the two cannot be told apart."
    )
  lines = textwrap.wrap(
    f"{how} Measured on {result['date']}, {_machine(result)}. "
    f"{_COUNTED[setting.clock]}",
    width=88,
  )
  return [table(result["libraries"], setting), "", *lines]


def _machine(result: dict[str, Any]) -> str:
  """Describe the machine; older results lack the version of Python."""
  cores, threads = result["cores"], result["setting"]["threads"]
  parts = [
    f"with {cores} core{_plural(cores)} ({result['machine']})",
    f"{threads} thread{_plural(threads)} of PyTorch",
  ]
  if "python" in result:
    parts.append(f"Python {result['python']}")
  return ", ".join(parts)


def _plural(count: int) -> str:
  return "" if count == 1 else "s"


def table(measured: list[dict[str, Any]], setting: settings.Setting) -> str:
  """A table of Markdown: a column for each library."""
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
  rows["change of the original outputs"] = [
    _moved(one, "original") for one in measured
  ]
  rows["change of a task by the others"] = [
    _moved(one, "task") for one in measured
  ]
  rows["parameters of a task"] = [f"{one['parameters']:,}" for one in measured]
  rows["file of a task"] = [
    f"{one['file_bytes'] / 1024:,.0f} KiB" for one in measured
  ]
  header, *lines = [(words, *row) for words, row in rows.items()]
  return markdown_table(header, lines)


def _names(counts: Sequence[int]) -> dict[str, str]:
  """Labels of the ratios, in the order of the table."""
  names = dict(_ROWS)
  for count in counts:
    tasks = f"{count} task{_plural(count)}"
    names[f"infer_{count}"] = f"original and {tasks}"
    names[f"infer_{count}_one_batch"] = f"{tasks}, in one batch"
    names[f"infer_side_{count}"] = f"original and {tasks}, side streams"
  return names


def _ratio(values: list[float] | None) -> str:
  if values is None:
    return ""
  low, median, high = values
  return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _moved(one: dict[str, Any], what: str) -> str:
  values = [one[f"{what}_difference"]]
  values += [
    one[key]
    for how in ("one_batch", "same_slots")
    if (key := f"{what}_difference_{how}") in one
  ]
  return ", ".join("0 (same bits)" if not v else f"{v:.1e}" for v in values)


if __name__ == "__main__":
  main()
