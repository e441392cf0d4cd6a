"""Measure images per second of input pipelines for training and prediction.

  python -m benchmarks.input [--folder=DIR] [--size=224] [--crop=inception]
    [--rounds=5] [--json=FILE]

Six pipelines are timed in turn, round by round. For training: ours from files,
ours without TensorFlow from files in memory (as `mv.train_task` reads lists),
ours from decoded images in memory (`config.cache.what=images`), and plain
tf.data as a user would write it (read, decode, random crop, batch, autotuned).
For prediction, with images resized as in evaluation: plain tf.data, and the
reader of `predict`, bulk and the server, which does without TensorFlow. The
folder is SPLIT/CLASS/IMAGE, of which train is read; without one, crops of the
two photographs of scikit-learn are scaled to 500 x 375.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import sklearn.datasets
from PIL import Image

from memory_vit.config import DataConfig
from memory_vit.data import (
  batching,
  crop_sizes,
  datasets,
  image_ops,
  in_memory,
  random_decisions,
)
from memory_vit.data.decoded_images import cache_decoded
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split
from memory_vit.images import ImageReader, find_images
from memory_vit.model.task import EvalPreprocessing

_BATCH = 64


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print a table, and write --json."""
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  with tempfile.TemporaryDirectory() as scratch:
    folder = arguments.folder or _photographs(pathlib.Path(scratch))
    result = _measure(str(folder), arguments)
  for key, value in result.items():
    print(f"{key:32} {value}")
  if arguments.json:
    pathlib.Path(arguments.json).write_text(json.dumps(result, indent=2))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.input", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--folder")
  add("--size", type=int, default=224)
  add("--crop", default="inception", choices=("inception", "small"))
  add("--rounds", type=int, default=5)
  add("--batches", type=int, default=16, help="of 64, in a round")
  add("--json", help="file for the numbers")
  return parser.parse_args(argv)


def _photographs(root: pathlib.Path) -> pathlib.Path:
  """Write 128 JPEGs of 500 x 375 pixels, crops of two photographs."""
  rng = np.random.default_rng(0)
  folder = root / "train" / "photograph"
  folder.mkdir(parents=True)
  for i in range(128):
    whole = Image.fromarray(sklearn.datasets.load_sample_images().images[i % 2])
    x, y = int(rng.integers(200)), int(rng.integers(150))
    part = whole.crop((x, y, x + 400, y + 270)).resize((500, 375))
    part.save(folder / f"{i}.jpg", quality=92)
  return root


def _measure(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
  data = DataConfig(train_crop=arguments.crop)
  reader = datasets.open_split("folder", "train", folder)
  began = time.perf_counter()
  kept = cache_decoded(
    reader, crop_sizes.shorter_side(data.resize, arguments.size)
  )
  seconds = time.perf_counter() - began
  squeezed = EvalPreprocessing(image_size=arguments.size)
  files = [reader.file_name(i) for i in range(reader.size)]
  memory = in_memory.open_data(
    (files, reader.labels), "own", "train", reader.class_names
  )
  ways: dict[str, Callable[[], Iterator[Any]]] = {
    "files": lambda: _ours(reader, data, arguments.size),
    "memory": lambda: _ours(memory, data, arguments.size),
    "kept": lambda: _ours(kept, data, arguments.size),
    "plain_tf_data": lambda: _plain(
      folder,
      lambda encoded, uniforms: image_ops.train_image(
        encoded, uniforms, data=data, image_size=arguments.size
      ),
    ),
    "squeezed_tf_data": lambda: _plain(
      folder, lambda encoded, _: image_ops.eval_image(encoded, squeezed)
    ),
    "squeezed_reader": lambda: _read(folder, squeezed),
  }
  speeds: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(arguments.rounds):
    for name, way in ways.items():
      speeds[name].append(_speed(way(), arguments.batches))
  middle = {name: float(np.median(s)) for name, s in speeds.items()}
  return {
    "cpus": os.cpu_count(),
    "crop": arguments.crop,
    "image_size": arguments.size,
    "images": reader.size,
    "seconds_to_keep": round(seconds, 2),
    **{f"images_per_second_{n}": round(v, 1) for n, v in middle.items()},
    "kept_over_files": round(middle["kept"] / middle["files"], 2),
    "memory_over_files": round(middle["memory"] / middle["files"], 2),
    "kept_over_plain_tf_data": round(
      middle["kept"] / middle["plain_tf_data"], 2
    ),
    "reader_over_tf_data": round(
      middle["squeezed_reader"] / middle["squeezed_tf_data"], 2
    ),
  }


def _speed(batches: Iterator[Any], count: int) -> float:
  """Images per second of a pipeline that runs alone."""
  # More than were prefetched before the clock started.
  list(itertools.islice(batches, 4))
  start = time.perf_counter()
  list(itertools.islice(batches, count))
  seconds = time.perf_counter() - start
  if isinstance(batches, Generator):
    batches.close()
  return count * _BATCH / seconds


def _ours(
  reader: Split, data: DataConfig, size: int
) -> Iterator[dict[str, Any]]:
  return batching.train_batches(
    reader, data, image_size=size, batch_size=_BATCH, seed=0
  )


def _read(folder: str, preprocessing: EvalPreprocessing) -> Iterator[Any]:
  """Images by the reader without TensorFlow."""
  files = itertools.cycle(find_images([f"{folder}/train"]))
  reader = ImageReader(2048, _BATCH, preprocessing.image_size, ahead=1)
  for batch in reader.read_files(files, preprocessing):
    yield np.stack([i.pixels for i in batch if i.pixels is not None])


def _plain(
  folder: str, prepare: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> Iterator[Any]:
  """A pipeline of the same images and crops, written by hand."""

  def prepared(path: tf.Tensor) -> tf.Tensor:
    uniforms = tf.random.uniform((random_decisions.UNIFORMS,), dtype=tf.float64)
    return prepare(tf.io.read_file(path), uniforms)

  paths = tf.data.Dataset.list_files(f"{folder}/train/*/*")
  dataset = paths.shuffle(1024).repeat()
  dataset = dataset.map(prepared, num_parallel_calls=tf.data.AUTOTUNE)
  return dataset.batch(_BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


if __name__ == "__main__":
  main()
