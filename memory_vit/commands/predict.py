r"""Predicts classes, labels or values of images with any number of tasks.

  memory-vit predict --backbone=NPZ --task=DIR [--task=DIR ...] \
    IMAGE [IMAGE ...]

IMAGE is a file, a folder (all images below it) or "-" (paths on standard input,
one per line). All tasks share one pass. Depending on its kind, a task prints
the most probable classes, the labels at or above their thresholds, or values
with units. Images are preprocessed as in the evaluation of the tasks. A task
that needs its own pass (regime probe, full, ...) must be the only one.
The exit status is 0, 1 if images could not be read, 2 for other bad input.

Predictions for millions of images are written to Parquet, by this process or by
a Ray cluster:

  memory-vit predict --backbone=NPZ --task=DIR [--task=DIR ...] \
    --input=FOLDER --output=DIR [--engine=ray]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.commands import bulk_options, console
from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import show
from memory_vit.errors import ConfigError
from memory_vit.kinds import answer_rows
from memory_vit.runtime import progress_bar
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.options import Number

with epy.lazy_imports():  # delay slow imports until the options are checked
  import numpy as np

  from memory_vit.bulk import predictions
  from memory_vit.images import image_files
  from memory_vit.images import reader as image_reader
  from memory_vit.model import task as task_sets
  from memory_vit.prediction import config as predictor_config
  from memory_vit.prediction import predictor as predictors
  from memory_vit.tasks import model_loading

if TYPE_CHECKING:
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.task import Task
  from memory_vit.prediction.predictor import Predictor

_MANY = 100  # recommend a faster dtype for more images than this
# Answers for one image: {task name: answer}, see `Kind.answers`.
Answers = dict[str, Any]


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return console.run_command(lambda: _predict(_parser(), argv))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit predict",
    description="Predicts classes, labels or values of images, with all tasks "
    "in one pass.",
  )
  parser.add_argument(
    "images",
    nargs="*",
    metavar="IMAGE",
    help="an image file; a folder (all images below it, except hidden ones and "
    "those behind links to folders); or - (paths on standard input, one per "
    "line)",
  )
  parser.model(32, "images per pass; results are printed after each pass")
  parser.number(
    "--top", Number(1, 2**20, "classes"), 5, "number of classes shown per task"
  )
  parser.switch("--json", "print one JSON object per image")
  parser.number(
    "--memory_mib",
    Number(1, 2**20, "MiB"),
    2048,
    "memory for images: a batch, the next one, and decoding. An image that "
    "alone needs more is skipped (the largest allowed ones need up to 1,600); "
    "weights, model and libraries are not counted",
  )
  parser.switch(
    "--original", "also show the outputs of the backbone's own head, by index"
  )
  parser.switch("--logits", "with --input: write all outputs of the heads")
  bulk_options.add(parser, required=False)
  return parser


def _predict(parser: Parser, argv: Sequence[str]) -> int:
  arguments = parser.parse(argv, mixed="images")
  bulk_options.require_used(parser, arguments, "logits")
  if arguments.input:
    return _predict_bulk(arguments)
  return _predict_all(arguments)


def _predict_bulk(arguments: argparse.Namespace) -> int:
  if arguments.images or arguments.json:
    raise ConfigError(
      "with --input, predictions are written as Parquet, and not printed: "
      "expected neither --json nor an IMAGE."
    )
  config = predictor_config.PredictorConfig(
    backbone=bulk_options.whole_path(arguments.backbone),
    tasks=tuple(map(bulk_options.whole_path, arguments.task)),
    dtype=bulk_options.compute_dtype(arguments),
    batch_sizes=(arguments.batch_size,),
    memory_mib=arguments.memory_mib,
  )
  job = predictions.PredictionJob(
    config, arguments.top, arguments.logits, arguments.original
  )
  return bulk_options.run_job(arguments, job)


def _predict_all(arguments: argparse.Namespace) -> int:
  if not arguments.images:
    raise ConfigError(
      "the command line: there is no image; expected IMAGE ..., or --input and "
      "--output; --help lists all options."
    )
  dtype = console.compute_dtype(arguments.dtype)
  backbone, tasks = model_loading.load_model(
    arguments.backbone, arguments.task, dtype, any_regime=True
  )
  if arguments.original and not backbone.config.num_classes:
    raise ConfigError(
      f"--original: the backbone {arguments.backbone} has no head. Leave "
      "--original out, or give a backbone with a head."
    )
  # Read no images ahead if standard input lists the paths: answers would wait
  # for the next path, which may arrive hours later.
  ahead = "-" not in arguments.images
  progress_bar.log_to_stderr()
  entries: Iterable[image_files.ImageFile] = image_files.find_images(
    arguments.images
  )
  total = None
  # Do not list all images in advance unless a progress bar needs their number:
  # listing millions of images in many folders is slow.
  if ahead and progress_bar.on_terminal():
    entries = list(entries)
    total = len(entries)
  preprocessing = tasks[0].spec.preprocessing  # the same for all tasks
  reader = image_reader.ImageReader(
    arguments.memory_mib,
    arguments.batch_size,
    preprocessing.image_size,
    ahead=int(ahead),
    option="--memory_mib",
  )
  seen = skipped = 0
  predictor = None
  with progress_bar.ProgressBar("predicting", total) as bar:
    for images in reader.read_files(entries, preprocessing):
      # Make the predictor for the first batch: no later batch is larger.
      predictor = predictor or _predictor(
        backbone, tasks, arguments, len(images)
      )
      answers = iter(
        _answers(
          predictor,
          [image.pixels for image in images if image.pixels is not None],
          top=arguments.top,
          original=arguments.original,
        )
      )
      if seen <= _MANY < seen + len(images):
        console.recommend_dtype(arguments.dtype)
      for image in images:
        bar.update()
        seen, entry = seen + 1, image.entry
        if image.pixels is None:
          skipped += 1
          reason = escaped(entry.reason)
          show(f"skipped {escaped(entry.path)}: {reason}", sys.stderr)
          if arguments.json:
            show(json.dumps({"image": entry.path, "error": entry.reason}))
        else:
          line = _json_line if arguments.json else _text
          show(line(entry.path, next(answers)))
  if skipped:
    show(f"{skipped} of {seen} images could not be read", sys.stderr)
  return 1 if skipped else 0


def _predictor(
  backbone: Backbone,
  tasks: Sequence[Task],
  arguments: argparse.Namespace,
  images: int,
) -> Predictor:
  """Return a predictor of `tasks` for batches of up to `images` images."""
  size = min(arguments.batch_size, 1 << (images - 1).bit_length())
  return predictors.Predictor.from_model(
    backbone,
    tasks,
    batch_sizes=(size,),
    slots=1,
    memory_mib=arguments.memory_mib,
    warm_up=False,  # compile at the first pass, while images are decoded
  )


def _answers(
  predictor: Predictor,
  images: Sequence[np.ndarray],
  *,
  top: int,
  original: bool,
) -> list[Answers]:
  """Return a list of {task: answer}; `original` adds the backbone's answers."""
  if not images:
    return []
  outputs = predictor.predict_pixels(np.stack(images), original=original)
  names = [*([task_sets.BACKBONE] if original else []), *outputs.logits]
  answers = {name: outputs.answers(name, top) for name in names}
  return [{n: answers[n][i] for n in names} for i in range(len(images))]


def _json_line(path: str, answers: Answers) -> str:
  """Return a JSON line with "image", "tasks" and, if present, "backbone"."""
  tasks, line = dict(answers), {"image": path}
  original = task_sets.BACKBONE
  if original in tasks:
    line[original] = tasks.pop(original)
  return json.dumps({**line, "tasks": tasks})


def _text(path: str, answers: Answers) -> str:
  """Return a text: the path, and a line for each class, label or value."""
  rows = [
    (name if i == 0 else "", escaped(output), escaped(number))
    for name, answer in answers.items()
    for i, (output, number) in enumerate(answer_rows(answer))
  ]
  first = max(len(task) for task, _, _ in rows)
  second = max(len(output) for _, output, _ in rows)
  lines = [
    f"  {task:{first}}  {output:{second}}  {number:>7}".rstrip()
    for task, output, number in rows
  ]
  return "\n".join([escaped(path), *lines])
