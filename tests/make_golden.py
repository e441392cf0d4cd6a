"""Writes files of the current format, with what they compute.

  PYTHONPATH=. python tests/make_golden.py

`tasks/test_old_tasks.py` loads them ever after. A directory is written once:
that of a format that has been used by anybody is never written again.
"""

import sys
from pathlib import Path

import numpy as np
from conftest import random_task, tiny_backbone
from kinds_of_tasks import tasks_of_kinds

import memory_vit as mv
from memory_vit.tasks.manifest import FORMAT_VERSION

DATA = Path(__file__).parent / "golden"


def main() -> None:
  root = DATA / f"format_{FORMAT_VERSION}"
  if root.exists():
    sys.exit(f"{root} is there, and stays as it is.")
  backbone = tiny_backbone(num_classes=5)
  pets = random_task(backbone, "pets", class_names=("cat", "dog", "日"))
  birds = random_task(backbone, "birds", seed=1, cells=1, attends_to=[pets])
  mv.save_backbone(backbone, root / "backbone.npz")
  _, *others = tasks_of_kinds(backbone)
  tasks = [pets, birds, *others]
  mv.save_tasks(tasks, root / "tasks")
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
  logits = mv.forward(backbone, tasks, images)
  np.savez(root / "expected.npz", images=images, **logits)


if __name__ == "__main__":
  main()
