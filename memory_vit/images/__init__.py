"""Image files and pixels to what a model takes, without TensorFlow."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.images.decoding import decode
  from memory_vit.images.image_files import (
    find_images,
    prepare_encoded,
    prepare_pixels,
    read_batches,
  )
  from memory_vit.images.view import eval_view

__all__ = [
  "decode",
  "eval_view",
  "find_images",
  "prepare_encoded",
  "prepare_pixels",
  "read_batches",
]
