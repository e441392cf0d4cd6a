"""The two-stream ViT and what a task is: arrays in, arrays out, no files."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.model.backbone import Backbone, random_backbone
  from memory_vit.model.regimes import REGIMES, get_regime
  from memory_vit.model.task import (
    BACKBONE,
    BackboneId,
    EvalPreprocessing,
    Task,
    TaskSpec,
  )
  from memory_vit.model.vit import MemoryViT
  from memory_vit.model.vit_config import ViTConfig, vit_config

__all__ = [
  "BACKBONE",
  "Backbone",
  "BackboneId",
  "EvalPreprocessing",
  "MemoryViT",
  "REGIMES",
  "Task",
  "TaskSpec",
  "ViTConfig",
  "random_backbone",
  "get_regime",
  "vit_config",
]
