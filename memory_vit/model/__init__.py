"""Vision Transformer with task memory: streams, regimes and tasks, no I/O."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.model.backbone import Backbone, random_backbone
  from memory_vit.model.parts.probe import PROBE_QUERIES, probe_features
  from memory_vit.model.parts.side import NO_SIDE, SideKind
  from memory_vit.model.regimes import REGIMES, Regime, get_regime
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
  "NO_SIDE",
  "PROBE_QUERIES",
  "REGIMES",
  "Regime",
  "SideKind",
  "Task",
  "TaskSpec",
  "ViTConfig",
  "get_regime",
  "probe_features",
  "random_backbone",
  "vit_config",
]
