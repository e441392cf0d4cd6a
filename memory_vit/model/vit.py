"""Vision Transformer with a backbone stream and a task stream.

Since the backbone stream never attends to the task stream (rows INP and CLS of
Table 1 in the paper), a forward pass is two programs: `encode` is the same
executable for all tasks, and `read` contains everything that can be trained.
"""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.attention import for_each_image
from memory_vit.model.context import Cells, Context
from memory_vit.model.encoder import Encoder
from memory_vit.model.layer_norms import standardized
from memory_vit.model.masks import task_mask
from memory_vit.model.parts import Axes
from memory_vit.model.parts.head import (
  head_logits,
  pooled_logits,
  stacked_logits,
)
from memory_vit.model.pooling import MAPHead, mean_of_patches
from memory_vit.model.products import Dense
from memory_vit.model.stacking import SlotArrays, exact_rooms, stack_tasks
from memory_vit.model.task import BACKBONE, Task, TaskSpec
from memory_vit.model.task_params import TaskParameters
from memory_vit.model.trees import AnyArray, Tree
from memory_vit.model.vit_config import ViTConfig


class VisionTransformer(nn.Module):
  """The published ViT; its encoder also runs the task stream."""

  config: ViTConfig

  def setup(self) -> None:
    """Declare the submodules, which several methods share."""
    cfg = self.config
    patch = (cfg.patch_size, cfg.patch_size, 3)
    self.embedding = Dense(patch, (cfg.width,), cfg.precision)
    if cfg.class_tokens:
      shape = (1, cfg.class_tokens, cfg.width)
      self.cls = self.param("cls", nn.initializers.zeros, shape)
    if cfg.registers:
      shape = (1, cfg.registers, cfg.width)
      normal = nn.initializers.normal(0.02)
      self.registers = self.param("registers", normal, shape)
    self.Transformer = Encoder(cfg)
    if cfg.pooling == "map":
      self.MAPHead_0 = MAPHead(cfg)
    # Heads are float32: with many classes, some bfloat16 logits would be equal.
    if cfg.representation_size:
      self.pre_logits = nn.Dense(cfg.representation_size, dtype=jnp.float32)
    if cfg.num_classes:
      self.head = nn.Dense(cfg.num_classes, dtype=jnp.float32)

  def encode(
    self, images: Float[Array, "b side side 3"]
  ) -> tuple[Float32[Array, "b c0"], Context]:
    """Return outputs of the plain ViT (logits or features), and the context."""
    cfg = self.config
    x = self._tokens(images, self._cls())
    states, context = self.Transformer.encode(x, self._registers())
    pooled = y = self._pooled(states[-1])
    if cfg.representation_size:
      y = jnp.tanh(self.pre_logits(y))
    if cfg.num_classes:
      y = self.head(y)
    return y, context._replace(pooled=pooled)

  def summarize(
    self, images: Float[Array, "b side side 3"]
  ) -> Float32[Array, "b n d"]:
    """Return class token and mean patch after each layer of the plain ViT."""
    cfg, tokens = self.config, self._tokens(images, self._cls())
    summary = []
    for x in self.Transformer.encode(tokens, self._registers())[0]:
      if cfg.class_tokens:
        summary.append(x[:, 0])
      summary.append(mean_of_patches(x, cfg))
    return standardized(jnp.stack(summary, axis=1), cfg.layer_norm_epsilon)

  def fine_tuned(
    self,
    images: Float[Array, "b side side 3"],
    task: Mapping[str, Any],
    spec: TaskSpec,
  ) -> Float32[Array, "b d"]:
    """Run the ViT with a task's parameters; return features for the head."""
    cls = self._cls()
    if "cls" in task:
      cls = jnp.concatenate([task["cls"][None], cls[1:]])
    x = self.Transformer.fine_tuned(
      self._tokens(images, cls),
      self._registers(),
      attention=spec.learned.attention,
      memory=task.get("memory"),
      memory_norm=spec.memory_norm,
      adapters=task.get("adapters"),
    )
    if "cls" in task:
      return self.Transformer.encoder_norm(x)[:, 0]
    return self._pooled(x)

  def _cls(self) -> Float[AnyArray, "_ d"]:
    if self.config.class_tokens:
      return self.cls[0]
    return jnp.zeros((0, self.config.width))

  def _registers(self) -> Float[AnyArray, "1 _ d"] | None:
    return self.registers if self.config.registers else None

  def _pooled(self, x: Float[Array, "b s d"]) -> Float32[Array, "b d"]:
    """Return the backbone's features, pooled from the last block's tokens."""
    cfg, norm = self.config, self.Transformer.encoder_norm
    if cfg.pooling == "map":
      return self.MAPHead_0(norm(x))
    if cfg.pooling == "tok":
      return norm(x)[:, 0]
    if cfg.norm_after_pooling:
      return norm(mean_of_patches(x, cfg))
    return mean_of_patches(norm(x), cfg)

  def _tokens(
    self, images: Float[Array, "b side side 3"], cls: Float[AnyArray, "_ d"]
  ) -> Float[Array, "b _ d"]:
    """Return the embedded patches, with class tokens `cls` in front of them."""
    x = self.embedding(patches_of(images, self.config))
    if not cls.shape[0]:  # exporters fail on empty arrays
      return x
    return jnp.concatenate([for_each_image(cls, x), x], axis=1)


