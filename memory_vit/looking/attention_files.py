"""Write the output of `memory-vit attention`: figures, and numbers as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from memory_vit.kinds import answer_line
from memory_vit.looking.attention_figures import (
  answer_title,
  attention_difference,
  attention_overlays,
  cell_removal_figure,
  memory_shares_figure,
)
from memory_vit.looking.attention_shares import AttentionShares
from memory_vit.looking.image_attention import (
  CollectedAttention,
  ImageAttention,
)
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.plots import rasterize
from memory_vit.runtime import files
from memory_vit.runtime.messages import utf8
from memory_vit.runtime.output_directory import OutputDirectory, listed_in
from memory_vit.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
  from memory_vit.looking.cell_removal import CellRemoval, Removals

FILE = "attention.json"
_KIND = "memory_vit attention report"
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class LeftOut:
  """A figure that is not drawn for a task, and the reason."""

  task: str
  picture: str
  reason: str


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class AttentionReport:
  """Results that are written to the output directory.

  Attributes:
    tasks: tasks that share a pass.
    removals: {task name: ablation of its memory}.
  """

  backbone: Backbone
  tasks: Sequence[Task]
  attention: CollectedAttention
  removals: Mapping[str, CellRemoval]
  left_out: Sequence[LeftOut]


def count_figures(tasks: int, images: int) -> int:
  """Return the number of overlays, pairwise differences and share plots."""
  pairs = tasks * (tasks - 1) // 2
  return images * (tasks + pairs) + tasks


REPORT = OutputDirectory("--out", listed_in(FILE, _KIND))


def write(path: Path, report: AttentionReport) -> list[str]:
  """Write a report, replacing an earlier one; return the names of figures."""
  with (
    REPORT.replacing(path) as new,
    ProgressBar("drawing", _count_all(report), "figures") as bar,
  ):
    canvas = _Canvas(new, bar)
    files.write_json(new / FILE, _values(report, canvas))
  return canvas.names


def _count_all(report: AttentionReport) -> int:
  shares, images = report.attention.shares, report.attention.images
  return count_figures(len(shares), len(images)) + len(report.removals)


class _Canvas:
  """Writer of figures to a directory; `names` lists the written files."""

  def __init__(self, directory: Path, bar: ProgressBar) -> None:
    self._directory, self._bar = directory, bar
    self.names: list[str] = []

  def draw(self, name: str, figure: Figure) -> str:
    file = self._directory / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(rasterize.png(figure))
    self.names.append(name)
    self._bar.update()
    return name


def _values(report: AttentionReport, canvas: _Canvas) -> dict[str, Any]:
  """Draw all figures; return the content of `attention.json`."""
  config = report.backbone.config
  return {
    "kind": _KIND,
    "schema_version": SCHEMA_VERSION,
    "backbone": {
      "fingerprint": report.backbone.fingerprint,
      "variant": config.variant,
      "image_size": config.image_size,
      "dtype": config.dtype,
    },
    "tasks": [_task(task, report, canvas) for task in report.tasks],
    "images": [
      _image(i, image, report.tasks, canvas)
      for i, image in enumerate(report.attention.images, start=1)
    ],
    "skipped": [
      {"image": utf8(entry.path), "error": utf8(entry.reason)}
      for entry in report.attention.skipped
    ],
    "left_out": [dataclasses.asdict(missing) for missing in report.left_out],
    "files": sorted(canvas.names),
  }


def _task(
  task: Task, report: AttentionReport, canvas: _Canvas
) -> dict[str, Any]:
  name, spec = task.name, task.spec
  values: dict[str, Any] = {
    "name": name,
    "regime": spec.regime,
    "cells": spec.cells,
    "attends_to": list(spec.attends_to),
    "digest": task.digest,
    "attention": None,
    "removal": None,
  }
  if shares := report.attention.shares.get(name):
    figure = canvas.draw(f"shares/{name}.png", memory_shares_figure(shares))
    values["attention"] = {**_shares(shares), "figure": figure}
  if removal := report.removals.get(name):
    drawn = cell_removal_figure(removal)
    figure = canvas.draw(f"removal/{name}.png", drawn)
    values["removal"] = {**_removal(removal), "figure": figure}
  return values


def _shares(shares: AttentionShares) -> dict[str, Any]:
  """Return mean shares of attention, as lists with an entry for each layer."""
  return {
    "images": shares.images,
    "patches": shares.patches.tolist(),
    "backbone_tokens": shares.backbone_tokens.tolist(),
    "token": shares.token.tolist(),
    "memory": shares.memory.tolist(),
    "parent_tokens": {k: a.tolist() for k, a in shares.parent_tokens.items()},
    "parent_memory": {k: a.tolist() for k, a in shares.parent_memory.items()},
  }


def _removal(removal: CellRemoval) -> dict[str, Any]:
  def part(removals: Removals) -> dict[str, Any]:
    return {
      "top1": _listed(removal.top1 + removals.difference),
      "difference": _listed(removals.difference),
      "standard_error": _listed(removals.standard_error),
      "p_value": _listed(removals.p_value),
      "significant": _listed(removal.significant(removals)),
      "lost": _listed(removals.lost),
      "gained": _listed(removals.gained),
    }

  return {
    "data": utf8(removal.data),
    "split": utf8(removal.split),
    "examples": removal.examples,
    "skipped": removal.skipped,
    "top1": removal.top1,
    "cells": part(removal.cells),
    "layers": part(removal.layers),
    "memory": part(removal.memory),
  }


def _listed(array: np.ndarray) -> Any:
  """Convert an array to nested lists, or an array without axes to a number."""
  return np.asarray(array).tolist()


def _image(
  number: int, image: ImageAttention, tasks: Sequence[Task], canvas: _Canvas
) -> dict[str, Any]:
  """Draw a figure for each task and pair of tasks; return a JSON object."""
  names = [task.name for task in tasks]
  answers = {task.name: _answer(task, image) for task in tasks}
  stem = re.sub(r"[^\w-]+", "-", Path(image.path).stem, flags=re.ASCII)[:40]
  file = f"{number:04}.{stem}"
  overlays = {
    name: canvas.draw(
      f"overlays/{file}.{name}.png",
      attention_overlays(
        image.pixels,
        image.attention[name],
        image.rollouts[name],
        [_title(answer)],
      ),
    )
    for name, answer in answers.items()
  }
  differences = [
    {
      "tasks": [a, b],
      "figure": canvas.draw(
        f"differences/{file}.{a}.{b}.png",
        attention_difference(
          image.pixels,
          image.attention[a],
          image.attention[b],
          (image.rollouts[a], image.rollouts[b]),
        ),
      ),
    }
    for a, b in itertools.combinations(names, 2)
  ]
  return {
    "image": utf8(image.path),
    "answers": answers,
    "overlays": overlays,
    "differences": differences,
  }


def _answer(task: Task, image: ImageAttention) -> dict[str, Any]:
  """Return a JSON object with the best class, predicted labels, or values."""
  activated, spec = image.answers[task.name][None], task.spec
  names = [*map(utf8, spec.class_names)]
  [answer] = spec.kind.answers(names, activated)
  return answer[0] if spec.kind.kind.one_is_right else answer


def _title(answer: dict[str, Any]) -> str:
  if "class" in answer:
    return answer_title(answer["class"], answer["probability"])
  return answer_title(answer_line(answer))
