"""Measure vit-pytorch: `python -m benchmarks.compared.vit_pytorch FOLDER`.

Its ViT has more LayerNorms than the published one and no biases in attention,
so it has random weights of its own, in the same sizes. A task is its `Adapter`,
which returns only the outputs of that task: the original outputs, and each
further task, need a pass of their own.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.compared import rounds, torch_training
from benchmarks.compared import setting as settings
from benchmarks.compared.torchvision_operators import import_torchvision

import_torchvision()

from vit_pytorch import learnable_memory_vit  # noqa: E402


def main(folder: Path) -> None:
  """Time random weights."""
  setting = settings.Setting.read(folder)
  images, labels = torch_training.batch(folder)
  whole, vit = _vit(setting), _vit(setting)
  all_weights = _step(whole, images, labels)
  tasks = [_adapter(vit, setting) for _ in range(max(setting.tasks))]
  with torch.inference_mode():
    alone = vit(images)
  programs: rounds.Programs = {
    rounds.FORWARD: _passes([vit], images),
    "train": _step(tasks[0], images, labels),
    "train_all_weights": all_weights,
  }
  for count in setting.tasks:
    programs[f"infer_{count}"] = _passes([vit, *tasks[:count]], images)
  few, together = (
    programs[f"infer_{pick(setting.tasks)}"]() for pick in (min, max)
  )
  own = torch_training.learned(tasks[0])
  rounds.hand_over(
    name="vit-pytorch, Adapter",
    version=metadata.version("vit-pytorch"),
    runs_on=f"torch {torch.__version__}",
    parameters=torch_training.count(own.values()),
    file_bytes=torch_training.saved_bytes(own),
    outputs_spread=rounds.spread(together),
    original_difference=rounds.difference(together[0], alone),
    task_difference=rounds.difference(together[1], few[1]),
    **rounds.measure(programs, setting.rounds, setting.clock),
  )


def _vit(setting: settings.Setting) -> Any:
  width, depth, heads, mlp = settings.SIZES[setting.variant]
  return learnable_memory_vit.ViT(
    image_size=setting.image_size,
    patch_size=int(setting.variant.partition("/")[2]),
    num_classes=setting.classes,
    dim=width,
    depth=depth,
    heads=heads,
    mlp_dim=mlp,
  ).eval()


def _adapter(vit: Any, setting: settings.Setting) -> Any:
  return learnable_memory_vit.Adapter(
    vit=vit,
    num_memories_per_layer=setting.cells,
    num_classes=setting.classes,
  ).eval()


def _step(model: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
  own = list(torch_training.learned(model).values())
  return torch_training.step(model, own, images, labels)


def _passes(models: list[Any], images: torch.Tensor) -> Any:
  @torch.inference_mode()
  def run() -> list[torch.Tensor]:
    return [model(images) for model in models]

  return run


if __name__ == "__main__":
  main(Path(sys.argv[1]))
