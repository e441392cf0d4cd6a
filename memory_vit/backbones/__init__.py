"""Load, save and describe pretrained ViTs, without guessing what is missing."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.backbones.describe import inspect_backbone
  from memory_vit.backbones.load import load_backbone
  from memory_vit.backbones.save import save_backbone

__all__ = [
  "inspect_backbone",
  "load_backbone",
  "save_backbone",
]
