"""Measure memory_vit: `python -m benchmarks.compared.memory_vit FOLDER`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from benchmarks import workloads
from benchmarks.compared import rounds
from benchmarks.compared import setting as settings


def main(folder: Path) -> None:
  """Time the backbone in `folder/backbone.npz`."""
  setting = settings.Setting.read(folder)
  backbone = mv.load_backbone(str(folder / "backbone.npz"))
  few, most = min(setting.tasks), max(setting.tasks)
  tasks = [random_task(backbone, setting, i) for i in range(most)]
  images, labels = settings.images(folder), settings.labels(folder)
  model = workloads.Setting(
    backbone, tasks[0], *jax.device_put((images, labels))
  )
  together = _inference(model, tasks)()
  file = folder / "task.safetensors"
  mv.save_task(model.task, file, format="safetensors")
  rounds.hand_over(
    name="memory_vit",
    version=mv.__version__,
    runs_on=f"jax {jax.__version__}",
    parameters=sum(leaf.size for leaf in jax.tree.leaves(model.task.params)),
    file_bytes=file.stat().st_size,
    outputs_spread=rounds.spread(together.values()),
    original_difference=rounds.difference(
      together["backbone"], workloads.plain(model)
    ),
    task_difference=rounds.difference(
      together["t0"], _inference(model, tasks[:few])()["t0"]
    ),
    task_difference_same_slots=rounds.difference(
      together["t0"], _inference(model, tasks[:few], slots=most)()["t0"]
    ),
    **rounds.measure(
      _programs(model, tasks, setting), setting.rounds, setting.clock
    ),
  )


def random_task(
  backbone: mv.Backbone, setting: settings.Setting, number: int
) -> mv.Task:
  """A random task; a new head is zero, so its outputs would say nothing."""
  key, head_key = jax.random.split(jax.random.key(number))
  task = mv.init_task(
    key,
    backbone,
    name=f"t{number}",
    num_classes=setting.classes,
    cells=setting.cells,
    cls_init="normal",
  )
  kernel = task.params["head"]["kernel"]
  head = {
    **task.params["head"],
    "kernel": 0.02 * jax.random.normal(head_key, kernel.shape),
  }
  return dataclasses.replace(task, params={**task.params, "head": head})


def _programs(
  model: workloads.Setting,
  tasks: Sequence[mv.Task],
  setting: settings.Setting,
) -> rounds.Programs:
  side = workloads.with_regime(model, "side_masked")
  programs: rounds.Programs = {
    rounds.FORWARD: lambda: workloads.plain(model),
    "train": workloads.training(model, 1),
    "train_kept": workloads.cached_training(model, 1, "device"),
    "train_side": workloads.training(side, 1),
    "train_side_kept": workloads.cached_training(side, 1, "device"),
    "train_all_weights": workloads.full_finetuning(model),
  }
  for count in setting.tasks:
    programs[f"infer_{count}"] = _inference(model, tasks[:count])
    programs[f"infer_side_{count}"] = workloads.inference(side, count)
  return {name: _waited(program) for name, program in programs.items()}


def _inference(
  model: workloads.Setting, tasks: Sequence[mv.Task], slots: int = 0
) -> Callable[[], dict[str, jax.Array]]:
  """The original model and tasks on the batch, in at least `slots` slots."""
  filled = mv.fill_slots(model.backbone, tasks, slots=slots)
  return lambda: mv.forward(model.backbone, filled, model.images)


def _waited(program: Any) -> Any:
  return lambda: jax.block_until_ready(program())


if __name__ == "__main__":
  main(Path(sys.argv[1]))
