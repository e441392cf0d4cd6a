"""Train LoRA by PEFT on an exported backbone, as our tasks are trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int32

from benchmarks.compared.torchvision_operators import import_torchvision

import_torchvision()

import peft  # noqa: E402
import transformers  # noqa: E402

# As in our own runs: SGD, gradient clipping, fraction of warm-up steps.
_MOMENTUM, _CLIP, _WARMUP = 0.9, 1.0, 0.025


class Split(NamedTuple):
  """Images in [-1, 1] as inputs of a model, and their classes."""

  images: Float32[np.ndarray, "n side side 3"]
  labels: Int32[np.ndarray, " n"]


class Trained(NamedTuple):
  """Result of training."""

  parameters: int  # trained ones, including the head
  validation: float  # accuracy
  loss: float  # of validation, in nats
  right: np.ndarray  # bool (n,), of test images


def train(
  folder: Path,
  splits: dict[str, Split],
  *,
  rank: int,
  classes: int,
  learning_rate: float,
  steps: int,
  batch: int,
  seed: int,
) -> Trained:
  """Train LoRA on all linear layers, scaled by 2, and a zero head."""
  torch.manual_seed(seed)
  model = _model(folder, rank, classes)
  learned = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.SGD(learned, lr=1.0, momentum=_MOMENTUM)
  rates = _rates(learning_rate, steps)
  order = _order(len(splits["train"].labels), batch, seed)
  model.train()
  for rate in rates:
    chosen = next(order)
    images = _tensor(splits["train"].images[chosen])
    labels = torch.tensor(splits["train"].labels[chosen]).long()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    logits = model(pixel_values=images).logits
    torch.nn.functional.cross_entropy(logits, labels).backward()
    torch.nn.utils.clip_grad_norm_(learned, _CLIP)
    optimizer.step()
  model.eval()
  right, loss = _tested(model, splits["validation"])
  return Trained(
    parameters=sum(p.numel() for p in learned),
    validation=float(right.mean()),
    loss=loss,
    right=_tested(model, splits["test"])[0],
  )


def _model(folder: Path, rank: int, classes: int) -> Any:
  model = transformers.ViTForImageClassification.from_pretrained(
    folder, num_labels=classes, ignore_mismatched_sizes=True
  )
  torch.nn.init.zeros_(model.classifier.weight)
  torch.nn.init.zeros_(model.classifier.bias)
  config = peft.LoraConfig(
    r=rank,
    lora_alpha=2 * rank,
    target_modules="all-linear",
    exclude_modules=["classifier"],
    modules_to_save=["classifier"],
  )
  return peft.get_peft_model(model, config)


def _rates(peak: float, steps: int) -> np.ndarray:
  """Linear warm-up, then cosine to zero."""
  warmup = round(_WARMUP * steps)
  done = (np.arange(steps) - warmup) / max(1, steps - warmup)
  after = (1 + np.cos(np.pi * done)) / 2
  before = (np.arange(steps) + 1) / max(1, warmup)
  return peak * np.where(np.arange(steps) < warmup, before, after)


def _order(size: int, batch: int, seed: int) -> Iterator[np.ndarray]:
  """Indices of the images of each step, in epochs."""
  rng = np.random.default_rng(seed)
  left = np.empty(0, int)
  while True:
    while len(left) < batch:
      left = np.concatenate([left, rng.permutation(size)])
    yield left[:batch]
    left = left[batch:]


def _tensor(images: np.ndarray) -> torch.Tensor:
  return torch.tensor(np.moveaxis(images, 3, 1))


@torch.inference_mode()
def _tested(model: Any, split: Split) -> tuple[np.ndarray, float]:
  """Hits and mean loss on a split."""
  logits = torch.cat([
    model(pixel_values=_tensor(split.images[i : i + 400])).logits
    for i in range(0, len(split.labels), 400)
  ])  # fmt: skip
  labels = torch.tensor(split.labels).long()
  loss = torch.nn.functional.cross_entropy(logits, labels)
  return (logits.argmax(-1) == labels).numpy(), float(loss)
