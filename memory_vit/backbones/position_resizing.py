"""Interpolation of a grid of position embeddings, as each family does it.

In numpy: no JAX library has PyTorch's bicubic kernels.
"""

import numpy as np

# The parameter of the cubic kernel (Keys 1981): what PyTorch takes without
# antialiasing and, as Pillow, with it.
_SHARPNESS = {"bicubic": -0.75, "bicubic_antialias": -0.5}


def resized(grid: np.ndarray, side: int, kind: str) -> np.ndarray:
  """Resize a square grid.

  Args:
    grid: (old, old, d), float32.
    side: of the new grid.
    kind: `ViTConfig.position_resize`.

  Returns:
    (side, side, d), float32.
  """
  old = len(grid)
  if kind == "bilinear":
    import scipy.ndimage  # A sixth of a second.

    return scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1)
  weights = cubic_weights(old, side, kind)
  wide = np.einsum("xi,ijd->xjd", weights, grid.astype(np.float64))
  wide = np.einsum("yj,xjd->xyd", weights, wide)
  return wide.astype(np.float32)


def cubic_weights(old: int, new: int, kind: str) -> np.ndarray:
  """What each old point of a line contributes to each new one: (new, old).

  Points are the centers of cells. With antialiasing the kernel is as wide as
  the new cells where these are larger, and what lies outside of the line counts
  nothing; without, its outermost point stands for all that lies outside.
  """
  antialias = kind == "bicubic_antialias"
  scale = old / new
  width = max(scale, 1.0) if antialias else 1.0
  centers = (np.arange(new) + 0.5) * scale - 0.5
  # More points than any kernel reaches, of which most weigh nothing.
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
