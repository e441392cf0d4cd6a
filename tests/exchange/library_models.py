"""Small models of transformers and timm, saved as their libraries save them."""

import contextlib
import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _import_torchvision() -> None:
  """Import it even if its compiled operators do not fit torch.

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


_KEPT: list[torch.library.Library] = []
_import_torchvision()

import timm  # noqa: E402
import transformers  # noqa: E402
from timm.models import save_for_hf  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Outputs = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
  """A model as somebody publishes it.

  Attributes:
    make: builds it, tiny; with other arguments, where they are given.
    outputs: what the family puts out of normalized images.
    sizes: of images, the native one first.
    at_size: makes it take images of a size, where it has to be told.
  """

  make: Callable[..., Any]
  outputs: Outputs
  sizes: tuple[int, ...] = (56, 84, 42)
  at_size: Callable[[Any, int], Any] = lambda model, size: model

  @property
  def is_timm(self) -> bool:
    return self.at_size is _timm_at_size


def perturbed(model: Any, seed: int = 0) -> Any:
  """Make every array differ from zero, from one, and from place to place.

  By enough that each counts in the outputs: tokens and positions as much as
  patches.
  """
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      parameter.add_(noise * _noise(parameter.shape))
  return model.eval()


def _noise(shape: torch.Size) -> float:
  if len(shape) == 3:  # tokens and positions
    return 1.0
  return math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.3


def save(published: Published, model: Any, directory: Path) -> None:
  """Write the files that a hub has of a model."""
  if published.is_timm:
    data = {"mean": MEAN, "std": STD}
    save_for_hf(model, directory, safe_serialization=True, data_config=data)
    return
  model.save_pretrained(directory)
  processor = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": MEAN,
    "image_std": STD,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": published.sizes[0], "width": published.sizes[0]},
  }
  path = directory / "preprocessor_config.json"
  path.write_text(json.dumps(processor))


def their_outputs(
  published: Published, model: Any, images: np.ndarray
) -> np.ndarray:
  """The outputs of a model for images (b, side, side, 3) in [0, 1]."""
  normalized = (images - np.array(MEAN)) / np.array(STD)
  tensor = torch.tensor(normalized.transpose(0, 3, 1, 2), dtype=torch.float32)
  with torch.no_grad():
    model = published.at_size(copy.deepcopy(model), images.shape[1])
    return published.outputs(model, tensor).numpy()


def _timm_at_size(model: Any, size: int) -> Any:
  model.set_input_size(img_size=size)
  return model


def _pooler(model: Any, x: torch.Tensor) -> torch.Tensor:
  return model(x).pooler_output


def _resized_pooler(model: Any, x: torch.Tensor) -> torch.Tensor:
  return model(x, interpolate_pos_encoding=True).pooler_output


def _mean(model: Any, x: torch.Tensor) -> torch.Tensor:
  out = model(x, interpolate_pos_encoding=True)
  return out.last_hidden_state.mean(dim=1)


def _tower(model: Any, x: torch.Tensor) -> torch.Tensor:
  return _resized_pooler(model.vision_model, x)


def _projected(model: Any, x: torch.Tensor) -> torch.Tensor:
  return model.visual_projection(_tower(model, x))


def _image_embeds(model: Any, x: torch.Tensor) -> torch.Tensor:
  return model(x, interpolate_pos_encoding=True).image_embeds


def _logits(model: Any, x: torch.Tensor) -> torch.Tensor:
  return model(x, interpolate_pos_encoding=True).logits


# Of no family the proportions: what is taken for another is noticed.
SHAPE = {
  "hidden_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "image_size": 56,
  "patch_size": 14,
}
WITH_MLP = {**SHAPE, "intermediate_size": 40}
TEXT = {
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "vocab_size": 30,
  "max_position_embeddings": 8,
  "bos_token_id": 0,
  "eos_token_id": 1,
  "pad_token_id": 1,
}


def _transformers(
  kind: str, outputs: Outputs, *, sizes: tuple[int, ...] = (56, 84, 42), **more
) -> Published:
  """A model class of transformers; `more` are fields of its configuration."""

  def make(**other: Any) -> Any:
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**{**more, **other}))

  return Published(make=make, outputs=outputs, sizes=sizes)


def _timm(name: str, **more: Any) -> Published:
  def make(**other: Any) -> Any:
    arguments = {
      "embed_dim": 24,
      "depth": 2,
      "num_heads": 2,
      "patch_size": 14,
      "img_size": 56,
      **more,
      **other,
    }
    return timm.create_model(name, **arguments)

  return Published(
    make=make, outputs=lambda model, x: model(x), at_size=_timm_at_size
  )


_BOTH = {"text_config": TEXT, "vision_config": WITH_MLP}
MODELS = {
  "dinov2": _transformers("Dinov2Model", _pooler, **SHAPE),
  "dinov2 swiglu": _transformers(
    "Dinov2Model", _pooler, use_swiglu_ffn=True, **SHAPE
  ),
  "dinov2 registers": _transformers(
    "Dinov2WithRegistersModel", _pooler, num_register_tokens=3, **SHAPE
  ),
  "dinov3": _transformers(
    "DINOv3ViTModel", _pooler, num_register_tokens=4, **WITH_MLP
  ),
  "dinov3 gated": _transformers(
    "DINOv3ViTModel",
    _pooler,
    num_register_tokens=4,
    use_gated_mlp=True,
    hidden_act="silu",
    **WITH_MLP,
  ),
  "ijepa": _transformers("IJepaModel", _mean, **WITH_MLP),
  "ijepa classifier": _transformers(
    "IJepaForImageClassification", _logits, num_labels=5, **WITH_MLP
  ),
  "siglip": _transformers("SiglipModel", _tower, **_BOTH),
  "siglip vision": _transformers(
    "SiglipVisionModel", _resized_pooler, **WITH_MLP
  ),
  "siglip classifier": _transformers(
    "SiglipForImageClassification", _logits, num_labels=5, **_BOTH
  ),
  "clip": _transformers("CLIPModel", _projected, projection_dim=10, **_BOTH),
  "clip vision": _transformers("CLIPVisionModel", _resized_pooler, **WITH_MLP),
  "clip projection": _transformers(
    "CLIPVisionModelWithProjection",
    _image_embeds,
    projection_dim=10,
    hidden_act="gelu",
    **WITH_MLP,
  ),
  "timm vit": _timm("vit_small_patch16_224", num_classes=5),
  "timm miil": _timm("vit_base_patch16_224_miil", num_classes=5),
  "timm gap": _timm("vit_medium_patch16_gap_256"),
  "timm registers, norm after": _timm("vit_medium_patch16_reg4_gap_256"),
  "timm registers with positions": _timm("vit_so150m_patch16_reg4_gap_256"),
  "timm clip": _timm("vit_base_patch16_clip_quickgelu_224"),
  "timm siglip": _timm("vit_base_patch16_siglip_224"),
  "timm siglip tanh": _timm("vit_so400m_patch16_siglip_256"),
  "timm siglip gap": _timm("vit_base_patch16_siglip_gap_224", num_classes=5),
  "timm dinov2": _timm("vit_base_patch14_reg4_dinov2"),
  "timm swiglu": _timm("vit_giant_patch14_dinov2"),
  "timm dinov3": _timm("vit_base_patch16_dinov3_qkvb"),
  "timm dinov3 gated": _timm(
    "vit_small_plus_patch16_dinov3", global_pool="token", num_classes=5
  ),
  "timm deit3": _timm("deit3_small_patch16_224", num_classes=5),
  "timm deit": _timm("deit_tiny_patch16_224", num_classes=5),
}
