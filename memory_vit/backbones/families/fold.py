"""Arrays of PyTorch in our layout, and constants folded into layers.

Letters as in `model/vit_config.py`, and p the side of a patch. All arrays are
float32; what is folded is computed in float64 and rounded once.
"""

import numpy as np

from memory_vit.backbones.families.converted import Rgb


def linear_kernel(weight: np.ndarray) -> np.ndarray:
  """torch.nn.Linear (out, in) -> kernel (in, out)."""
  return weight.T


def conv_kernel(weight: np.ndarray) -> np.ndarray:
  """torch.nn.Conv2d (d, 3, p, p) -> kernel (p, p, 3, d)."""
  return weight.transpose(2, 3, 1, 0)


def heads_kernel(weight: np.ndarray, heads: int) -> np.ndarray:
  """Linear of query, key or value (h k, d) -> kernel (d, h, k)."""
  return weight.T.reshape(weight.shape[1], heads, -1)


def heads_bias(bias: np.ndarray, heads: int) -> np.ndarray:
  """Bias of query, key or value (h k) -> (h, k)."""
  return bias.reshape(heads, -1)


def out_kernel(weight: np.ndarray, heads: int) -> np.ndarray:
  """Linear after attention (d, h k) -> kernel (h, k, d)."""
  return weight.T.reshape(heads, -1, weight.shape[0])


def fold_normalization(
  kernel: np.ndarray, bias: np.ndarray, mean: Rgb, std: Rgb
) -> tuple[np.ndarray, np.ndarray]:
  """Make a patch embedding take images in [-1, 1].

  It was trained on (x - mean) / std of images x in [0, 1]. Patches are not
  padded, so that a constant of the images is a constant of the outputs.

  Args:
    kernel: (p, p, 3, d).
    bias: (d,).
    mean: of x.
    std: of x, above zero.

  Returns:
    The kernel and the bias; to the bit those given for 0.5 and 0.5.
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
  kernel: np.ndarray, bias: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Multiply the outputs of a linear layer by constants.

  Args:
    kernel: (..., d).
    bias: (d,).
    gamma: (d,), of what is called LayerScale.
  """
  wide = gamma.astype(np.float64)
  broad = wide.reshape((1,) * (kernel.ndim - 1) + (-1,))
  return (kernel * broad).astype(np.float32), (bias * wide).astype(np.float32)
