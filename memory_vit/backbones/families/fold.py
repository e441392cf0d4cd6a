"""Arrays of PyTorch in our layout, and constants folded into layers.

Letters as in `model/vit_config.py`, and p the side of a patch. All arrays are
float32; what is folded is computed in float64 and rounded once.
"""

import math

import numpy as np

Rgb = tuple[float, float, float]


def torch_shape(
  kernel: tuple[int, ...], bias: tuple[int, ...]
) -> tuple[int, ...]:
  """The shape of the weight of torch that becomes a kernel of ours.

  Args:
    kernel: (inputs..., outputs...), of patches (p, p, 3, d), or of a LayerNorm
      (d,), its scale.
    bias: (outputs...).

  Returns:
    (outputs, inputs) of a torch.nn.Linear, which has the heads one after the
    other; (d, 3, p, p) of a Conv2d; (d,) of a LayerNorm.
  """
  if len(kernel) == 4:
    return kernel[3], kernel[2], *kernel[:2]
  outputs = math.prod(bias)
  return (outputs,) if kernel == bias else (
    outputs, math.prod(kernel) // outputs
  )  # fmt: skip


def from_torch(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """A weight of torch as a kernel of ours; the inverse of `torch_shape`."""
  if weight.ndim == 4:
    return weight.transpose(2, 3, 1, 0)
  return weight.T.reshape(shape)


def to_torch(kernel: np.ndarray, bias: tuple[int, ...] | None) -> np.ndarray:
  """A kernel of ours as a weight of torch; without a bias as it is.

  The inverse of `from_torch`; `bias` is the shape of that of the layer.
  """
  if bias is None:
    return kernel
  if kernel.ndim == 4:
    return kernel.transpose(3, 2, 0, 1)
  return kernel.reshape(torch_shape(kernel.shape, bias)[::-1]).T


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
  weight: np.ndarray, bias: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Multiply the outputs of a torch.nn.Linear by constants.

  Args:
    weight: (outputs, inputs).
    bias: (outputs,).
    gamma: (outputs,), called LayerScale.
  """
  wide = gamma.astype(np.float64)
  scaled = (weight * wide[:, None], bias * wide)
  return scaled[0].astype(np.float32), scaled[1].astype(np.float32)
