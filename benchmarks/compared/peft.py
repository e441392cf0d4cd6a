"""Measure LoRA by PEFT: `python -m benchmarks.compared.peft FOLDER`.

A task is an adapter on queries and values, and a head of its own. Many tasks
are computed in the two ways of PEFT: one adapter after the other, and one batch
that contains every image once for each adapter.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.compared import rounds, torch_training
from benchmarks.compared import setting as settings
from benchmarks.compared.torchvision_operators import import_torchvision

import_torchvision()

import peft  # noqa: E402
import transformers  # noqa: E402

_BASE = "__base__"  # PEFT's name for the model without an adapter


def main(folder: Path) -> None:
  """Time the backbone in `folder/hf`."""
  setting = settings.Setting.read(folder)
  images, labels = torch_training.batch(folder)
  model = transformers.ViTForImageClassification.from_pretrained(folder / "hf")
  model.eval()
  with torch.inference_mode():
    alone = model(images).logits
  whole = copy.deepcopy(model)
  trained = _adapted(copy.deepcopy(model), setting, 1)
  served = _adapted(copy.deepcopy(model), setting, max(setting.tasks))
  programs: rounds.Programs = {
    rounds.FORWARD: lambda: _logits(model, images),
    "train": _step(trained, images, labels),
    "train_all_weights": _step(whole, images, labels),
  }
  for count in setting.tasks:
    programs[f"infer_{count}"] = _in_turn(served, images, count)
    programs[f"infer_{count}_one_batch"] = _one_batch(served, images, count)
  few, many = (f"infer_{pick(setting.tasks)}" for pick in (min, max))
  in_turn, mixed = programs[many](), programs[f"{many}_one_batch"]()
  own = torch_training.learned(trained)
  rounds.hand_over(
    name=f"PEFT, LoRA of rank {setting.rank}",
    version=peft.__version__,
    runs_on=f"torch {torch.__version__}, transformers "
    f"{transformers.__version__}",
    parameters=torch_training.count(own.values()),
    file_bytes=_saved(trained, folder / "adapter"),
    outputs_spread=rounds.spread([*in_turn, *mixed]),
    original_difference=rounds.difference(in_turn[0], alone),
    original_difference_one_batch=rounds.difference(mixed[0], alone),
    task_difference=rounds.difference(in_turn[1], programs[few]()[1]),
    task_difference_one_batch=rounds.difference(
      mixed[1], programs[f"{few}_one_batch"]()[1]
    ),
    converted_difference=_converted(folder, alone),
    **rounds.measure(programs, setting.rounds, setting.clock),
  )


def _adapted(model: Any, setting: settings.Setting, count: int) -> Any:
  """A model with `count` adapters and heads, each random."""
  config = peft.LoraConfig(
    r=setting.rank,
    lora_alpha=2 * setting.rank,
    target_modules=["q_proj", "v_proj"],
    modules_to_save=["classifier"],
    init_lora_weights=False,
  )
  adapted = peft.get_peft_model(model, config, adapter_name="t0")
  for i in range(1, count):
    adapted.add_adapter(f"t{i}", config)
  for name, parameter in adapted.named_parameters():
    if "modules_to_save" in name:  # copies of the model's own head
      torch.nn.init.normal_(parameter, std=0.02)
  return adapted.eval()


def _step(model: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
  return torch_training.step(
    lambda x: model(pixel_values=x).logits,
    list(torch_training.learned(model).values()),
    images,
    labels,
  )


@torch.inference_mode()
def _logits(model: Any, images: torch.Tensor) -> torch.Tensor:
  return model(pixel_values=images).logits


def _in_turn(model: Any, images: torch.Tensor, count: int) -> Any:
  """The original outputs and those of each adapter, a pass for each."""

  def run() -> list[torch.Tensor]:
    with model.disable_adapter():
      outputs = [_logits(model, images)]
    for i in range(count):
      model.set_adapter(f"t{i}")
      outputs.append(_logits(model, images))
    return outputs

  return run


def _one_batch(model: Any, images: torch.Tensor, count: int) -> Any:
  """All adapters in one pass, with each image in it count + 1 times."""
  names = [_BASE, *(f"t{i}" for i in range(count))]
  rows = [name for name in names for _ in range(len(images))]

  @torch.inference_mode()
  def run() -> list[torch.Tensor]:
    repeated = images.repeat(len(names), 1, 1, 1)
    logits = model(pixel_values=repeated, adapter_names=rows).logits
    return list(logits.split(len(images)))

  return run


def _saved(model: Any, folder: Path) -> int:
  model.save_pretrained(folder)
  weights = ("*.safetensors", "*.json")
  return sum(f.stat().st_size for glob in weights for f in folder.rglob(glob))


def _converted(folder: Path, alone: torch.Tensor) -> float:
  """Largest difference of transformers' outputs from those of memory_vit."""
  return rounds.difference(settings.expected(folder), alone.numpy())


if __name__ == "__main__":
  main(Path(sys.argv[1]))
