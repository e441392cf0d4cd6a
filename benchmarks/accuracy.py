"""Compare the accuracy of our regimes, LoRA by PEFT and full fine-tuning.

  python -m benchmarks.accuracy [--data=glyphs:inverted] [--data_dir=DIR]
    [--backbone=glyphs] [--rows head memory_masked ...] [--rates 0.1 0.3 ...]
    [--seeds=5] [--steps=500] [--per_class=0] [--json=FILE] [--page=FILE]

Runs in the environment of `make exchange`. Every row is trained for the same
steps on the same images, by SGD with the same schedule and clipping. Its
learning rate is the best on validation with the first seed; further seeds use
it. Differences are paired, over test images and seeds.

Prints a table, and writes it into --page: docs/reference/comparison.md, which
explains the rows.
"""

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memory_vit as mv
from benchmarks.compared import lora
from benchmarks.compared.lora import Split, Trained
from memory_vit.data import datasets
from memory_vit.data.batching import eval_images
from memory_vit.data.split_ref import SplitRef
from memory_vit.evaluation.hits import Hits, paired_difference, read_hits
from memory_vit.model.regimes import get_regime
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.tables import markdown_table

# Row -> learning rates.
ROWS = {
  "head": (0.3, 1.0),
  "cls_masked": (0.3, 1.0),
  "memory_masked": (0.3, 1.0),
  "norms_layers_masked": (0.3, 1.0),
  "side_masked": (0.5, 1.0),
  "adapter": (0.1, 0.3, 1.0),
  "lora4": (0.1, 0.3, 1.0),
  "lora8": (0.1, 0.3, 1.0),
  "full": (0.1, 0.3),
}
_NAMES = {"lora4": "LoRA of rank 4, PEFT", "lora8": "LoRA of rank 8, PEFT"}
_BASE = "side_masked"
_SPLITS = {"train": "train[:90%]", "validation": "train[90%:]", "test": "test"}
_BATCH, _STEPS = 64, 500
# The table of a page is between these.
_BEGINS, _ENDS = "<!-- accuracy -->", "<!-- end of accuracy -->"


