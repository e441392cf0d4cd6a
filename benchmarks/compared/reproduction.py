"""Measure the PyTorch reproduction of the paper, which is no package.

`python -m benchmarks.compared.reproduction FOLDER VIT_PY`: VIT_PY is the file
`vit.py` of github.com/necrashter/transformers-learnable-memory. It changes the
layers of a ViT of transformers 4.30, and fails with version 5.
"""

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.compared import rounds, torch_training
from benchmarks.compared import setting as settings


def main(folder: Path, source: Path) -> None:
  """Time the backbone in `folder/hf`."""
  setting = settings.Setting.read(folder)
  images, labels = torch_training.batch(folder)
  model = transformers.ViTForImageClassification.from_pretrained(folder / "hf")
  model.eval()
  whole = copy.deepcopy(model)
  for parameter in model.parameters():
    parameter.requires_grad_(False)  # it leaves that to its caller
  with torch.inference_mode():
    alone = model(images).logits
  module = _load(source)
  with_tasks = {
    count: _with_heads(module, model, setting, count) for count in setting.tasks
  }
  trained, own = _with_heads(module, model, setting, 1)
  programs: rounds.Programs = {
    rounds.FORWARD: lambda: _logits(model, images),
    "train": torch_training.step(
      lambda x: trained(x)[1].logits, own, images, labels
    ),
    "train_all_weights": torch_training.step(
      lambda x: whole(x).logits, list(whole.parameters()), images, labels
    ),
  }
  for count, (heads, _) in with_tasks.items():
    programs[f"infer_{count}"] = _all(heads, images)
  together = programs[f"infer_{max(setting.tasks)}"]()
  rounds.hand_over(
    name="the PyTorch reproduction",
    version="2023-06-20",
    runs_on=f"torch {torch.__version__}, transformers "
    f"{transformers.__version__}",
    parameters=torch_training.count(own),
    file_bytes=torch_training.saved_bytes(own),
    outputs_spread=rounds.spread(together),
    original_difference=rounds.difference(together[0], alone),
    task_difference=_moved(module, model, setting, images),
    converted_difference=rounds.difference(
      settings.expected(folder), alone.numpy()
    ),
    **rounds.measure(programs, setting.rounds, setting.clock),
  )


def _load(source: Path) -> Any:
  spec = importlib.util.spec_from_file_location("reproduction_vit", source)
  if spec is None or spec.loader is None:
    raise ValueError(f"{source}: expected the reproduction's vit.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _with_heads(
  module: Any, model: Any, setting: settings.Setting, count: int
) -> tuple[Any, list[torch.nn.Parameter]]:
  """The model with `count` tasks, and the parameters of the last one."""
  heads = module.MemoryCapableViT(copy.deepcopy(model)).eval()
  for _ in range(count):
    own = heads.add_head(setting.cells, setting.classes)
  return heads, own


def _moved(
  module: Any, model: Any, setting: settings.Setting, images: torch.Tensor
) -> float:
  """Largest change of a task's outputs when others are concatenated to it."""
  alone, _ = _with_heads(module, model, setting, 1)
  before = _all(alone, images)()[1]
  others, _ = _with_heads(module, model, setting, max(setting.tasks) - 1)
  alone.concatenate(others)
  return rounds.difference(_all(alone, images)()[1], before)


@torch.inference_mode()
def _logits(model: Any, images: torch.Tensor) -> torch.Tensor:
  return model(images).logits


def _all(heads: Any, images: torch.Tensor) -> Any:
  @torch.inference_mode()
  def run() -> list[torch.Tensor]:
    return [output.logits for output in heads(images)]

  return run


if __name__ == "__main__":
  main(Path(sys.argv[1]), Path(sys.argv[2]))
