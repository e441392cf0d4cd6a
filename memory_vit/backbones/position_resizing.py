"""Interpolate position embeddings as each model family does it.

This uses numpy, because no JAX library has PyTorch's bicubic kernels.
"""

import numpy as np

# {interpolation: parameter a of the cubic convolution kernel (Keys 1981)}.
# PyTorch uses both values, and Pillow only -0.5.
_SHARPNESS = {"bicubic": -0.75, "bicubic_antialias": -0.5}


def resized(grid: np.ndarray, side: int, kind: str) -> np.ndarray:
  """Resize a square grid (old, old, d) to (side, side, d), float32."""
  old = len(grid)
  if kind == "bilinear":
    import scipy.ndimage  # imported here, because it takes 1/6 second

    return scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1)
  weights = cubic_weights(old, side, kind)
  wide = np.einsum("xi,ijd->xjd", weights, grid.astype(np.float64))
  wide = np.einsum("yj,xjd->xyd", weights, wide)
  return wide.astype(np.float32)


def cubic_weights(old: int, new: int, kind: str) -> np.ndarray:
  """Return weights (new, old) that resample a line of old cells to new cells.

  With antialiasing, the kernel is wider if the new cells are larger, and there
  are no cells beyond the ends of the line. Without antialiasing, the first and
  the last cell are repeated beyond the ends.
  """
  antialias = kind == "bicubic_antialias"
  scale = old / new
  width = max(scale, 1.0) if antialias else 1.0
  centers = (np.arange(new) + 0.5) * scale - 0.5
  # Extend the line at both ends, so that no kernel reaches beyond `points`.
  margin = int(2 * width) + 2
  points = np.arange(-margin, old + margin)
  weights = _cubic((points[None] - centers[:, None]) / width, _SHARPNESS[kind])
  if antialias:
    inside = weights[:, margin : margin + old]
    return inside / inside.sum(axis=1, keepdims=True)
  nearest = np.clip(points, 0, old - 1)
  return weights @ np.eye(old)[nearest]


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
  """Return values of the cubic convolution kernel with parameter `a`."""
  x = np.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
