"""Prepare images for `mv.forward`, from files or arrays, as in evaluation."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from memory_vit.errors import DataError, TaskError
from memory_vit.images import reader
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import schema
from memory_vit.tasks.compose import (
  TasksLike,
  require_same_images,
  task_tuple,
)
from memory_vit.tasks.slots import Slots


def preprocess(
  images: reader.Images,
  task: TasksLike | Slots | EvalPreprocessing,
  *,
  memory_mib: int = 2048,
) -> Float32[np.ndarray, "*b side side 3"]:
  """Prepare images for `forward`, as for the evaluation of the task.

  The result is bitwise identical to that of evaluation and of the command
  `predict`, with the same limits: 64 MiB, 64 megapixels, 16,384 pixels a side.

  Args:
    images: one image, or several. An image is the path of a JPEG, PNG, WebP,
      BMP or GIF file; the bytes of such a file; or uint8 pixels: RGB (h, w, 3),
      grey (h, w) or (h, w, 1), or RGBA (h, w, 4). Alpha is dropped, as for
      files. An array (b, h, w, 3) is several images.
    task: what the images are for: a task; tasks or slots that share a pass; or
      an `EvalPreprocessing`. side is the `image_size` of the preprocessing.
    memory_mib: MiB for images that are decoded at the same time; an image that
      alone needs more is refused.

  Returns:
    Values in [-1, 1]: (side, side, 3) for one image, (b, side, side, 3) for
    several.

  Raises:
    DataError: if an image cannot be read, with the reason.
    TaskError: if tasks need different preprocessing.
  """
  preprocessing = _preprocessing_of(task)
  memory_mib = schema.whole_number("memory_mib", memory_mib, 1, DataError)
  side = preprocessing.image_size
  # With batch size 0, no memory is reserved for the returned images.
  results = reader.ImageReader(memory_mib, 0, side).each(images, preprocessing)
  if not results:
    raise DataError("there is no image to prepare.")
  prepared = reader.stacked(results, side)
  return prepared if reader.are_several(images) else prepared[0]


def _preprocessing_of(
  task: TasksLike | Slots | EvalPreprocessing,
) -> EvalPreprocessing:
  if isinstance(task, EvalPreprocessing):
    return task
  if isinstance(task, Slots):
    specs = list(task.specs)
  else:
    specs = [task.spec for task in task_tuple(task)]
  if not specs:
    raise TaskError(
      "there is no task to prepare images for; to prepare them without a task, "
      "give EvalPreprocessing(image_size=...)."
    )
  require_same_images(specs)
  return specs[0].preprocessing