@dataclasses.dataclass(frozen=True)
class Setting:
  """Backbone and data of all rows; `folder` is the backbone in HF format."""

  backbone: mv.Backbone
  folder: Path
  splits: dict[str, Split]
  classes: int
  steps: int


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Train every row with every seed, and print a table; returns --json."""
  arguments = _arguments(argv)
  if arguments.page:
    with_table(arguments.page.read_text(encoding="utf-8"), "")
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / "hf"
    backbone = mv.load_backbone(arguments.backbone)
    mv.save_backbone(backbone, folder, format="hf")
    splits, classes = _read(arguments, backbone)
    setting = Setting(backbone, folder, splits, classes, arguments.steps)
    rows = {}
    for row in arguments.rows:
      rates = arguments.rates or ROWS[row]
      rows[row] = _measure(setting, row, rates, arguments)
      print(row, without_hits(rows[row]), flush=True)
  result = {
    "data": arguments.data,
    "per_class": arguments.per_class,
    "steps": arguments.steps,
    "seeds": arguments.seeds,
    "jax": jax.__version__,
    "rows": {
      row: without_hits(found) | _difference(found, rows.get(_BASE))
      for row, found in rows.items()
    },
  }
  shown = table(result)
  print(shown)
  if arguments.json:
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
  if arguments.page:
    text = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(with_table(text, shown), encoding="utf-8")
  return result


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--backbone", default="glyphs")
  add("--data", default="glyphs:inverted", help="a data set, as data.name")
  add("--data_dir", default="", help="its directory, as data.dir")
  add("--per_class", type=int, default=0, help="training images of each class; "
      "0 for all")  # fmt: skip
  add("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
  add("--rates", nargs="+", type=float, help="learning rates of every row")
  add("--seeds", type=int, default=5)
  add("--steps", type=int, default=_STEPS)
  add("--json", type=Path, help="file for the numbers")
  add("--page", type=Path, help="file of Markdown whose table is replaced")
  return parser.parse_args(argv)


def _read(
  arguments: argparse.Namespace, backbone: mv.Backbone
) -> tuple[dict[str, Split], int]:
  """All images of the task, as inputs of the backbone."""
  stated = EvalPreprocessing(image_size=backbone.config.image_size)
  preprocessing = backbone.preprocessing or stated
  splits = {}
  for role, split in _SPLITS.items():
    ref = SplitRef(arguments.data, arguments.data_dir, split, download=False)
    reader = datasets.open_ref(ref)
    images = eval_images(reader, preprocessing, range(reader.size))
    labels = [int(reader.source.read(i)[1]) for i in range(reader.size)]
    splits[role] = Split(images, np.array(labels, np.int32))
  return splits, reader.num_classes


def _few(split: Split, per_class: int, seed: int) -> Split:
  """`per_class` images of each class; 0 is all."""
  if not per_class:
    return split
  rng = np.random.default_rng(seed)
  chosen = np.concatenate([
    rng.permutation(np.flatnonzero(split.labels == label))[:per_class]
    for label in np.unique(split.labels)
  ])  # fmt: skip
  return Split(split.images[chosen], split.labels[chosen])


def _measure(
  setting: Setting,
  row: str,
  rates: Sequence[float],
  arguments: argparse.Namespace,
) -> dict[str, Any]:
  """Choose the learning rate with the first seed, and train with all."""
  began = time.perf_counter()

  def train(rate: float, seed: int) -> Trained:
    train = _few(setting.splits["train"], arguments.per_class, seed)
    some = dataclasses.replace(
      setting, splits={**setting.splits, "train": train}
    )
    if row.startswith("lora"):
      return lora.train(
        some.folder, some.splits, rank=int(row[4:]), classes=some.classes,
        learning_rate=rate, steps=some.steps, batch=_BATCH, seed=seed,
      )  # fmt: skip
    return _train_ours(some, row, rate, seed)

  first = {rate: train(rate, 0) for rate in rates}
  # Of equal accuracies the one with the lower loss.
  best = max(
    first, key=lambda rate: (first[rate].validation, -first[rate].loss)
  )
  found = [first[best]]
  found += [train(best, seed) for seed in range(1, arguments.seeds)]
  return {
    "parameters": found[0].parameters - _head_of(setting),
    "rate": best,
    # One of two learning rates is always at an end.
    "at_an_end": len(rates) > 2 and best in (min(rates), max(rates)),
    "validation": {str(rate): each.validation for rate, each in first.items()},
    "accuracies": [float(each.right.mean()) for each in found],
    "seconds": round(time.perf_counter() - began),
    "right": [each.right for each in found],
  }


def _head_of(setting: Setting) -> int:
  return (setting.backbone.config.width + 1) * setting.classes


def _train_ours(
  setting: Setting, regime: str, rate: float, seed: int
) -> Trained:
  """Train by `mv.train_task`, with cached outputs if possible."""
  pixels = {
    role: (np.round((split.images + 1) * 127.5).astype(np.uint8), split.labels)
    for role, split in setting.splits.items()
  }
  options: dict[str, Any] = {
    "total_steps": setting.steps, "eval_every": setting.steps,
    "checkpoint_every": setting.steps, "data.train_crop": "resize",
    "data.flip": False, "log_images": 0,
  }  # fmt: skip
  kind = get_regime(regime)
  if kind.shares_pass:
    options["cache.what"] = "features" if kind.on_features else "contexts"
  with tempfile.TemporaryDirectory() as workdir:
    result = mv.train_task(
      setting.backbone,
      pixels["train"],
      validation=pixels["validation"],
      test=pixels["test"],
      name="task",
      class_names=[str(i) for i in range(setting.classes)],
      regime=regime,
      learning_rate=rate,
      batch_size=_BATCH,
      seed=seed,
      options=options,
      workdir=workdir,
      progress=False,
    )
    found = read_hits(Path(workdir))
    assert found is not None
    (hits,) = found.values()
  (trial,) = result.trials
  accuracy, loss = trial.val.accuracy, trial.val.loss
  assert accuracy is not None
  assert loss is not None
  return Trained(trial.trainable_params, accuracy, loss, hits.right)


def _difference(
  row: dict[str, Any], base: dict[str, Any] | None
) -> dict[str, float]:
  """The paired difference from the base, in points, and its error."""
  if base is None or row is base:
    return {}
  first, second = (
    [Hits(right, np.ones_like(right)) for right in each["right"]]
    for each in (row, base)
  )
  pair = paired_difference(first, second)
  assert pair is not None
  error = math.hypot(pair.over_images, pair.over_seeds or 0.0)
  return {"difference": 100 * pair.difference, "error": 100 * error}


def without_hits(row: dict[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in row.items() if key != "right"}


def table(result: dict[str, Any]) -> str:
  """The rows as Markdown."""
  header = (
    result["data"], "parameters beside the head",
    f"test, {result['seeds']} seeds", f"against `{_BASE}`", "rate",
  )  # fmt: skip
  rows = []
  for row, found in result["rows"].items():
    name = _NAMES.get(row, f"`{row}`")
    against = ""
    if "difference" in found:
      against = f"{found['difference']:+.1f} ± {found['error']:.1f}"
    end = "*" if found["at_an_end"] else ""
    rows.append(
      (
        name,
        f"{found['parameters']:,}",
        f"{100 * np.mean(found['accuracies']):.1f} %",
        against,
        f"{found['rate']:g}{end}",
      )
    )
  return markdown_table(header, rows)


def with_table(page: str, table: str) -> str:
  before, _, rest = page.partition(_BEGINS)
  _, ends, after = rest.partition(_ENDS)
  if not ends:
    raise SystemExit(f"the page has no {_BEGINS} ... {_ENDS}")
  return "\n".join([before + _BEGINS, "", table, "", _ENDS + after])


if __name__ == "__main__":
  main()
