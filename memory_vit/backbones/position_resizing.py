"""Interpolate position embeddings as each model family does it.

In numpy: no JAX library has PyTorch's bicubic kernels.
"""

import numpy as np

# The parameter of the cubic kernel (Keys 1981) of PyTorch, without antialiasing
# and with it (also of Pillow).
_SHARPNESS = {"bicubic": -0.75, "bicubic_antialias": -0.5}


def resized(grid: np.ndarray, side: int, kind: str) -> np.ndarray:
  """Resize a square grid (old, old, d) to (side, side, d), float32."""
  old = len(grid)
  if kind == "bilinear":
    import scipy.ndimage  # takes a sixth of a second

    return scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1)
  weights = cubic_weights(old, side, kind)
  wide = np.einsum("xi,ijd->xjd", weights, grid.astype(np.float64))
  wide = np.einsum("yj,xjd->xyd", weights, wide)
  return wide.astype(np.float32)


def cubic_weights(old: int, new: int, kind: str) -> np.ndarray:
  """The weights (new, old) of the old points of a line in each new point.

  Points are the centers of cells. With antialiasing the kernel is as wide as
  the new cells if these are larger, and points outside of the line have no
  weight; without, the outermost point is repeated.
  """
  antialias = kind == "bicubic_antialias"
  scale = old / new
  width = max(scale, 1.0) if antialias else 1.0
  centers = (np.arange(new) + 0.5) * scale - 0.5
  # More points than any kernel reaches; most have weight 0.
  margin = int(2 * width) + 2
  points = np.arange(-margin, old + margin)
  weights = _cubic((points[None] - centers[:, None]) / width, _SHARPNESS[kind])
  if antialias:
    inside = weights[:, margin : margin + old]
    return inside / inside.sum(axis=1, keepdims=True)
  nearest = np.clip(points, 0, old - 1)
  return weights @ np.eye(old)[nearest]


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
  """The cubic convolution kernel."""
  x = np.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
