"""Images for `mv.forward`, from files or arrays, as in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from memory_vit.errors import DataError, TaskError
from memory_vit.images import image_files
from memory_vit.images.preparation import (
  ONE_IMAGE,
  ImageLike,
  image_name,
  prepare_image,
)
from memory_vit.model.task import EvalPreprocessing
from memory_vit.tasks.compose import (
  TasksLike,
  require_same_images,
  task_tuple,
)
from memory_vit.tasks.slots import Slots


def preprocess(
  images: ImageLike | Iterable[ImageLike],
  task: TasksLike | Slots | EvalPreprocessing,
) -> Float32[np.ndarray, "*b side side 3"]:
  """Prepare images for `forward`, as the task was evaluated.

  To the bit what evaluation and the command `predict` see of the same file,
  with the same limits: 64 MiB, 64 megapixels, 16,384 pixels a side.

  Args:
    images: one image, or several. An image is the path of a JPEG, PNG,
      WebP, BMP or GIF file; the bytes of one; or uint8 pixels of 0 to 255:
      (h, w, 3), grey (h, w) or (h, w, 1), or (h, w, 4), of which alpha is
      dropped, as of files. An array (b, h, w, 3) is several.
    task: whose preprocessing is taken: a task, tasks or slots that share a
      pass, or an `EvalPreprocessing`; side is its `image_size`.

  Returns:
    Values in [-1, 1]: (side, side, 3) of one image, (b, side, side, 3) of
    several.

  Raises:
    DataError: for what cannot be read, and says which and why.
    TaskError: where tasks want images prepared differently.
  """
  evaluation = _evaluation_of(task)

  def prepared(
    image: Any, number: str = ""
  ) -> Float32[np.ndarray, "side side 3"]:
    try:
      return prepare_image(image, evaluation)
    except DataError as error:
      raise DataError(f"image{number} {image_name(image)}: {error}") from error

  if isinstance(images, np.ndarray | jax.Array) and images.ndim == 4:
    images = list(np.asarray(images))
  if isinstance(images, ONE_IMAGE) or not isinstance(images, Iterable):
    return prepared(images)
  if isinstance(images, Mapping):
    raise DataError("images are a dictionary, expected an image or a list.")
  several = list(images)
  if not several:
    raise DataError("there is no image to prepare.")
  with ThreadPoolExecutor(image_files.THREADS) as pool:
    numbers = (f" {i}," for i in range(len(several)))
    return np.stack(list(pool.map(prepared, several, numbers)))


def _evaluation_of(
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
      "there is no task to prepare images for; where there shall be none, "
      "give EvalPreprocessing(image_size=...)."
    )
  require_same_images(specs)
  return specs[0].evaluation
