"""Plots of a trained task, for TensorBoard, Weights & Biases and as files."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from etils import epy
from PIL import Image

from memory_vit.data.batching import eval_images
from memory_vit.data.split import Split
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.model.task import Task
from memory_vit.run_result import ANSWERS as ANSWERS_FILE
from memory_vit.run_result import ATTENTION, SWEEP, RunResult
from memory_vit.runtime import files, sharding
from memory_vit.runtime.messages import named
from memory_vit.train.inputs import RunInputs
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.results import AnyPredictions, TrainedTrial
from memory_vit.train.wandb_run import WandbRun

with epy.lazy_imports():  # matplotlib is slow to import
  from memory_vit import looking, plots
  from memory_vit.kinds import confusion
  from memory_vit.looking import token_attention
  from memory_vit.plots import rasterize

if TYPE_CHECKING:
  from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Tags of the plots that are written to the working directory and TensorBoard.
OVERLAYS = "attention/overlays"
ANSWERS = "test/answers"
FILES = {OVERLAYS: ATTENTION, ANSWERS: ANSWERS_FILE}
# The plot "test/answers" has up to `_SHEET` times `config.log_images` images.
_SHEET = 3
# {tag: plot}, where each plot is uint8 (height, width, 3).
Pictures = dict[str, np.ndarray]


def show_best(
  inputs: RunInputs,
  task: Task,
  trained: TrainedTrial,
  result: RunResult,
  workdir: Path,
  writers: MetricWriters,
  wandb: WandbRun | None,
) -> None:
  """Write the plots of a finished run, and its summary for W&B.

  Plots that fail are left out with a warning, because the run has finished.
  """
  try:
    if jax.process_index() == 0:
      # Remove the plots of an earlier result.
      for name in FILES.values():
        (workdir / name).unlink(missing_ok=True)
      if inputs.config.sweep.is_on:
        with files.replacing(workdir / SWEEP) as part:
          plots.sweep_figure(result).savefig(part, dpi=120, format="png")
    if inputs.config.log_images:
      _draw_best(inputs, task, trained, workdir, writers)
  except Exception as error:  # full disks, and errors of TensorBoard
    logger.warning("plots cannot be written (%s)", named(error))
  if wandb:
    trial, val, test = trained.trial, trained.result.val, trained.result.test
    score = next(iter(val.metrics or test.metrics), "score")
    wandb.summarize(
      {
        "best/trial": trial.name,
        "best/varied": trial.label or None,
        "best/step": trained.result.best_step,
        f"best/validation_{score}": val.score,
        f"best/test_{score}": test.score,
      }
    )


def _draw_best(
  inputs: RunInputs,
  task: Task,
  trained: TrainedTrial,
  workdir: Path,
  writers: MetricWriters,
) -> None:
  """Write the plots of the best trial, as TensorBoard events and as files."""
  pictures = pictures_of(inputs, task, trained.predictions)
  writers.write_images(trained.result.steps, {trained.trial.name: pictures})
  if jax.process_index() == 0:
    for tag, name in FILES.items():
      file = workdir / name
      if tag in pictures:
        with files.writing(file), files.replacing(file) as part:
          Image.fromarray(pictures[tag]).save(part, format="PNG")


def pictures_of(
  inputs: RunInputs, task: Task, predictions: AnyPredictions | None
) -> Pictures:
  """Draw attention and answers of a task; leave out plots that fail."""
  pictures: Pictures = {}
  for draw in (
    lambda: attention_figures(inputs, task, predictions),
    lambda: answer_figures(inputs, task, predictions),
    lambda: confusion_figures(task, predictions),
  ):
    try:
      pictures |= {tag: rasterize.rasterize(f) for tag, f in draw().items()}
    except Exception as error:  # broken images, lack of memory
      logger.warning("plots are left out (%s)", named(error))
  return pictures


def attention_figures(
  inputs: RunInputs, task: Task, predictions: AnyPredictions | None
) -> dict[str, Figure]:
  """Draw which patches a task attends to, on images that it did not train on.

  Return {} if there are no images, no token of the task, or several processes.
  """
  split = inputs.splits.get("test") or inputs.splits.get("validation")
  if split is None or split.embedded or not task.spec.learned.has_token:
    return {}
  if jax.process_count() > 1:
    logger.info("no plots of attention on several processes")
    return {}
  chosen = _some_examples(inputs, split)
  images = eval_images(split, inputs.preprocessing, chosen)
  titles = _answers(task, predictions, chosen) if predictions else ()
  mesh = inputs.mesh
  tasks = [
    dataclasses.replace(t, params=sharding.put(t.params, mesh))
    for t in (*inputs.parents, task)
  ]
  # Repeat the last image until all devices get the same number of images.
  more = -len(images) % mesh.size
  rows = np.concatenate([images, images[-1:].repeat(more, axis=0)])
  by_task = token_attention.token_attention(
    inputs.backbone, tasks, sharding.shard_batch(rows, mesh)
  )
  attention = by_task[task.name].of_images(slice(len(images)))
  return {
    OVERLAYS: looking.attention_overlays(images, attention, titles=titles),
    "attention/shares": looking.memory_shares_figure(attention),
  }


def answer_figures(
  inputs: RunInputs, task: Task, predictions: AnyPredictions | None
) -> dict[str, Figure]:
  """Draw test images, each below its label and the task's prediction."""
  split = inputs.splits.get("test")
  if predictions is None or split is None or split.embedded:
    return {}
  chosen = _some_examples(inputs, split, _SHEET)
  images = eval_images(split, inputs.preprocessing, chosen)
  titles = _answers(task, predictions, chosen)
  return {ANSWERS: plots.image_grid(images, titles)}


def confusion_figures(
  task: Task, predictions: AnyPredictions | None
) -> dict[str, Figure]:
  """Draw which classes of the test split a task confuses."""
  if not isinstance(predictions, SplitPredictions):
    return {}
  matrix = confusion.confusion_matrix(predictions)
  figure = plots.confusion_matrix_figure(matrix, _class_names(task))
  return {"test/confusions": figure}


def _class_names(task: Task) -> Sequence[str]:
  """Return the class names of a task, or its class numbers if it has none."""
  return task.spec.class_names or [*map(str, range(task.spec.num_classes))]


def _answers(
  task: Task, predictions: AnyPredictions, chosen: Sequence[int]
) -> list[str]:
  """Return a title for each chosen example: its label, then its prediction."""
  names = _class_names(task)
  return [
    looking.answer_title(*predictions.texts(names, number)) for number in chosen
  ]


def _some_examples(inputs: RunInputs, split: Split, k: int = 1) -> list[int]:
  """Return up to `k` * `config.log_images` indices, evenly spaced in a split.

  The first examples would be of one class, because files are sorted by class.
  """
  readable = [i for i in range(split.size) if i not in split.unreadable]
  count = min(k * inputs.config.log_images, len(readable))
  places = np.linspace(0, len(readable) - 1, count).round().astype(int)
  return [readable[i] for i in places]
