"""What a study found about what is paid: parameters and operations."""

import dataclasses
from collections.abc import Sequence

from memory_vit.config import Config
from memory_vit.model.vit_config import ViTConfig, vit_config
from memory_vit.study import costs as costs_lib
from memory_vit.study import paper_numbers, runs, wording
from memory_vit.study.analysis import Finding
from memory_vit.study.costs import Cost
from memory_vit.study.selection import Point
from memory_vit.study.wording import choice_of, compared, label


def adapters(
  config: Config, vit: ViTConfig, points: Sequence[Point]
) -> Finding:
  """Memory beside bottleneck adapters."""
  count, r = config.task.cells, config.task.bottleneck
  regimes = runs.regimes_of(config, "adapters")
  rows, trained = [], {}
  for regime in regimes:
    m = 0 if regime == "adapter" else count
    choice = choice_of(config, points, regime, m)
    accuracy, parameters = paper_numbers.ADAPTERS[regime]
    trained[regime] = costs_lib.parameters(vit, regime, m, r)
    rows.append(
      {
        "regime": regime,
        "cells": m or None,
        **wording.columns(choice),
        "parameters": choice and choice.parameters,
        "without head": trained[regime],
        "paper, i-Naturalist": accuracy,
        "paper's parameters, no head": parameters,
      }
    )
  d, l = vit.width, vit.depth
  weights = 4 * d * r * l
  biases = 2 * (r + d) * l
  memory, adapter = ("memory", count), ("adapter", 0)
  both = ("adapter_memory", count)
  pairs = ((memory, adapter), (both, adapter), (both, memory))
  said = [*compared(config, points, pairs)]
  if "memory" in trained:
    said.append(
      f"{label(*memory)} trains {trained['memory']:,} parameters beside the "
      f"head, adapter {trained['adapter']:,}: "
      f"{trained['adapter'] / trained['memory']:.1f} times as many."
    )
  return Finding(
    title=f"Adapters of bottleneck {r}, and memory of {count} cells",
    rows=rows,
    sentences=tuple(said),
    notes=(
      wording.REPORTED,
      wording.how_chosen(config, regimes),
      *wording.at_an_end(config, wording.labelled(rows)),
      "`parameters` are all that are trained, the head among them.",
      "The paper counts 3072 * 5 * 4 * 12 = 737 K parameters of adapters: four "
      "matrices of 3072 x 5 in each of 12 blocks, 3072 being the hidden width "
      "of the MLP of a B/32. Ours are those of Houlsby et al., after attention "
      "and after the MLP, where tokens are as wide as the model: four matrices "
      f"of {d} x {r} in each of {l} blocks, {weights:,}, and {biases:,} biases "
      "(184,320 and 18,552 on a B/32 with bottleneck 5).",
    ),
  )


def costs(vit: ViTConfig, found: Sequence[Cost], plain: int) -> Finding:
  """Parameters and operations, by formula and as compiled.

  Args:
    vit: the backbone.
    found: one for every regime.
    plain: operations of the plain ViT, by formula.
  """
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
    for cost in found
  ]
  dearest = max(found, key=lambda cost: cost.flops)
  ratios = [c.flops_xla / c.flops for c in found if c.flops_xla]
  xla = (
    f"XLA counts {min(ratios):.3f} to {max(ratios):.3f} times the formulas."
    if ratios
    else "XLA did not say what it counts."
  )
  return Finding(
    title=f"Parameters and operations on {vit.variant}, {vit.image_size} px",
    rows=rows,
    sentences=(
      f"The most is computed by {dearest.regime}, "
      f"{dearest.flops / plain:.3f} times the plain ViT.",
      xla,
    ),
    notes=(
      f"Without heads, which have {vit.width + 1:,} parameters for a class. "
      "Operations of a forward pass for one picture, a multiplication with its "
      "addition being 2. `once a batch` is a part of them: keys and values of "
      "memory depend on no picture.",
      "The formulas count products of matrices; XLA counts all of its compiled "
      "program, which its backend has fused as it does.",
      _beside_table5(),
    ),
  )


def _beside_table5() -> str:
  """The paper's Table 5, and what the formulas give in its place."""
  cells, b32 = 5, vit_config("B/32")
  plain, _ = costs_lib.flops(b32, "head", 0, 0)

  def more(vit: ViTConfig) -> float:
    """MFLOP of the attention to memory, for a picture."""
    without, _ = costs_lib.flops(vit, "memory", 0, 0)
    return (costs_lib.flops(vit, "memory", cells, 0)[0] - without) / 1e6

  masked, once = costs_lib.flops(b32, "memory_masked", cells, 0)
  full = costs_lib.backbone_parameters(b32)
  blocks = full - costs_lib.backbone_parameters(
    dataclasses.replace(b32, depth=0)
  )
  return (
    "The paper's Table 5, for B/32: full 80 M parameters, head 768 k for k "
    "classes, class token 768, memory 768 * 12 * 5; about 25 MFLOP more with "
    f"memory. By our formulas full are {full / 1e6:.1f} M, "
    f"{blocks / 1e6:.1f} M of them in the 12 blocks; and 50 tokens that attend "
    f"to 5 more keys take 4 * 50 * 5 * 768 * 12 = {more(b32):.1f} MFLOP a "
    "picture, the keys and values of memory 4 * 5 * 768^2 * 12 = "
    f"{once / 1e6:.1f} MFLOP once a batch (with the mask, which adds a token, "
    f"{(masked - plain) / 1e6:.1f} and the same {once / 1e6:.1f}), or half of "
    "that where a multiplication with its addition is one operation. None of "
    "these is 25, and the table does not say what it counts: the attention "
    "alone, which a cached memory leaves, comes near it on an L/32 "
    f"({more(vit_config('L/32')):.1f}) or at 384 px "
    f"({more(vit_config('B/32', image_size=384)):.1f})."
  )
