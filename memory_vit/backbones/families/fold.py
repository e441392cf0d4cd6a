"""Reorder PyTorch's weights, and fold constants into layers.

Dimension letters are those of `model/vit_config.py`; p is the side of a patch.
All arrays are float32; folding is computed in float64 and rounded once.
"""

import math

import numpy as np

Rgb = tuple[float, float, float]


def torch_shape(
  kernel: tuple[int, ...], bias: tuple[int, ...]
) -> tuple[int, ...]:
  """Return the shape of the PyTorch weight that becomes a kernel of ours.

  A patch embedding (p, p, 3, d) has the weight (d, 3, p, p), and a LayerNorm
  (d,). All other layers have (outputs, inputs), with flattened heads.
  """
  if len(kernel) == 4:
    return kernel[3], kernel[2], *kernel[:2]
  outputs = math.prod(bias)
  return (outputs,) if kernel == bias else (
    outputs, math.prod(kernel) // outputs
  )  # fmt: skip


def from_torch(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Convert a PyTorch weight to our kernel, which has the shape `shape`."""
  if weight.ndim == 4:
    return weight.transpose(2, 3, 1, 0)
  return weight.T.reshape(shape)


def to_torch(kernel: np.ndarray, bias: tuple[int, ...] | None) -> np.ndarray:
  """Invert `from_torch`; an array without a bias is returned unchanged."""
  if bias is None:
    return kernel
  if kernel.ndim == 4:
    return kernel.transpose(3, 2, 0, 1)
  return kernel.reshape(torch_shape(kernel.shape, bias)[::-1]).T


def fold_normalization(
  kernel: np.ndarray, bias: np.ndarray, mean: Rgb, std: Rgb
) -> tuple[np.ndarray, np.ndarray]:
  """Make a patch embedding take images in [-1, 1].

  The model was trained on (x - mean) / std of x in [0, 1]. Patches are not
  padded, so a constant shift of all pixels becomes a shift of the bias. A mean
  and std of 0.5 leave kernel and bias bitwise identical.
  """
  if {*mean, *std} == {0.5}:
    return kernel, bias
  scale = 0.5 / np.asarray(std, np.float64)
  shift = (0.5 - np.asarray(mean, np.float64)) / np.asarray(std, np.float64)
  wide = kernel.astype(np.float64)
  moved = bias + np.einsum("xycd,c->d", wide, shift)
  scaled = wide * scale[None, None, :, None]
  return scaled.astype(np.float32), moved.astype(np.float32)


def fold_layer_scale(
  weight: np.ndarray, bias: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Multiply the outputs of a torch.nn.Linear by constants (LayerScale)."""
  wide = gamma.astype(np.float64)
  scaled = (weight * wide[:, None], bias * wide)
  return scaled[0].astype(np.float32), scaled[1].astype(np.float32)
