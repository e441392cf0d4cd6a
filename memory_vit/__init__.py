"""Teach a frozen Vision Transformer new tasks with learnable memory.

Sandler, Zhmoginov, Vladymyrov, Jackson: Fine-tuning Image Transformers using
Learnable Memory. CVPR 2022.

  load      load_backbone, random_backbone, load_task, load_tasks
  make      init_task
  train     train_task, fit_head, evaluate_tasks; TrainResult, Scores
  runs      read_config, Config; train_and_evaluate, load_result, RunResult
  combine   concatenate, select, remove, rename
  run       preprocess, forward; encode, read; fill_slots, Slots;
            Predictor, PredictorConfig
  look      token_attention, attention_rollout, patch_map, overlay;
            TokenAttention, AttentionRollout
  save      save_task, save_tasks, save_backbone; push_task; export_model,
            ImageInput
  types     Backbone, ViTConfig, vit_config; Task, TaskSpec, TaskKind,
            EvalPreprocessing;
            MemoryViT, the Flax module; MemoryVitError, raised for bad input
"""

from etils import epy

from memory_vit.version import __version__ as __version__

# Import lazily, so that `--help` and wrong options do not wait for jax.
with epy.lazy_api_imports(globals()):
  from memory_vit.backbones.load import load_backbone
  from memory_vit.backbones.save import save_backbone
  from memory_vit.commands.command_line import read_config
  from memory_vit.config import Config
  from memory_vit.errors import MemoryVitError
  from memory_vit.evaluation.preprocess import preprocess
  from memory_vit.exports.export import export_model
  from memory_vit.exports.image_input import ImageInput
  from memory_vit.exports.push import push_task
  from memory_vit.kinds import TaskKind
  from memory_vit.kinds.scores import Scores
  from memory_vit.looking.attention_map import overlay, patch_map
  from memory_vit.looking.attention_rollout import (
    AttentionRollout,
    attention_rollout,
  )
  from memory_vit.looking.token_attention import TokenAttention, token_attention
  from memory_vit.model.backbone import Backbone, random_backbone
  from memory_vit.model.task import EvalPreprocessing, Task, TaskSpec
  from memory_vit.model.vit import MemoryViT
  from memory_vit.model.vit_config import ViTConfig, vit_config
  from memory_vit.prediction.config import PredictorConfig
  from memory_vit.prediction.predictor import Predictor
  from memory_vit.run_result import RunResult, load_result
  from memory_vit.tasks.compose import concatenate, remove, rename, select
  from memory_vit.tasks.create import init_task
  from memory_vit.tasks.program import encode, forward, read
  from memory_vit.tasks.slots import Slots, fill_slots
  from memory_vit.tasks.store import (
    load_task,
    load_tasks,
    save_task,
    save_tasks,
  )
  from memory_vit.train.from_python import (
    TrainResult,
    evaluate_tasks,
    fit_head,
    train_and_evaluate,
    train_task,
  )

__all__ = [
  "AttentionRollout",
  "Backbone",
  "Config",
  "EvalPreprocessing",
  "ImageInput",
  "MemoryViT",
  "MemoryVitError",
  "Predictor",
  "PredictorConfig",
  "RunResult",
  "Slots",
  "Task",
  "TaskKind",
  "Scores",
  "TaskSpec",
  "TokenAttention",
  "TrainResult",
  "ViTConfig",
  "attention_rollout",
  "concatenate",
  "encode",
  "evaluate_tasks",
  "export_model",
  "fill_slots",
  "fit_head",
  "forward",
  "init_task",
  "load_backbone",
  "load_result",
  "load_task",
  "load_tasks",
  "overlay",
  "patch_map",
  "preprocess",
  "push_task",
  "random_backbone",
  "read",
  "read_config",
  "remove",
  "rename",
  "save_backbone",
  "save_task",
  "save_tasks",
  "select",
  "token_attention",
  "train_and_evaluate",
  "train_task",
  "vit_config",
]


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
