"""Compare initial class tokens of a task on backbones without a class token.

  python -m benchmarks.first_token --workdir=DIR [--seeds=4]

The digits of scikit-learn, with micro ViTs that pool in three ways: from a
class token, by attention of a probe ("map"), by a mean ("gap"). Each learns 0
to 4; then 5 to 9 are learned with memory, with a class token initialized from
what the backbone pools with (`class_token.first_class_token`) and randomly, all
seeds in one pass. Prints the test accuracy: mean and standard deviation over
seeds.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.config import Config, SweepConfig
from memory_vit.model.backbone import init_backbone
from memory_vit.model.vit_config import RANDOM, vit_config
from memory_vit.train import run

_POOLING: dict[str, dict[str, Any]] = {
  "tok": {},
  "map": {"class_tokens": 0, "pooling": "map"},
  "gap": {"class_tokens": 0, "pooling": "gap"},
}
_STARTS = ("pretrained", "normal")


def main(argv: Sequence[str] | None = None) -> None:
  """Train the backbones and the tasks, and print a table."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.first_token",
    description=__doc__.split("\n")[0],
  )
  parser.add_argument("--workdir", required=True, type=Path)
  parser.add_argument("--seeds", type=int, default=4)
  arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
  print(f"{'pooling':8}" + "".join(f"{start:>18}" for start in _STARTS))
  for pooling in _POOLING:
    workdir = arguments.workdir / pooling
    found = accuracies(pretrained(pooling, workdir), workdir, arguments.seeds)
    cells = (
      f"{100 * statistics.mean(found[start]):.2f} +- "
      f"{100 * statistics.stdev(found[start]):.2f} %"
      for start in _STARTS
    )
    print(f"{pooling:8}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def settings(what: str = "") -> Config:
  return config_lib.from_dict(digits.get_config(what).to_dict())


def pretrained(pooling: str, workdir: Path) -> Path:
  """Train a micro ViT on the digits 0 to 4; returns its file."""
  config = settings("backbone")
  variant = config.backbone.removeprefix(RANDOM)
  vit = vit_config(variant, image_size=8, **_POOLING[pooling])
  first = workdir / "random.npz"
  mv.save_backbone(init_backbone(vit, jax.random.key(config.seed)), first)
  config = dataclasses.replace(config, backbone=str(first))
  run.train_and_evaluate(config, workdir / "backbone")
  return workdir / "backbone" / f"{config.task.name}.npz"


def accuracies(
  backbone: Path, workdir: Path, seeds: int
) -> dict[str, list[float]]:
  """Learn the digits 5 to 9; returns {start: accuracy of every seed}."""
  config = settings()
  starts = tuple({"task.cls_init": start} for start in _STARTS)
  result = run.train_and_evaluate(
    dataclasses.replace(
      config,
      backbone=str(backbone),
      sweep=SweepConfig(seed=tuple(range(seeds)), overrides=starts),
    ),
    workdir / "tasks",
  )
  found: dict[str, list[float]] = {start: [] for start in _STARTS}
  for task in result.tasks:
    assert task.test.accuracy is not None
    found[task.varied["task.cls_init"]].append(task.test.accuracy)
  return found


if __name__ == "__main__":
  main()