def patches_of(
  images: Float[Array, "b side side 3"], config: ViTConfig
) -> Float32[Array, "b n p p 3"]:
  """Cut images into patches, row by row."""
  # On an explicit mesh, jax cannot split two axes in one reshape.
  b, p = images.shape[0], config.patch_size
  g = config.image_size // p
  rows = images.astype(jnp.float32).reshape(b, g, p, g * p, 3)
  patches = rows.reshape(b, g, p, g, p, 3).swapaxes(2, 3)
  return patches.reshape(b, g * g, p, p, 3)


class MemoryViT(nn.Module):
  """A frozen ViT and its tasks, as a Flax module.

  Backbone parameters have gradients too: differentiate params["tasks"] only.

    module = mv.MemoryViT(backbone.config, tasks)
    learned = {task.name: task.params for task in tasks}

    def loss(learned):
      params = {"backbone": backbone.params, "tasks": learned}
      return my_loss(module.apply({"params": params}, images)["pets"], labels)

    gradient = jax.grad(loss)(learned)

  Unlike `mv.forward`, this module does not check the values of images.

  Attributes:
    config: configuration of the backbone.
    specs: the tasks, or their specs, in any order.
  """

  config: ViTConfig
  specs: Task | Iterable[TaskSpec | Task] = ()

  def __post_init__(self) -> None:
    """Replace tasks in `specs` by their specs."""
    argument = self.specs
    entries = [argument] if isinstance(argument, Task) else argument
    specs = tuple(s.spec if isinstance(s, Task) else s for s in entries)
    for spec in specs:
      if not isinstance(spec, TaskSpec):
        raise TaskError(
          f"specs has an entry of type {type(spec).__name__}, expected Task or "
          "TaskSpec."
        )
    self.specs = specs
    super().__post_init__()

  @property
  def _specs(self) -> tuple[TaskSpec, ...]:
    return cast(tuple[TaskSpec, ...], self.specs)

  def setup(self) -> None:
    """Declare backbone and tasks, the two halves of the parameters."""
    self.backbone = VisionTransformer(self.config)
    self.tasks = TaskParameters(self.config, self._specs)

  def __call__(
    self, images: Float[Array, "b side side 3"]
  ) -> dict[str, Float32[Array, "b _"]]:
    """Run the backbone and all tasks.

    Args:
      images: in [-1, 1].

    Returns:
      {"backbone": outputs (b, c0), task name: outputs (b, c), ...}.
    """
    outputs, context = self.encode(images)
    return {BACKBONE: outputs, **self.read(context)}

  def encode(
    self, images: Float[Array, "b side side 3"]
  ) -> tuple[Float32[Array, "b c0"], Context]:
    """Run the plain ViT.

    Args:
      images: in [-1, 1].

    Returns:
      The logits, or the features if there is no head, and the context.
    """
    return self.backbone.encode(images)

  def summarize(
    self, images: Float[Array, "b side side 3"]
  ) -> Float32[Array, "b n d"]:
    """Run the plain ViT for a summary of its layers.

    Args:
      images: in [-1, 1].

    Returns:
      n standardized tokens: after each block, the first class token, if there
      is one, and the mean of the patches.
    """
    return self.backbone.summarize(images)

  def fine_tuned(
    self,
    images: Float[Array, "b side side 3"],
    task: Mapping[str, Any],
    spec: TaskSpec,
  ) -> Float32[Array, "b c"]:
    """Run a task of a regime that changes the backbone's computation.

    Args:
      images: in [-1, 1].
      task: parameters of the task. A class token among them replaces the first
        class token of the backbone, or is added if the backbone has none.
      spec: spec of the task, whose attention is neither "frozen" nor "masked".

    Returns:
      Logits of the task.
    """
    return head_logits(
      self.backbone.fine_tuned(images, task, spec), task["head"]
    )

  def keys_values(
    self, memory: Float[AnyArray, "l t m d"], norm: Bool[AnyArray, " t"]
  ) -> Cells:
    """Return keys and values of memory in all layers, the same for all images.

    Args:
      memory: memory cells of the tasks.
      norm: whether a task's memory passes through each block's first LayerNorm.
    """
    return self.backbone.Transformer.keys_values(memory, norm)

  def read_slots(
    self, slots: SlotArrays, context: Context
  ) -> Float32[Array, "b t c"]:
    """Run stacked tasks, which need not be tasks of this module.

    Args:
      slots: the stacked tasks.
      context: from `encode`.

    Returns:
      Logits of the task stream, then of heads on the pooled output. Logits of
      empty slots, and of classes that a task does not have, are meaningless.
    """
    logits = []
    if slots.mask is not None:
      features = self.slot_features(slots, context)
      logits.append(stacked_logits(features, slots.parts["head"]))
    if slots.heads is not None:
      assert context.pooled is not None
      logits.append(pooled_logits(context.pooled, slots.heads))
    return logits[0] if len(logits) == 1 else jnp.concatenate(logits, axis=1)

  def slot_features(
    self,
    slots: SlotArrays,
    context: Context,
    seen: Bool[AnyArray, "l t m"] | None = None,
  ) -> Float32[Array, "b t d"]:
    """Run the task stream on stacked tasks, up to the heads.

    Args:
      slots: see `read_slots`.
      context: from `encode`.
      seen: which of its cells a task attends to in each layer; None for all.

    Returns:
      Features for the heads.
    """
    return self.backbone.Transformer.read(slots, context, seen)

  def task_features(
    self, tasks: Sequence[Tree], specs: Sequence[TaskSpec], context: Context
  ) -> Float32[Array, "b t d"]:
    """Run the task stream, differentiable in the parameters of the tasks.

    Args:
      tasks: parameters of at least one task.
      specs: the specs of these tasks, in the same order.
      context: from `encode`.

    Returns:
      Features for the heads.
    """
    rooms = exact_rooms(specs)
    del rooms["head"]  # heads are not run here
    stacked = stack_tasks(
      dict(enumerate(tasks)), task_mask(specs), rooms, Axes.of(self.config)
    )
    return self.slot_features(stacked.ready(self.keys_values), context)

  def read(self, context: Context) -> dict[str, Float32[Array, "b _"]]:
    """Run the tasks of this module.

    Args:
      context: from `encode`.

    Returns:
      {task name: (b, c)}.
    """
    tasks = dict(zip(self._specs, self.tasks(), strict=True))
    streamed = [spec for spec in tasks if not spec.learned.on_pooled]
    features: dict[TaskSpec, Array] = {}
    if streamed:
      params = [tasks[spec] for spec in streamed]
      tokens = self.task_features(params, streamed, context)
      features = {spec: tokens[:, i] for i, spec in enumerate(streamed)}
    for spec in tasks:
      if spec.learned.on_pooled:
        assert context.pooled is not None
        features[spec] = context.pooled
    return {
      spec.name: head_logits(features[spec], task["head"])
      for spec, task in tasks.items()
    }


def apply(
  model: nn.Module, params: Mapping[str, Any], *args: Any, method: str
) -> Any:
  """Call `model.apply` for a method that changes no variables."""
  return model.apply({"params": params}, *args, method=method)
