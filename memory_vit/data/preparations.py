"""Preparations of images: random crops for training, or for evaluation.

Each has a version in TensorFlow, by `image_ops`, and in NumPy, by `numpy_ops`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.data import crop_sizes, numpy_ops

with epy.lazy_imports():  # TensorFlow is needed only for files
  from memory_vit.data import image_ops

if TYPE_CHECKING:
  import numpy as np
  import tensorflow as tf

  from memory_vit.config import DataConfig
  from memory_vit.model.task import EvalPreprocessing


@dataclasses.dataclass(frozen=True)
class EvalImage:
  """Preparation for evaluation: float32 (side, side, 3) in [-1, 1]."""

  preprocessing: EvalPreprocessing

  def in_graph(self, encoded: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
    return image_ops.eval_image(encoded, self.preprocessing)

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> np.ndarray:
    return numpy_ops.eval_image(encoded, self.preprocessing)


@dataclasses.dataclass(frozen=True)
class TrainCrop:
  """Random crop for training: float32 (side, side, 3) in [-1, 1].

  Attributes:
    data: options that say how images are cropped and mirrored.
    image_size: side of the square, in pixels.
    interpolation: method of evaluation, which `train_crop` "resize" also uses.

  Raises:
    ConfigError: if the crop is impossible.
  """

  data: DataConfig
  image_size: int
  interpolation: str = "bilinear"

  def __post_init__(self) -> None:
    if self.data.train_crop == "small":
      crop_sizes.shorter_side(self.data.resize, self.image_size)

  def in_graph(self, encoded: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
    return image_ops.train_image(
      encoded,
      uniforms,
      data=self.data,
      image_size=self.image_size,
      interpolation=self.interpolation,
    )

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> np.ndarray:
    return numpy_ops.train_image(
      encoded,
      uniforms,
      data=self.data,
      image_size=self.image_size,
      interpolation=self.interpolation,
    )


@dataclasses.dataclass(frozen=True)
class DecodedImage:
  """Decoding only: uint8 (h, w, 3), with a shorter side of at most `side`."""

  side: int

  def in_graph(self, encoded: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
    return image_ops.no_larger(image_ops.decode(encoded), self.side)

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> np.ndarray:
    return numpy_ops.no_larger(numpy_ops.decode(encoded), self.side)
