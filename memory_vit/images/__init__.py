"""Decode images and prepare them for a model, without TensorFlow."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.images.decoding import decode
  from memory_vit.images.image_files import find_images
  from memory_vit.images.reader import ImageReader
  from memory_vit.images.view import eval_view

__all__ = ["ImageReader", "decode", "eval_view", "find_images"]
