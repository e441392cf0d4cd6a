"""Measure the predictor: requests, changes of tasks, a folder of images.

  python -m benchmarks.predictor [--variant=B/32] [--image_size=224]
    [--rounds=9] [--images=128] [--json=FILE]

Requests with 1 and 16 tasks are timed in turn with a plain forward pass of the
same batch, and reported as multiples of it. Under load, threads request one
image each without pause, for 16 tasks. A folder of generated JPEGs is predicted
in turn with and without prefetching of the next batch. Compilations are those
after the warm-up, while tasks are added, replaced and removed. Weights, tasks
and pixels are random; no result depends on them.
"""

import argparse
import functools
import io
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

import memory_vit as mv
from memory_vit.images import ImageReader, find_images
from memory_vit.runtime.tables import table
from memory_vit.tasks import inference

_BATCHES = (1, 8, 32)
_TASKS = (1, 16)
# Concurrent threads.
_CLIENTS = (1, 4, 16)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print a table, and write --json."""
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  key = jax.random.key(0)
  backbone = mv.random_backbone(
    arguments.variant, image_size=arguments.image_size, num_classes=10, key=key
  )
  tasks = [
    mv.init_task(
      jax.random.key(i), backbone, name=f"t{i}", num_classes=100, cells=5
    )
    for i in range(max(_TASKS) + 2)
  ]
  predictors = {
    count: mv.Predictor.from_model(
      backbone, tasks[:count], batch_sizes=_BATCHES, slots=count
    )
    for count in _TASKS
  }
  rounds = arguments.rounds
  result = {
    "cpus": os.cpu_count(),
    "variant": arguments.variant,
    "image_size": arguments.image_size,
    "device": jax.devices()[0].device_kind,
    "requests": _requests(backbone, predictors, rounds),
    "load": [_load(predictors[max(_TASKS)], n, rounds) for n in _CLIENTS],
    "changes": _changes(backbone, tasks),
    "folder": _folder(predictors[1], arguments.images, rounds),
  }
  _show(result)
  if arguments.json:
    pathlib.Path(arguments.json).write_text(json.dumps(result, indent=2))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.predictor", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", default="B/32")
  add("--image_size", type=int, default=224)
  add("--rounds", type=int, default=9)
  add("--images", type=int, default=128, help="JPEGs in the folder")
  add("--json", help="file for the numbers")
  return parser.parse_args(argv)


def _requests(
  backbone: mv.Backbone, predictors: Mapping[int, mv.Predictor], rounds: int
) -> list[dict[str, Any]]:
  """Requests as multiples of a plain forward pass, by batch and tasks."""
  side = backbone.config.image_size
  rng = np.random.default_rng(0)
  rows = []
  for size in _BATCHES:
    pixels = rng.uniform(-1, 1, (size, side, side, 3)).astype(np.float32)
    images = jnp.asarray(pixels)

    def plain(images: jax.Array = images) -> Any:
      return jax.block_until_ready(
        inference.plain_program(
          backbone.for_programs, images, config=backbone.config
        )
      )

    ways: dict[str, Callable[[], Any]] = {"plain": plain}
    for count, predictor in predictors.items():
      ways[f"{count} tasks"] = functools.partial(
        predictor.predict_pixels, pixels
      )
    seconds = _seconds(ways, rounds)
    for count in predictors:
      rows.append(
        {
          "batch": size,
          "tasks": count,
          **_ratio(seconds[f"{count} tasks"], seconds["plain"]),
        }
      )
  return rows


def _load(predictor: mv.Predictor, clients: int, rounds: int) -> dict[str, Any]:
  """Requests of one image from several threads at once."""
  side = predictor.preprocessing.image_size
  pixels = np.zeros((1, side, side, 3), np.float32)

  def ask(_: int) -> float:
    began = time.perf_counter()
    predictor.predict_pixels(pixels)
    return time.perf_counter() - began

  with ThreadPoolExecutor(clients) as threads:
    list(threads.map(ask, range(clients)))  # starts the threads
    began = time.perf_counter()
    latencies = list(threads.map(ask, range(10 * clients * rounds)))
    seconds = time.perf_counter() - began
  half, most = np.quantile(latencies, [0.5, 0.95])
  return {
    "clients": clients,
    "requests_per_second": round(len(latencies) / seconds, 1),
    "seconds_median": round(float(half), 5),
    "seconds_95_percent": round(float(most), 5),
  }


def _seconds(
  ways: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Seconds of each program, in turn, without a first round."""
  seconds: dict[str, list[float]] = {name: [] for name in ways}
  for way in ways.values():
    way()
  for _ in range(rounds):
    for name, way in ways.items():
      began = time.perf_counter()
      way()
      seconds[name].append(time.perf_counter() - began)
  return seconds


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
  """Median and quartiles of the ratios of the rounds."""
  low, middle, high = np.quantile(
    np.asarray(ours) / np.asarray(theirs), [0.25, 0.5, 0.75]
  )
  return {
    "ratio": round(float(middle), 3),
    "low": round(float(low), 3),
    "high": round(float(high), 3),
  }


