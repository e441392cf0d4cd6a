"""Rotary position embedding of patches, as in DINOv3 (arXiv:2508.10104)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from memory_vit.model.vit_config import ViTConfig

# Cosines and sines of the angles of every token: (s, k) each.
Rotation = tuple[Float32[np.ndarray, "s k"], Float32[np.ndarray, "s k"]]


def rotation(config: ViTConfig, before: int, after: int) -> Rotation | None:
  """Return the rotation of patches, and of tokens before and after patches."""
  if config.positions != "rope":
    return None
  # Only patches are rotated. In each head, half of the feature pairs rotate by
  # the patch's row, and half by its column; rows and columns are numbers in
  # [-1, 1]. The periods grow from 1 towards `rope_base`.
  side, quarter = config.image_size // config.patch_size, config.head_dim // 4
  centers = (2 * np.arange(side) + 1) / side - 1
  rows, columns = np.meshgrid(centers, centers, indexing="ij")
  places = np.stack([rows.ravel(), columns.ravel()], axis=1)  # (patches, 2)
  frequencies = config.rope_base ** -(np.arange(quarter) / quarter)
  angles = 2 * np.pi * places[:, :, None] * frequencies[None, None]
  angles = np.tile(angles.reshape(len(places), -1), 2)
  angles = np.pad(angles, ((before, after), (0, 0)))
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
  a: Float32[Array, "b s h k"], by: Rotation | None
) -> Float32[Array, "b s h k"]:
  """Rotate queries or keys; component i is paired with i + k / 2."""
  if by is None:
    return a
  cos, sin = (x[None, :, None] for x in by)
  first, second = jnp.split(a, 2, axis=-1)
  turned = jnp.concatenate([-second, first], axis=-1)
  return a * cos + turned * sin
