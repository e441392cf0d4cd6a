"""What a run leaves: tasks that know how good they are."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memory_vit.backbones.load import save_backbone
from memory_vit.config import Config, to_dict
from memory_vit.data.reader import Reader
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.runtime import files, processes
from memory_vit.tasks import store
from memory_vit.training.sweep import Variant
from memory_vit.training.trainer import Learned, Learner

# See `download.replacing` and `processes.require_shared`.
_BEGUN = re.compile(r"\..+\.npz\.[0-9a-f]{8}\.part|\.seen-by-all-[0-9a-f]{16}")


def with_metrics(
  learner: Learner,
  variants: Sequence[Variant],
  learned: Sequence[Learned],
  tested: Reader | None,
) -> list[Task]:
  """Tasks with how they were made and how good they are; the best comes first.

  In their metrics, "steps" is how long a task was trained, "best_step" when it
  was as it is, and "skipped_updates" how many were not finite.

  Args:
    learner: that learned them.
    variants: of all passes.
    learned: the passes.
    tested: the test split, or None.
  """
  by_name = {variant.name: variant for variant in variants}
  tasks = []
  for part in learned:
    tests = {}
    if tested and part.tasks:
      tests = learner.evaluate(list(part.tasks.values()), tested)
    for name, task in part.tasks.items():
      variant, best = by_name[name], part.best[name]
      metrics = _metrics(variant, task, tests.get(name))
      metrics |= {
        "best_step": best.step,
        "val_accuracy": best.accuracy,
        "skipped_updates": part.skipped.get(name, 0),
      }
      made = {"config": to_dict(variant.config), "metrics": metrics}
      tasks.append(dataclasses.replace(task, provenance=made))
  return sorted(
    tasks, key=lambda t: -(t.provenance["metrics"]["val_accuracy"] or 0.0)
  )


def _metrics(
  variant: Variant, task: Task, test: dict[str, Any] | None
) -> dict[str, Any]:
  """An entry of `result.json`."""
  config = variant.config
  return {
    "name": task.spec.name,
    "regime": config.regime,
    "cells": task.spec.cells,
    "learning_rate": config.learning_rate,
    "seed": config.seed,
    "varied": dict(variant.varied),
    "steps": config.total_steps,
    "trainable_params": trees.count(task.params),
    "test_accuracy": test and test["top1"],
    "test_examples": test["examples"] if test else 0,
    "test_skipped": test["skipped"] if test else 0,
    "test_loss": test and test["loss"],
    "test_top5": test and test["top5"],
    "test_per_class": test and test["per_class"],
    # What who guesses gets right: any class, and always the largest one.
    "chance": 1 / task.spec.num_classes,
    "test_majority": test and test["majority"],
    "exported": None,
  }


def export(
  config: Config,
  name: str,
  tasks: Sequence[Task],
  workdir: Path,
  backbone: Backbone,
) -> list[Task]:
  """Writes the best task under its name, and the others where that is asked.

  One process writes; all read.

  Args:
    config: of the run.
    name: of the best.
    tasks: from `with_metrics`; where they lie is noted in their metrics.
    workdir: of the run; they are written to tasks/.
    backbone: of the tasks.

  Returns:
    What was written, read back as everybody else will read it.
  """
  wanted = [(name, tasks[0])]
  if config.sweep.is_on and config.sweep.export == "all":
    wanted += [(task.spec.name, task) for task in tasks]
  exported = []
  for new_name, task in wanted:
    where, metrics = f"tasks/{new_name}", task.provenance["metrics"]
    # In the result, of the best: the name without a number.
    metrics["exported"] = metrics["exported"] or where
    made = {
      "config": task.provenance["config"],
      "metrics": {**metrics, "name": new_name, "exported": where},
    }
    spec = dataclasses.replace(task.spec, name=new_name)
    save = functools.partial(
      _save, Task(spec, task.params, made), workdir / where
    )
    processes.by_first(save)
    exported.append(store.load_task(workdir / where, backbone))
  return exported


def tidy(workdir: Path) -> None:
  """Removes what runs that were killed had begun to write.

  Saved states are tidied where they are opened.

  Args:
    workdir: of a run that alone is using it.
  """
  with files.writing(workdir):
    store.tidy(workdir / "tasks")
    for path in workdir.glob(".*"):
      if _BEGUN.fullmatch(path.name) and path.is_file():
        path.unlink()


def _save(task: Task, path: Path) -> None:
  """Writes a task to where nothing else can be."""
  with files.writing(path, ValueError):  # orbax's
    store.save_task(task, path)


def save_model(task: Task, backbone: Backbone, path: Path) -> None:
  """Writes a task of the regime `full` as a ViT of its own.

  Args:
    task: holds a whole backbone, and a head.
    backbone: that it began as.
    path: of the .npz file, in the published layout.
  """
  config = dataclasses.replace(
    backbone.config, num_classes=task.spec.num_classes, representation_size=0
  )
  params = {**task.params["backbone"], "head": task.params["head"]}
  model = Backbone(config, params, trees.fingerprint(params))
  processes.by_first(functools.partial(save_backbone, model, path))
