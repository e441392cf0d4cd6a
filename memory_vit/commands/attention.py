"""Shows attention maps of tasks, and how memory cells affect their accuracy.

  memory-vit attention --backbone=NPZ --task=DIR [--task=DIR ...] \\
    --out=OUT [--data_dir=[TASK=]DIR | --data=[TASK=]NAME] [IMAGE ...]

IMAGE is a file, a folder (all images below it) or "-" (paths on standard input,
one per line). Images give attention maps of each layer for each task, their
differences for each pair of tasks, and the share of attention that goes to
memory. A data set gives an ablation: the accuracy of a task without each of its
memory cells. PNG files, and attention.json with the numbers, are written to
OUT. The exit status is 0, 1 if images could not be read, 2 for other bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.commands import console, data_options
from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import show
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.runtime import progress_bar
from memory_vit.runtime.messages import counted, escaped
from memory_vit.runtime.options import Number
from memory_vit.runtime.tables import table

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.evaluation import task_data
  from memory_vit.images import image_files
  from memory_vit.images import reader as image_reader
  from memory_vit.looking import attention_files, cell_removal, image_attention
  from memory_vit.runtime import sharding
  from memory_vit.tasks import find, model_loading

if TYPE_CHECKING:
  from pathlib import Path

  from memory_vit.data.split import Split
  from memory_vit.data.split_ref import SplitRef
  from memory_vit.images.image_files import ImageFile
  from memory_vit.images.reader import LoadedImage
  from memory_vit.looking.attention_files import AttentionReport, LeftOut
  from memory_vit.looking.cell_removal import CellRemoval
  from memory_vit.looking.image_attention import CollectedAttention
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.task import Task
  from memory_vit.tasks.manifest import Manifest

# Maximum number of figures: drawing more would take over an hour.
_MOST_FIGURES = 1_000


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return console.run_command(
    lambda: _run(_parser().parse(argv, mixed="images"))
  )


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit attention",
    description="Shows what tasks attend to (attention maps), and how their "
    "memory cells affect accuracy (an ablation).",
  )
  parser.add_argument(
    "images",
    nargs="*",
    metavar="IMAGE",
    help="an image file; a folder (all images below it, except hidden ones and "
    "those behind links to folders); or - (paths on standard input, one per "
    "line)",
  )
  parser.model(32, "images per pass")
  parser.add_argument(
    "--out",
    required=True,
    metavar="DIR",
    help="output directory; earlier output of this command is replaced",
  )
  parser.number(
    "--max_images",
    Number(0, _MOST_FIGURES, "images"),
    16,
    "number of images to draw: the first ones; shares of attention are means "
    "over all images",
  )
  parser.number(
    "--memory_mib",
    Number(1, 2**20, "MiB"),
    2048,
    "memory for images: a batch, the next one, and decoding",
  )
  data_options.add(parser, original=False)
  return parser


def _run(arguments: argparse.Namespace) -> int:
  evaluated = data_options.is_given(arguments)
  if not arguments.images and not evaluated:
    raise ConfigError(
      "no image is given: give an IMAGE or a folder of images, or "
      "--data_dir or --data to measure how removing memory affects accuracy."
    )
  out = attention_files.REPORT.require_own(arguments.out)
  progress_bar.log_to_stderr()
  # Check all options before loading anything, so that mistakes show at once.
  manifests, left_out = _usable(arguments.task)
  chosen = _choose(list(manifests.values()), arguments) if evaluated else {}
  if evaluated:
    left_out += _without_removal(list(manifests.values()))
    mesh = sharding.make_mesh()
    sharding.require_divisible(arguments.batch_size, mesh, "--batch_size")
  if not arguments.images and not chosen:
    raise TaskError(
      "no task of classes has memory cells that could be removed, and no "
      "IMAGE is given: expected an IMAGE, or a --task of classes with memory."
    )
  entries, total = _find_images(arguments.images)
  if arguments.images:
    preprocessing = next(iter(manifests.values())).spec.preprocessing
    reader = image_reader.ImageReader(
      arguments.memory_mib,
      arguments.batch_size,
      preprocessing.image_size,
      ahead=1,
      option="--memory_mib",
    )
  # Take only the first paths now, because standard input may deliver the other
  # paths much later.
  first = list(itertools.islice(entries, max(1, arguments.max_images)))
  drawn = min(len(first), arguments.max_images)
  shown = len(manifests) if first else 0
  _require_few_figures(drawn, shown, len(chosen))
  backbone, tasks = model_loading.load_model(
    arguments.backbone,
    list(manifests),
    console.compute_dtype(arguments.dtype),
  )
  evaluated_tasks = [task for task in tasks if task.name in chosen]
  for task in evaluated_tasks:  # check tasks before downloading data
    cell_removal.require_removable(backbone, task)
  opened = data_options.open_all(evaluated_tasks, chosen, arguments)
  attention = image_attention.CollectedAttention({}, [], [])
  if first:
    every = itertools.chain(first, entries)
    images = reader.read_files(every, preprocessing)
    attention = _attention_of(
      backbone, tasks, images, total, arguments.max_images
    )
  report = attention_files.AttentionReport(
    backbone=backbone,
    tasks=tasks,
    attention=attention,
    removals=_remove(backbone, tasks, opened, arguments.batch_size),
    left_out=left_out,
  )
  if not attention.shares and not report.removals:
    raise DataError(
      "no image could be read and no data set was evaluated: give other images."
    )
  figures = attention_files.write(out, report)
  show(text(report, out, len(figures)))
  return 1 if attention.skipped else 0


def _find_images(
  arguments: Sequence[str],
) -> tuple[Iterator[ImageFile], int | None]:
  """Return (images, their number); the number is None for standard input."""
  entries = image_files.find_images(arguments)
  if "-" in arguments:
    return entries, None
  files = list(entries)
  return iter(files), len(files)


def _require_few_figures(images: int, tasks: int, removals: int) -> None:
  figures = attention_files.count_figures(tasks, images) + removals
  if figures > _MOST_FIGURES:
    raise ConfigError(
      f"the report would have {figures:,} figures, expected at most "
      f"{_MOST_FIGURES:,}. With {counted(images, 'image')}, "
      f"{counted(tasks, 'task')} and {counted(removals, 'memory ablation')}, "
      "there is a figure for each image and task, for each image and pair of "
      "tasks, for each task (attention shares), and for each memory ablation. "
      "Give fewer --task, or a smaller --max_images."
    )


def _usable(
  sources: Sequence[str],
) -> tuple[dict[str, Manifest], list[LeftOut]]:
  """Return ({path: task with a class token}, tasks without a class token)."""
  usable: dict[str, Manifest] = {}
  left_out = []
  for path, manifest in find.find_tasks(sources):
    spec = manifest.spec
    if spec.learned.has_token:
      usable[str(path)] = manifest
    else:
      reason = (
        f"has the regime {spec.regime!r}, which gives a task no class token of "
        "its own"
      )
      left_out.append(attention_files.LeftOut(spec.name, "all", reason))
  if not usable:
    raise TaskError(
      "; ".join(f"task {gap.task} {gap.reason}" for gap in left_out)
      + ": expected a regime with a class token, such as 'memory_masked'."
    )
  return usable, left_out


def _choose(
  tasks: Sequence[Manifest], arguments: argparse.Namespace
) -> dict[str, SplitRef]:
  """Return {task: split} for the tasks whose memory cells can be removed."""
  flags = data_options.given(arguments, [task.spec.name for task in tasks])
  with_memory = [task for task in tasks if cell_removal.can_remove(task.spec)]
  return task_data.choose(with_memory, flags, upstream=False)[0]


def _without_removal(tasks: Sequence[Manifest]) -> list[LeftOut]:
  return [
    attention_files.LeftOut(
      task.spec.name,
      "removal",
      f"is a task of {task.spec.kind.name}, which has no accuracy"
      if task.spec.cells
      else "has no memory cells that could be removed",
    )
    for task in tasks
    if not cell_removal.can_remove(task.spec)
  ]


def _attention_of(
  backbone: Backbone,
  tasks: Sequence[Task],
  images: Iterable[Sequence[LoadedImage]],
  total: int | None,
  shown: int,
) -> CollectedAttention:
  attention = image_attention.collect_attention(
    backbone, tasks, images, shown=shown, total=total
  )
  for entry in attention.skipped:
    notice = f"skipped {escaped(entry.path)}: {escaped(entry.reason)}"
    show(notice, sys.stderr)
  return attention


def _remove(
  backbone: Backbone,
  tasks: Sequence[Task],
  opened: Sequence[tuple[Split, list[str]]],
  batch_size: int,
) -> dict[str, CellRemoval]:
  if not opened:
    return {}
  mesh = sharding.make_mesh()
  params = sharding.put_backbone(backbone.params, mesh)
  placed = dataclasses.replace(backbone, params=params)
  removals: dict[str, CellRemoval] = {}
  for source, names in opened:
    removals |= cell_removal.remove_cells(
      placed, tasks, source, names, batch_size=batch_size, mesh=mesh
    )
  return removals


def text(report: AttentionReport, out: Path, figures: int) -> str:
  """Return the report as text for the terminal."""
  lines = []
  shares = report.attention.shares
  if shares:
    header: tuple[str, ...]
    header = (
      "mean over layers", "images", "patches", "backbone", "own token",
      "own memory", "of parents",
    )  # fmt: skip
    rows = [_shares_row(report, task.name) for task in report.tasks]
    lines += [table(header, rows), ""]
  if report.removals:
    header = (
      "removing memory", "data set", "examples", "top-1",
      "without any, points", "worst cell, points", "cells that matter",
    )  # fmt: skip
    removed = [_removal_row(*item) for item in report.removals.items()]
    lines += [table(header, removed), ""]
  lines += [f"left out: {gap.task} {gap.reason}" for gap in report.left_out]
  lines += [
    f"{name}: {counted(removal.skipped, 'image')} of {escaped(removal.data)} "
    "could not be read: not counted"
    for name, removal in report.removals.items()
    if removal.skipped
  ]
  if skipped := len(report.attention.skipped):
    lines.append(f"{counted(skipped, 'image')} could not be read")
  lines.append(
    f"written: {escaped(str(out))}: {attention_files.FILE}, "
    + counted(figures, "figure")
  )
  return "\n".join(lines)


def _shares_row(report: AttentionReport, name: str) -> tuple[str, ...]:
  shares = report.attention.shares[name]
  parents = sum(float(a.mean()) for a in shares.parent_tokens.values())
  parents += sum(
    float(cells.sum(-1).mean()) for cells in shares.parent_memory.values()
  )
  parts = (
    float(shares.patches.mean()),
    float(shares.backbone_tokens.mean()),
    float(shares.token.mean()),
    float(shares.memory.sum(-1).mean()),
    parents,
  )
  return (name, f"{shares.images:,}", *(f"{100 * p:.1f} %" for p in parts))


def _removal_row(name: str, removal: CellRemoval) -> tuple[str, ...]:
  worst = removal.cells.difference.argmin()
  error = removal.cells.standard_error.flat[worst]
  significant = removal.significant(removal.cells)
  return (
    name,
    escaped(f"{removal.data} {removal.split}"),
    f"{removal.examples:,}",
    f"{100 * removal.top1:.2f} %",
    f"{100 * float(removal.memory.difference):+.2f} ± "
    f"{100 * float(removal.memory.standard_error):.2f}",
    f"{100 * removal.cells.difference.flat[worst]:+.2f} ± {100 * error:.2f}",
    f"{int(significant.sum())} of {significant.size}",
  )
