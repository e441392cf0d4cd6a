"""Parameters and operations of the regimes: by formula, and as XLA has them.

Heads are not counted, as in the paper. A multiplication with its addition is 2
operations, as XLA counts; the formulas count products of matrices alone, XLA
also LayerNorm, softmax and the like, after its backend has fused what it could.
Letters as in `vit_config`, m cells, r the bottleneck.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, backbone_shapes
from memory_vit.model.regimes import REGIMES
from memory_vit.model.task import EvalPreprocessing, TaskSpec
from memory_vit.model.vit import MemoryViT
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.split_forward import headless


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Cost of a regime in parameters and operations.

  Attributes:
    regime: see `regimes`.
    parameters: trained, by formula.
    parameters_counted: trained, in the arrays themselves.
    flops: of a forward pass for one image, by formula.
    flops_once: of these, those that a batch of any size takes once: keys and
      values of memory depend on no image.
    flops_xla: of the whole program for one image, as compiled; None where the
      backend does not say.
  """

  regime: str
  parameters: int
  parameters_counted: int
  flops: int
  flops_once: int
  flops_xla: float | None


def cost_of(
  config: ViTConfig, regime: str, cells: int, bottleneck: int
) -> Cost:
  """Computes the cost of a regime; compiles its forward pass.

  Args:
    config: of the backbone.
    regime: see `regimes`.
    cells: m, where the regime has memory.
    bottleneck: r, where it has adapters.
  """
  config = headless(config)
  kind = REGIMES[regime]
  cells = cells if kind.has_memory else 0
  bottleneck = bottleneck if kind.has_adapters else 0
  spec = _spec(config, regime, cells, bottleneck)
  shapes = spec.expected_shapes(config.width, config.depth)
  shapes.pop("head")
  counted = trees.count(shapes)
  if kind.holds_backbone:
    counted += trees.count(backbone_shapes(config))
  each, once = flops(config, regime, cells, bottleneck)
  return Cost(
    regime=regime,
    parameters=parameters(config, regime, cells, bottleneck),
    parameters_counted=counted,
    flops=each + once,
    flops_once=once,
    flops_xla=_compiled_flops(config, spec, shapes),
  )


def parameters(
  config: ViTConfig, regime: str, cells: int, bottleneck: int
) -> int:
  """Values that a regime trains, by formula."""
  kind = REGIMES[regime]
  d, l = config.width, config.depth
  each = {
    "head": 0,
    "cls": d,
    "memory": kind.memory_layers(l) * cells * d,
    # Scale and bias of two LayerNorms in each block, and of the last one.
    "norms": 2 * (2 * l + 1) * d,
    # After attention and after the MLP: down and up, each with a bias.
    "adapters": l * 2 * (2 * d * bottleneck + bottleneck + d),
    "backbone": backbone_parameters(config),
  }
  return sum(each[part] for part in kind.trained)


def backbone_parameters(config: ViTConfig) -> int:
  """Values of a ViT below its head, by formula."""
  d, mlp = config.width, config.mlp_dim
  attention = 4 * (d * d + d)
  block = attention + (d * mlp + mlp) + (mlp * d + d) + 2 * 2 * d
  patches = config.patch_size**2 * 3 * d + d
  positions = (config.num_patches + 1) * d
  return patches + d + positions + config.depth * block + 2 * d


def flops(
  config: ViTConfig, regime: str, cells: int, bottleneck: int
) -> tuple[int, int]:
  """Operations of a forward pass, by formula.

  Returns:
    For every image, and once for a batch.
  """
  attention = REGIMES[regime].attention
  d, l, tokens = config.width, config.depth, config.num_patches + 1
  patches = 2 * config.num_patches * config.patch_size**2 * 3 * d
  keys_values_of_memory = l * 2 * (2 * cells * d * d)
  plain = patches + l * _block(config, tokens, tokens)
  if attention == "masked":
    task_token = l * _block(config, 1, tokens + 1 + cells)
    return plain + task_token, keys_values_of_memory
  if attention == "memory":
    adapters = l * 2 * (2 * 2 * tokens * d * bottleneck)
    block = _block(config, tokens, tokens + cells)
    return patches + l * block + adapters, keys_values_of_memory
  if attention in ("propagated", "additive"):
    more = tokens + cells
    return patches + l * _block(config, more, more), 0
  return plain + l * 2 * (2 * 2 * tokens * d * bottleneck), 0


def _block(config: ViTConfig, queries: int, keys: int) -> int:
  """FLOPs of a block of `queries` query tokens over `keys` key tokens."""
  d = config.width
  projections = 4 * (2 * queries * d * d)
  attention = 2 * (2 * queries * keys * d)
  return projections + attention + 2 * (2 * queries * d * config.mlp_dim)


def _spec(
  config: ViTConfig, regime: str, cells: int, bottleneck: int
) -> TaskSpec:
  return TaskSpec(
    name="task",
    num_classes=1,
    cells=cells,
    regime=regime,
    bottleneck=bottleneck,
    backbone=Backbone(config, {}, "").id,
    evaluation=EvalPreprocessing(image_size=config.image_size),
  )


def _compiled_flops(
  config: ViTConfig, spec: TaskSpec, task: dict[str, Any]
) -> float | None:
  """FLOPs of the compiled forward pass of one image, up to the class token."""
  image = jax.ShapeDtypeStruct(
    (1, config.image_size, config.image_size, 3), jnp.float32
  )

  def forward(module: MemoryViT, image: jax.Array, task: dict[str, Any]) -> Any:
    kind = REGIMES[spec.regime]
    if kind.on_features:
      return module.encode(image)[0]
    if not kind.composes:
      return module.backbone.fine_tuned(image, task, spec)
    outputs, context = module.encode(image)
    return outputs, module.task_features([task], (spec,), context)

  def program(params: Any, task: Any, image: jax.Array) -> Any:
    variables = {"params": {"backbone": params}}
    return MemoryViT(config).apply(variables, image, task, method=forward)

  lowered = jax.jit(program).lower(backbone_shapes(config), task, image)
  analysis = lowered.compile().cost_analysis() or {}
  return analysis.get("flops")
