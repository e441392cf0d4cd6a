"""Images, a training step and a task's file for the PyTorch libraries."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compared import setting as settings

Outputs = Callable[[torch.Tensor], torch.Tensor]


def batch(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
  """Images (batch, 3, side, side) and labels; sets the number of threads."""
  torch.set_num_threads(settings.Setting.read(folder).threads)
  torch.manual_seed(0)
  images = np.moveaxis(settings.images(folder), 3, 1)
  return torch.tensor(images), torch.tensor(settings.labels(folder))


def step(
  outputs: Outputs,
  trained: Iterable[torch.nn.Parameter],
  images: torch.Tensor,
  labels: torch.Tensor,
) -> Callable[[], None]:
  """A step of SGD with momentum per call; only `trained` requires gradients."""
  optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)

  def take() -> None:
    optimizer.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(outputs(images), labels).backward()
    optimizer.step()

  return take


def learned(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
  """Parameters of a model that require gradients."""
  return {n: p for n, p in model.named_parameters() if p.requires_grad}


def count(parameters: Iterable[torch.Tensor]) -> int:
  """The number of parameters."""
  return sum(p.numel() for p in parameters)


def saved_bytes(values: Any) -> int:
  """The bytes that `torch.save` writes."""
  buffer = io.BytesIO()
  torch.save(values, buffer)
  return buffer.getbuffer().nbytes