def _changes(backbone: mv.Backbone, tasks: Sequence[mv.Task]) -> dict[str, Any]:
  """Compilations after the warm-up, and seconds of a change."""
  predictor = mv.Predictor.from_model(
    backbone, tasks[:1], batch_sizes=_BATCHES[:1], slots=16
  )
  side = backbone.config.image_size
  pixels = np.zeros((1, side, side, 3), np.float32)
  seconds = []
  for task in tasks[1:16]:
    for change in (
      lambda t=task: predictor.add(t),
      lambda t=task: predictor.replace(t.name, tasks[16]),
      lambda t=task: predictor.remove(t.name),
      lambda t=task: predictor.add(t),
    ):
      began = time.perf_counter()
      change()
      seconds.append(time.perf_counter() - began)
      predictor.predict_pixels(pixels)
  inside = predictor.compilations
  grown = predictor.add(tasks[16])  # beyond the last slot
  return {
    "changes": len(seconds),
    "compilations": inside,
    "seconds_of_a_change": round(float(np.median(seconds)), 4),
    "compilations_when_it_grows": grown.compiled,
  }


def _folder(
  predictor: mv.Predictor, images: int, rounds: int
) -> dict[str, Any]:
  """Images per second of a folder, with and without prefetching."""
  with tempfile.TemporaryDirectory() as scratch:
    _draw(pathlib.Path(scratch), images)
    ways = {
      name: lambda ahead=ahead: _predict_folder(predictor, scratch, ahead)
      for name, ahead in (("in_turn", False), ("ahead", True))
    }
    seconds = _seconds(ways, rounds)
  found = {
    f"images_per_second_{name}": round(images / float(np.median(s)), 1)
    for name, s in seconds.items()
  }
  speedup = _ratio(seconds["in_turn"], seconds["ahead"])
  return {"images": images, **found, "ahead_over_in_turn": speedup}


def _predict_folder(predictor: mv.Predictor, folder: str, ahead: bool) -> None:
  """The loop of the command `predict`, without its output."""
  preprocessing = predictor.preprocessing
  reader = ImageReader(
    2048, _BATCHES[-1], preprocessing.image_size, ahead=int(ahead)
  )
  for batch in reader.read_files(find_images([folder]), preprocessing):
    pixels = [image.pixels for image in batch if image.pixels is not None]
    predictor.predict_pixels(np.stack(pixels)).top("t0")


def _draw(folder: pathlib.Path, count: int) -> None:
  """Generate JPEGs of 500 x 375 pixels: a ramp, noise, and ellipses."""
  rng = np.random.default_rng(0)
  ramp = np.linspace(0, 160, 500)[None, :, None]
  for i in range(count):
    pixels = ramp + rng.integers(0, 64, (375, 500, 3))
    image = Image.fromarray(pixels.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(8):
      x, y = int(rng.integers(400)), int(rng.integers(300))
      draw.ellipse((x, y, x + 90, y + 60), fill=tuple(rng.integers(0, 255, 3)))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    (folder / f"{i:05}.jpg").write_bytes(file.getvalue())


def _show(result: Mapping[str, Any]) -> None:
  rows = [
    (
      str(row["batch"]),
      str(row["tasks"]),
      f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
    )
    for row in result["requests"]
  ]
  print(table(("batch", "tasks", "plain forward passes"), rows))
  for row in result["load"]:
    print(", ".join(f"{key} {value}" for key, value in row.items()))
  for part in ("changes", "folder"):
    for key, value in result[part].items():
      print(f"{key:32} {value}")


if __name__ == "__main__":
  main()
