"""Measure memory_vit: `python -m benchmarks.compared.memory_vit FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from benchmarks import workloads
from benchmarks.compared import rounds
from benchmarks.compared import setting as settings


def main(folder: Path) -> None:
  """Time it on the backbone in `folder/backbone.npz`."""
  setting = settings.Setting.read(folder)
  model = _workload(folder, setting)
  alone = workloads.plain(model)
  most = max(setting.tasks)
  together = workloads.inference(model, most)()
  few = workloads.inference(model, min(setting.tasks))()
  file = folder / "task.safetensors"
  mv.save_task(model.task, file, format="safetensors")
  rounds.hand_over(
    name="memory_vit",
    version=mv.__version__,
    runs_on=f"jax {jax.__version__}",
    parameters=sum(leaf.size for leaf in jax.tree.leaves(model.task.params)),
    file_bytes=file.stat().st_size,
    original_difference=rounds.difference(together["backbone"], alone),
    task_difference=rounds.difference(together["t0"], few["t0"]),
    **rounds.measure(_programs(model, setting), setting.rounds, setting.clock),
  )


def _workload(folder: Path, setting: settings.Setting) -> workloads.Setting:
  backbone = mv.load_backbone(str(folder / "backbone.npz"))
  task = mv.init_task(
    jax.random.key(0),
    backbone,
    name="t",
    num_classes=setting.classes,
    cells=setting.cells,
  )
  images, labels = settings.images(folder), settings.labels(folder)
  return workloads.Setting(backbone, task, *jax.device_put((images, labels)))


def _programs(
  model: workloads.Setting, setting: settings.Setting
) -> rounds.Programs:
  programs: rounds.Programs = {
    rounds.FORWARD: lambda: workloads.plain(model),
    "train": workloads.training(model, 1),
    "train_kept": workloads.kept_training(model, 1, "device"),
    "train_all_weights": workloads.full_finetuning(model),
  }
  for count in setting.tasks:
    programs[f"infer_{count}"] = workloads.inference(model, count)
  return {name: _waited(program) for name, program in programs.items()}


def _waited(program: Any) -> Any:
  return lambda: jax.block_until_ready(program())


if __name__ == "__main__":
  main(Path(sys.argv[1]))
