"""Make torchvision importable where its compiled operators do not fit torch."""

import contextlib
from typing import Any

import torch

_KEPT: list[Any] = []


def import_torchvision() -> None:
  """Import it, with its two operators declared where it has none.

  A torchvision for GPUs beside a torch without them cannot load its operators,
  and then fails to describe two of them. No model here uses any.
  """
  with contextlib.suppress(RuntimeError):
    import torchvision  # noqa: F401

    return
  library = torch.library.Library("torchvision", "FRAGMENT")
  for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float least) -> Tensor")
  _KEPT.append(library)  # what it defines goes with it
  import torchvision  # noqa: F401
