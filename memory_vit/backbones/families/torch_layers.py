"""Layers of PyTorch models: their weights, taken by name, as trees of ours.

A layer is described by where its weights stand in the source; what it becomes
is a nested dictionary with the names of our tree.
"""

from typing import NamedTuple

import numpy as np

from memory_vit.backbones.families import fold
from memory_vit.backbones.families.converted import Weights
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig


class Linear(NamedTuple):
  """A torch.nn.Linear.

  Attributes:
    weight: (out, in).
    bias: (out,).
  """

  weight: np.ndarray
  bias: np.ndarray


def layer_norm(weights: Weights, name: str, width: int) -> Tree:
  """A torch.nn.LayerNorm."""
  return {
    "scale": weights.take(f"{name}.weight", (width,)),
    "bias": weights.take(f"{name}.bias", (width,)),
  }


def linear(
  weights: Weights, name: str, inputs: int, outputs: int, *, bias: bool = True
) -> Linear:
  """Take a torch.nn.Linear; a bias that the layer has not is zero."""
  return Linear(
    weights.take(f"{name}.weight", (outputs, inputs)),
    weights.take(f"{name}.bias", (outputs,))
    if bias
    else np.zeros(outputs, np.float32),
  )


def split(stacked: Linear, parts: int) -> list[Linear]:
  """Split a layer whose outputs are those of several, one after the other."""
  return [
    Linear(weight, bias)
    for weight, bias in zip(
      np.split(stacked.weight, parts),
      np.split(stacked.bias, parts),
      strict=True,
    )
  ]


def dense(layer: Linear, scale: np.ndarray | None = None) -> Tree:
  """A linear layer, and a LayerScale of its outputs folded in."""
  kernel, bias = fold.linear_kernel(layer.weight), layer.bias
  if scale is not None:
    kernel, bias = fold.fold_layer_scale(kernel, bias, scale)
  return {"kernel": kernel, "bias": bias}


def patch_embedding(
  weights: Weights, name: str, config: ViTConfig, *, bias: bool = True
) -> Tree:
  """A torch.nn.Conv2d over patches; a bias that it has not is zero."""
  p, d = config.patch_size, config.width
  kernel = weights.take(f"{name}.weight", (d, 3, p, p))
  return {
    "kernel": fold.conv_kernel(kernel),
    "bias": weights.take(f"{name}.bias", (d,))
    if bias
    else np.zeros(d, np.float32),
  }


def attention(
  qkv: list[Linear],
  out: Linear,
  heads: int,
  scale: np.ndarray | None = None,
) -> Tree:
  """Attention of the layers of query, key and value, and the one after it.

  Args:
    qkv: the three.
    out: what mixes the heads.
    heads: the number of heads, which lie one after the other in the outputs.
    scale: LayerScale of the outputs.
  """
  tree: Tree = {
    name: {
      "kernel": fold.heads_kernel(layer.weight, heads),
      "bias": fold.heads_bias(layer.bias, heads),
    }
    for name, layer in zip(("query", "key", "value"), qkv, strict=True)
  }
  kernel, bias = fold.out_kernel(out.weight, heads), out.bias
  if scale is not None:
    kernel, bias = fold.fold_layer_scale(kernel, bias, scale)
  return {**tree, "out": {"kernel": kernel, "bias": bias}}


def mlp(
  first: Linear,
  second: Linear,
  *,
  gate: Linear | None = None,
  scale: np.ndarray | None = None,
) -> Tree:
  """Two layers, a gate for the first, and LayerScale of the outputs."""
  tree = {"Dense_0": dense(first), "Dense_1": dense(second, scale)}
  return tree if gate is None else {**tree, "gate": dense(gate)}
