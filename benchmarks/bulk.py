"""Measure images per second of bulk predictions into Parquet.

  python -m benchmarks.bulk [--variant=S/16] [--side=224] [--images=128]
    [--batch=32] [--tasks=4] [--rounds=3] [--json=FILE]

Times three programs in turn, round by round, on the same generated JPEGs of
500 x 375 pixels: `run_bulk` in this process; a plain loop (decode a batch one
image at a time, run the model, append logits to a list); and the model alone,
on preprocessed images. The backbone has random weights.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

import memory_vit as mv
from memory_vit.bulk.predictions import PredictionJob
from memory_vit.bulk.run import run_bulk
from memory_vit.prediction.config import PredictorConfig


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print a table, and write --json."""
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  with tempfile.TemporaryDirectory() as scratch:
    result = _measure(pathlib.Path(scratch), arguments)
  for key, value in result.items():
    print(f"{key:32} {value}")
  if arguments.json:
    pathlib.Path(arguments.json).write_text(json.dumps(result, indent=2))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.bulk", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", default="S/16")
  add("--side", type=int, default=224)
  add("--images", type=int, default=128)
  add("--batch", type=int, default=32)
  add("--tasks", type=int, default=4)
  add("--rounds", type=int, default=3)
  add("--json", help="file for the numbers")
  return parser.parse_args(argv)


def _measure(
  root: pathlib.Path, arguments: argparse.Namespace
) -> dict[str, Any]:
  images = _draw(root / "images", arguments.images)
  key = jax.random.key(0)
  backbone = mv.random_backbone(
    arguments.variant, image_size=arguments.side, key=key
  )
  mv.save_backbone(backbone, root / "backbone.npz")
  backbone = mv.load_backbone(root / "backbone.npz")
  tasks = [
    mv.init_task(key, backbone, name=f"task-{i}", num_classes=100)
    for i in range(arguments.tasks)
  ]
  mv.save_tasks(tasks, root / "tasks")
  config = PredictorConfig(
    backbone=str(root / "backbone.npz"),
    tasks=(str(root / "tasks"),),
    batch_sizes=(arguments.batch,),
  )
  model = PredictionJob(config, logits=True).open()
  slots = mv.fill_slots(backbone, tasks, slots=8, cells=8, classes=128)
  prepared = mv.preprocess(images[: arguments.batch], tasks)
  ways: dict[str, Callable[[int], Any]] = {
    "bulk": lambda i: run_bulk(
      _Opened(model, arguments.batch),
      [str(root / "images")],
      str(root / f"out-{i}"),
    ),
    "plain loop": lambda i: _plain(
      backbone, slots, tasks, images, arguments.batch
    ),
    "model alone": lambda i: [
      jax.block_until_ready(mv.forward(backbone, slots, prepared))
      for _ in range(-(-arguments.images // arguments.batch))
    ],
  }
  seconds: dict[str, list[float]] = {name: [] for name in ways}
  for i in range(arguments.rounds + 1):  # the first one compiles
    for name, run in ways.items():
      began = time.perf_counter()
      run(i)
      if i:
        seconds[name].append(time.perf_counter() - began)
  return _summary(seconds, arguments)


class _Opened:
  """A job whose model is already open, so that only images are timed."""

  def __init__(self, model: Any, batch_size: int) -> None:
    self.batch_size, self._model = batch_size, model

  def open(self) -> Any:
    return self._model


def _draw(folder: pathlib.Path, count: int) -> list[str]:
  """Generate JPEGs of 500 x 375 pixels: noise under ellipses."""
  folder.mkdir()
  rng = np.random.default_rng(0)
  paths = []
  for i in range(count):
    coarse = rng.integers(0, 256, (25, 33, 3), np.uint8)
    image = Image.fromarray(coarse).resize((500, 375))
    draw = ImageDraw.Draw(image)
    for x, y in rng.integers(0, 375, (20, 2)):
      draw.ellipse((x, y, x + 60, y + 40), outline=(int(x % 256), 90, 30))
    paths.append(str(folder / f"{i:05}.jpg"))
    image.save(paths[-1], quality=90)
  return paths


def _plain(
  backbone: mv.Backbone,
  slots: mv.Slots,
  tasks: Sequence[mv.Task],
  images: Sequence[str],
  batch: int,
) -> list[dict[str, np.ndarray]]:
  """The loop that a user would write by hand."""
  found = []
  for start in range(0, len(images), batch):
    paths = images[start : start + batch]
    pixels = np.stack([mv.preprocess(path, list(tasks)) for path in paths])
    out = mv.forward(backbone, slots, pixels)
    found.append({name: np.asarray(logits) for name, logits in out.items()})
  return found


def _summary(
  seconds: dict[str, list[float]], arguments: argparse.Namespace
) -> dict[str, Any]:
  """Images per second, and ratios of the rounds."""
  result: dict[str, Any] = {**vars(arguments), "cores": os.cpu_count()}
  for name, values in seconds.items():
    speed = arguments.images / statistics.median(values)
    result[f"{name}, images/s"] = round(speed, 1)
  plain = seconds["plain loop"]
  for name in ("bulk", "model alone"):
    ratios = [b / a for a, b in zip(seconds[name], plain, strict=True)]
    result[f"{name} over plain loop"] = [round(r, 2) for r in sorted(ratios)]
  return result


if __name__ == "__main__":
  main()
