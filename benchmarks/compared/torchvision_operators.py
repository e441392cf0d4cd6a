"""Make torchvision importable if its compiled operators do not fit torch."""

import contextlib
from typing import Any

import torch

_KEPT: list[Any] = []


def import_torchvision() -> None:
  """Import it; declare the two operators that it lacks beside a CPU torch.

  A torchvision for GPUs cannot load its operators there, and then fails to
  describe two of them. No model here uses any.
  """
  with contextlib.suppress(RuntimeError):
    import torchvision  # noqa: F401

    return
  library = torch.library.Library("torchvision", "FRAGMENT")
  for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float least) -> Tensor")
  _KEPT.append(library)  # its definitions vanish with it
  import torchvision  # noqa: F401
