"""Compare scores that tell images of no known class, on the test bed.

  python -m benchmarks.unknown_images [--backbone=glyphs]
    [--data=glyphs:inverted]
    [--data_dir=DIR] [--seeds=5] [--steps=500] [--page=FILE]

With each seed a third of the classes, chosen at random, is left out of
training. A score is good if it is lower for their test images, or for noise,
than for test images of known classes: the table has the area under the ROC
curve (0.5 is chance), its mean over the seeds and the standard error of that.

Prints a table, and writes it into --page: docs/probabilities.md, which explains
it.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import sklearn.metrics

import memory_vit as mv
from benchmarks.closed_heads import standard_error, write_table
from memory_vit.data import datasets
from memory_vit.data.batching import eval_images
from memory_vit.data.split_ref import SplitRef
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.tables import markdown_table

ROWS = ("lda", "ridge", "head", "side_masked")
# {name: the score of logits (n, c)}.
SCORES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
  "largest logit": lambda logits: logits.max(axis=1),
  "energy": lambda logits: scipy.special.logsumexp(logits, axis=1),
  "largest probability": lambda logits: scipy.special.softmax(
    logits, axis=1
  ).max(axis=1),
}
UNKNOWN = ("unseen classes", "noise")
_RATE, _BATCH = 0.3, 64


def main(argv: Sequence[str] | None = None) -> str:
  """Train every row with every seed; returns the table."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.unknown_images",
    description=__doc__.split("\n")[0],
  )
  add = parser.add_argument
  add("--backbone", default="glyphs")
  add("--data", default="glyphs:inverted", help="a data set, as data.name")
  add("--data_dir", default="", help="its directory, as data.dir")
  add("--seeds", type=int, default=5)
  add("--steps", type=int, default=500)
  add("--page", type=Path, help="a page with the table")
  arguments = parser.parse_args(argv)
  backbone = mv.load_backbone(arguments.backbone)
  splits = {
    split: _read(arguments, split, backbone) for split in ("train", "test")
  }
  areas: dict[tuple[str, str, str], list[float]] = {}
  for seed in range(arguments.seeds):
    for key, area in _areas(backbone, splits, seed, arguments.steps):
      areas.setdefault(key, []).append(area)
  rows = [
    (f"`{row}`", *(
      f"{100 * statistics.mean(found):.1f} ± {100 * standard_error(found):.1f}"
      for found in (areas[row, what, score] for what in UNKNOWN
                    for score in SCORES)
    ))
    for row in ROWS
  ]  # fmt: skip
  header = [
    "area under the ROC curve, %",
    *(f"{what}: {score}" for what in UNKNOWN for score in SCORES),
  ]
  table = markdown_table(header, rows)
  print(table)
  if arguments.page:
    write_table(arguments.page, "unknown images", table)
  return table


def _read(
  arguments: argparse.Namespace, split: str, backbone: mv.Backbone
) -> tuple[np.ndarray, np.ndarray]:
  """Pixels uint8 (n, side, side, 3), and classes."""
  ref = SplitRef(arguments.data, arguments.data_dir, split, download=False)
  source = datasets.open_ref(ref)
  stated = EvalPreprocessing(image_size=backbone.config.image_size)
  images = eval_images(
    source, backbone.preprocessing or stated, range(source.size)
  )
  labels = [int(source.source.read(i)[1]) for i in range(source.size)]
  return np.round((images + 1) * 127.5).astype(np.uint8), np.array(labels)


def _areas(
  backbone: mv.Backbone,
  splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
  seed: int,
  steps: int,
) -> list[tuple[tuple[str, str, str], float]]:
  """The area of each row, kind of unknown images, and score."""
  rng = np.random.default_rng(seed)
  classes = int(splits["train"][1].max()) + 1
  known = rng.permutation(classes)[: classes - classes // 3]
  place = np.full(classes, -1)
  place[known] = np.arange(len(known))
  images, labels = splits["test"]
  seen = place[labels] >= 0
  noise = rng.integers(0, 256, images[:500].shape).astype(np.uint8)
  groups = {"known": images[seen], UNKNOWN[0]: images[~seen], UNKNOWN[1]: noise}
  images, labels = splits["train"]
  used = place[labels] >= 0
  data = images[used], place[labels[used]]
  found = []
  for row in ROWS:
    task = _task(backbone, data, row, seed, steps)
    logits = {
      name: np.concatenate([
        np.asarray(mv.forward(backbone, task, part / 127.5 - 1.0)[task.name])
        for part in np.array_split(group, math.ceil(len(group) / 256))
      ])
      for name, group in groups.items()
    }  # fmt: skip
    for what in UNKNOWN:
      for score, of in SCORES.items():
        of_known, of_unknown = of(logits["known"]), of(logits[what])
        area = sklearn.metrics.roc_auc_score(
          [1] * len(of_known) + [0] * len(of_unknown),
          np.concatenate([of_known, of_unknown]),
        )
        found.append(((row, what, score), float(area)))
  return found


def _task(
  backbone: mv.Backbone, data: Any, row: str, seed: int, steps: int
) -> mv.Task:
  options: dict[str, Any] = {
    "name": row, "batch_size": _BATCH, "seed": seed, "progress": False
  }  # fmt: skip
  if row in ("lda", "ridge"):
    return mv.fit_head(backbone, data, method=row, **options).task
  cached = "features" if row == "head" else "contexts"
  options["options"] = {
    "total_steps": steps, "data.flip": False, "data.train_crop": "resize",
    "cache.what": cached,
  }  # fmt: skip
  return mv.train_task(
    backbone, data, regime=row, learning_rate=_RATE, **options
  ).task


if __name__ == "__main__":
  main()
