"""Predicts the classes of pictures, by any number of tasks in one pass.

  python -m memory_vit.predict --backbone=NPZ --task=DIR [--task=DIR ...] \\
    IMAGE [IMAGE ...]

IMAGE is a file, a folder (all pictures below it) or "-" (paths on standard
input, one per line). Pictures are prepared as the tasks were evaluated. The
exit status is 0, 1 where pictures could not be read, 2 for other bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.cli import commands, load_model
from memory_vit.cli.command_line import Parser, number
from memory_vit.cli.commands import show
from memory_vit.config import OPTIONS
from memory_vit.errors import ConfigError, TaskError
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.rules import Number

with epy.lazy_imports():  # once the command line is known to be right
  import numpy as np
  from PIL import Image

  from memory_vit.data import image_files as reading
  from memory_vit.model import task as task_sets
  from memory_vit.tasks import inference

if TYPE_CHECKING:
  from memory_vit.model.backbone import Backbone
  from memory_vit.tasks.slots import Slots


@dataclasses.dataclass(frozen=True)
class Guess:
  """One class, and how probable it is.

  Attributes:
    class_name: its name, or its index as text where that is unknown.
    index: from 0.
    probability: from 0 to 1.
  """

  class_name: str
  index: int
  probability: float


# Name of a task -> its best guesses, the most probable first.
Guesses = dict[str, list[Guess]]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  return commands.run_command(
    lambda: _predict(_parser().parse_intermixed_args(argv))
  )


def _parser() -> argparse.ArgumentParser:
  parser = Parser(
    prog="python -m memory_vit.predict",
    description="Predicts the classes of pictures, by all tasks in one pass.",
  )
  add = parser.add_argument
  add(
    "images",
    nargs="+",
    metavar="IMAGE",
    help="a file; a folder: all pictures below it, but for hidden files and "
    "behind links to folders; or -: paths on standard input, one per line",
  )
  add(
    "--backbone",
    required=True,
    metavar="NPZ",
    help="an .npz file, its address or a short name such as augreg-B/32",
  )
  add(
    "--task",
    required=True,
    action="append",
    metavar="DIR",
    help="a task, or a directory of tasks; may be given several times",
  )
  add(
    "--top",
    type=number(int, Number(1, 2**20, "classes")),
    default=5,
    help="classes to show (default: 5)",
  )
  add("--json", action="store_true", help="one JSON object per picture")
  add(
    "--batch_size",
    type=number(int, OPTIONS["batch_size_eval"].rule),
    default=32,
    help="pictures per pass; results come after so many (default: 32)",
  )
  add(
    "--memory_mib",
    type=number(int, Number(1, 2**20, "MiB")),
    default=2048,
    help="memory for pictures: a batch of them, and those that are decoded for "
    "it. Some wait for others; one that alone needs more is skipped (the "
    "largest may take 1,600). The weights, the model and the libraries come on "
    "top (default: 2048)",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of the computation (default: float32)",
  )
  add(
    "--original",
    action="store_true",
    help="show the outputs of the backbone's own head too, by index",
  )
  return parser


def _predict(arguments: argparse.Namespace) -> int:
  with warnings.catch_warnings():
    # Large pictures are refused as such; Pillow warns from a lower limit on.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    return _predict_all(arguments)


def _predict_all(arguments: argparse.Namespace) -> int:
  backbone, tasks = load_model.load_model(
    arguments.backbone, arguments.task, arguments.dtype
  )
  if arguments.original and not backbone.config.num_classes:
    raise ConfigError(
      f"--original: the backbone {arguments.backbone} has no head."
    )
  slots = inference.fill_slots(backbone, tasks)
  evaluation = tasks[0].spec.evaluation  # that of all
  total = skipped = 0
  entries = reading.find_images(arguments.images)
  batches = reading.read_batches(
    entries, evaluation, arguments.batch_size, arguments.memory_mib
  )
  for pictures in batches:
    guesses = iter(
      guess(
        backbone,
        slots,
        [p.pixels for p in pictures if p.pixels is not None],
        batch_size=arguments.batch_size,
        top=arguments.top,
        original=arguments.original,
      )
    )
    for picture in pictures:
      total, entry = total + 1, picture.entry
      if picture.pixels is None:
        skipped += 1
        _show_unreadable(entry.path, entry.reason, arguments.json)
      else:
        _show_guesses(entry.path, next(guesses), arguments.json)
  if skipped:
    show(f"{skipped} of {total} pictures could not be read", sys.stderr)
  return 1 if skipped else 0


def guess(
  backbone: Backbone,
  slots: Slots,
  pictures: Sequence[np.ndarray],
  *,
  batch_size: int,
  top: int,
  original: bool = False,
) -> list[Guesses]:
  """Runs all tasks on pictures, in one pass.

  Args:
    backbone: of the tasks.
    slots: the tasks, from `inference.fill_slots`.
    pictures: float32 (s, s, 3) in [-1, 1], at most `batch_size` of them.
    batch_size: what the batch is filled up to, so that nothing is compiled
      again for the last one.
    top: guesses per task, fewer where it has fewer classes.
    original: whether to add the outputs of the backbone's own head, under the
      name "backbone".

  Returns:
    The guesses for each picture.

  Raises:
    TaskError: for outputs that are not finite.
  """
  if not pictures:
    return []
  size = backbone.config.image_size
  images = np.zeros((batch_size, size, size, 3), np.float32)
  images[: len(pictures)] = pictures
  # `pictures` has scaled them.
  outputs = inference.forward(backbone, slots, images, check=False)
  names = {spec.name: spec.class_names for spec in slots.specs}
  if original:
    names = {task_sets.BACKBONE: (), **names}
  probabilities = {
    name: softmax(np.asarray(outputs[name])[: len(pictures)], name)
    for name in names
  }
  return [
    {name: _best(probabilities[name][i], names[name], top) for name in names}
    for i in range(len(pictures))
  ]


def softmax(logits: np.ndarray, name: str) -> np.ndarray:
  """Logits (b, c) of the task `name` -> probabilities, float64 (b, c).

  Raises:
    TaskError: for logits that are not finite.
  """
  if not np.isfinite(logits).all():
    raise TaskError(
      f"the outputs of {name!r} are not finite: its weights, or those of the "
      "backbone, cannot be used."
    )
  logits = logits.astype(np.float64)
  shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return shares / shares.sum(axis=-1, keepdims=True)


def _best(
  probabilities: np.ndarray, class_names: Sequence[str], top: int
) -> list[Guess]:
  """The most probable of probabilities (c,); of equal ones the first."""
  order = np.argsort(-probabilities, kind="stable")[:top]
  return [
    Guess(
      class_name=class_names[i] if class_names else str(i),
      index=int(i),
      probability=float(probabilities[i]),
    )
    for i in order
  ]


def _show_guesses(path: str, guesses: Guesses, as_json: bool) -> None:
  show(_json_line(path, guesses) if as_json else _text(path, guesses))


def _show_unreadable(path: str, reason: str, as_json: bool) -> None:
  show(f"skipped {escaped(path)}: {escaped(reason)}", sys.stderr)
  if as_json:
    show(json.dumps({"image": path, "error": reason}))


def _json_line(path: str, guesses: Guesses) -> str:
  """The original outputs stand beside the tasks: they are none of them."""
  tasks = {name: _plain(found) for name, found in guesses.items()}
  line: dict[str, Any] = {"image": path}
  original = task_sets.BACKBONE
  if original in tasks:
    line[original] = tasks.pop(original)
  return json.dumps({**line, "tasks": tasks})


def _plain(found: Sequence[Guess]) -> list[dict[str, Any]]:
  return [
    {"class": g.class_name, "index": g.index, "probability": g.probability}
    for g in found
  ]


def _text(path: str, guesses: Guesses) -> str:
  """The path, and one line for each guess: task, class, probability."""
  task_width = max(map(len, guesses))
  found = itertools.chain.from_iterable(guesses.values())
  class_width = max(len(escaped(g.class_name)) for g in found)
  lines = [escaped(path)]
  for name, best in guesses.items():
    for i, g in enumerate(best):
      task = (name if i == 0 else "").ljust(task_width)
      class_name = escaped(g.class_name).ljust(class_width)
      percent = f"{100 * g.probability:5.1f} %"
      lines.append(f"  {task}  {class_name}  {percent}")
  return "\n".join(lines)


if __name__ == "__main__":
  commands.leave_current_directory()
  sys.exit(main())
