"""Count parameters and FLOPs of the regimes, by formula and as compiled by XLA.

Without heads, as in the paper. A multiplication and an addition are 2
operations, as XLA counts. The formulas count matrix products only; XLA also
counts LayerNorm, softmax and the like, after fusion by its backend. Letters as
in `vit_config`; r is the bottleneck, or the width of a side stream.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import memory_vit as mv
from memory_vit.model import NO_SIDE, PROBE_QUERIES, SideKind, get_regime
from studies.paper.section import Row, Section
from studies.paper.study import Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Trained parameters of a regime, and FLOPs of one image's forward pass."""

  regime: str
  parameters: int  # by formula
  parameters_counted: int  # in the arrays
  flops: int  # by formula
  # The part that is computed once per batch: the keys and values of memory.
  flops_once: int
  flops_xla: float | None  # None if the backend does not report it


def key(study: Study, vit: mv.ViTConfig, hardware: str) -> dict[str, Any]:
  """Everything that the measured costs depend on."""
  return {
    "regimes": study.regimes_of("costs"),
    "backbone": dataclasses.asdict(vit),
    "cells": study.task.cells,
    "bottleneck": study.task.bottleneck,
    "hardware": hardware,
  }


def parameters(
  config: mv.ViTConfig,
  regime: str,
  cells: int,
  bottleneck: int,
  side: SideKind = NO_SIDE,
) -> int:
  """The number of trained parameters, by formula."""
  kind = get_regime(regime)
  d, l, n = config.width, config.depth, config.summary_tokens
  r = side.width
  # Two LayerNorms, a 3 x 3 convolution, and two layers with biases.
  mixing = 4 * r + 9 * r + (2 * r * 2 * r + 3 * r)
  each = {
    "head": 0,
    "cls": d,
    "memory": kind.memory_layers(l) * cells * d,
    # Scale and bias of two LayerNorms in each block, and of the final one.
    "norms": 2 * (2 * l + 1) * d,
    "layers": l * d,
    # Down from keys and values, up to each of them.
    "side": l * (2 * d * r + r + 2 * r * d + mixing * (side.mixing == "conv")),
    # Queries with a bias per token; scale, down and up of each token.
    "probe": PROBE_QUERIES * (d + n) + n * d * (1 + 2 * bottleneck),
    # After attention and after the MLP: down and up, each with a bias.
    "adapters": l * 2 * (2 * d * bottleneck + bottleneck + d),
    "backbone": backbone_parameters(config),
  }
  return sum(each[part] for part in kind.trained)


def backbone_parameters(config: mv.ViTConfig) -> int:
  """The number of parameters of a ViT below its head, by formula."""
  d, mlp = config.width, config.mlp_dim
  attention = 4 * (d * d + d)
  block = attention + (d * mlp + mlp) + (mlp * d + d) + 2 * 2 * d
  patches = config.patch_size**2 * 3 * d + d
  positions = (config.num_patches + 1) * d
  return patches + d + positions + config.depth * block + 2 * d


def flops(
  config: mv.ViTConfig,
  regime: str,
  cells: int,
  bottleneck: int,
  side: SideKind = NO_SIDE,
) -> tuple[int, int]:
  """FLOPs of a forward pass by formula: per image, and once per batch."""
  kind = get_regime(regime)
  attention = kind.attention
  d, l, tokens = config.width, config.depth, config.num_patches + 1
  patches = 2 * config.num_patches * config.patch_size**2 * 3 * d
  keys_values_of_memory = l * 2 * (2 * cells * d * d)
  plain = patches + l * _block(config, tokens, tokens)
  if attention == "masked":
    task_token = l * _block(config, 1, tokens + 1 + cells)
    stream = l * _side(config, side) if kind.has("side") else 0
    return plain + task_token + stream, keys_values_of_memory
  if attention == "memory":
    adapters = l * 2 * (2 * 2 * tokens * d * bottleneck)
    block = _block(config, tokens, tokens + cells)
    return patches + l * block + adapters, keys_values_of_memory
  if attention in ("propagated", "additive"):
    more = tokens + cells
    return patches + l * _block(config, more, more), 0
  if kind.has("probe"):
    # Scores, down and up, and the sum over tokens.
    each = 2 * config.summary_tokens * d
    return plain + each * (PROBE_QUERIES + 2 * bottleneck + 1), 0
  return plain + l * 2 * (2 * 2 * tokens * d * bottleneck), 0


def _block(config: mv.ViTConfig, queries: int, keys: int) -> int:
  """FLOPs of a block in which `queries` tokens attend to `keys` tokens."""
  d = config.width
  projections = 4 * (2 * queries * d * d)
  attention = 2 * (2 * queries * keys * d)
  return projections + attention + 2 * (2 * queries * d * config.mlp_dim)


def _side(config: mv.ViTConfig, side: SideKind) -> int:
  """FLOPs of a layer of a side stream, to which one token attends."""
  tokens, d, r = config.num_patches + 1, config.width, side.width
  down, up = 2 * tokens * 2 * d * r, 2 * 2 * d * r
  scores_values = 2 * (2 * config.num_heads * tokens * r)
  mixing = 2 * 9 * config.num_patches * r + 2 * tokens * 4 * r * r
  return down + up + scores_values + mixing * (side.mixing == "conv")


def section(
  config: mv.ViTConfig, found: Sequence[Mapping[str, Any]]
) -> Section:
  """The section of the report, from formulas and from `measure`."""
  plain, _ = flops(config, "head", 0, 0)
  rows = [
    {
      "regime": cost.regime,
      "parameters": cost.parameters,
      "in the arrays": cost.parameters_counted,
      "MFLOP": cost.flops / 1e6,
      "once a batch": cost.flops_once / 1e6,
      "MFLOP by XLA": cost.flops_xla and cost.flops_xla / 1e6,
      "XLA / formula": cost.flops_xla and cost.flops_xla / cost.flops,
      "of the plain ViT": cost.flops / plain,
    }
    for cost in (Cost(**values) for values in found)
  ]
  return Section(
    title=f"Parameters and operations on {config.variant}, "
          f"{config.image_size} px",
    rows=rows,
    comparisons=_beside_table5(),
    notes=(
      f"Without heads, which have {config.width + 1:,} parameters for a class. "
      "Operations of a forward pass for one image, a multiplication with its "
      "addition being 2. `once a batch` is a part of them: keys and values of "
      "memory depend on no image. The formulas count products of matrices; XLA "
      "counts all of its compiled program, which its backend has fused.",
      "The second table stands beside the paper's Table 5, which does not say "
      "what it counts. With a multiplication and its addition as one operation "
      "half of each remains. Near the paper's 25 comes only the attention to a "
      "cached memory, on an L/32 or at 384 px.",
    ),
  )  # fmt: skip


def _beside_table5() -> list[Row]:
  """The numbers of the paper's Table 5, and those of our formulas."""
  cells, b32 = 5, mv.vit_config("B/32")
  full = backbone_parameters(b32)
  blocks = full - backbone_parameters(dataclasses.replace(b32, depth=0))
  masked, once = flops(b32, "memory_masked", cells, 0)

  def attention(config: mv.ViTConfig) -> int:
    with_memory, _ = flops(config, "memory", cells, 0)
    return with_memory - flops(config, "memory", 0, 0)[0]

  sizes = {"": b32, " on an L/32": mv.vit_config("L/32"),
           " at 384 px": mv.vit_config("B/32", image_size=384)}  # fmt: skip
  numbers = [
    ("parameters of full", full, "M", "80 M"),
    ("of these in the 12 blocks", blocks, "M", None),
    *(
      (f"attention to 5 cells{where}, an image", attention(size), "MFLOP",
       None if where else "about 25 MFLOP")
      for where, size in sizes.items()
    ),
    ("keys and values of 5 cells, a batch", once, "MFLOP", None),
    ("the token of a masked task, an image",
     masked - flops(b32, "head", 0, 0)[0], "MFLOP", None),
  ]  # fmt: skip
  return [
    {"of a B/32, 224 px": name, "by formula": f"{number / 1e6:.1f} {unit}",
     "paper, Table 5": paper}
    for name, number, unit, paper in numbers
  ]  # fmt: skip
