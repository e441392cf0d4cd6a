"""Pictures for `inference.forward`, from files or arrays, as in evaluation.

TensorFlow decodes and resizes; it is imported when it is first needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, UInt8

from memory_vit.errors import DataError, TaskError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.tasks.compose import (
  TasksLike,
  require_same_pictures,
  task_tuple,
)
from memory_vit.tasks.slots import Slots

# A file, the content of one, or pixels.
PictureLike = str | os.PathLike[str] | bytes | np.ndarray | jax.Array
# The same, as isinstance takes it.
_ONE_PICTURE = (str, os.PathLike, bytes, np.ndarray, jax.Array)


def preprocess(
  pictures: PictureLike | Iterable[PictureLike],
  task: TasksLike | Slots | EvalPreprocessing,
) -> Float32[np.ndarray, "*b side side 3"]:
  """Prepare pictures for `forward`, as the task was evaluated.

  To the bit what evaluation and the command `predict` see of the same file,
  with the same limits: 64 MiB, 64 megapixels, 16,384 pixels a side.

  Args:
    pictures: one picture, or several. A picture is the path of a JPEG, PNG,
      WebP, BMP or GIF file; the bytes of one; or uint8 pixels of 0 to 255:
      (h, w, 3), grey (h, w) or (h, w, 1), or (h, w, 4), of which alpha is
      dropped, as of files.
    task: whose preprocessing is taken: a task, tasks or slots that share a
      pass, or an `EvalPreprocessing`; side is its `image_size`.

  Returns:
    Values in [-1, 1]: (side, side, 3) of one picture, (b, side, side, 3) of
    several.

  Raises:
    DataError: for what cannot be read, and says which and why.
    TaskError: where tasks want pictures prepared differently.
    ImportError: where TensorFlow is not installed.
  """
  evaluation = _evaluation_of(task)
  reading = _reading()

  def prepared(
    picture: Any, number: str = ""
  ) -> Float32[np.ndarray, "side side 3"]:
    try:
      return _prepared(reading, picture, evaluation)
    except DataError as error:
      raise DataError(f"picture{number} {_shown(picture)}: {error}") from error

  if isinstance(pictures, _ONE_PICTURE) or not isinstance(pictures, Iterable):
    return prepared(pictures)
  if isinstance(pictures, Mapping):
    raise DataError("pictures are a dictionary, expected a picture or a list.")
  several = list(pictures)
  if not several:
    raise DataError("there is no picture to prepare.")
  with ThreadPoolExecutor(reading.THREADS) as pool:
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
      "there is no task to prepare pictures for; where there shall be none, "
      "give EvalPreprocessing(image_size=...)."
    )
  require_same_pictures(specs)
  return specs[0].evaluation


def _reading() -> ModuleType:
  """The module that brings TensorFlow."""
  try:
    from memory_vit.data import image_files
  except ModuleNotFoundError as error:
    raise ImportError(
      f"mv.preprocess needs {error.name}, which is not installed: pictures are "
      "decoded and resized by TensorFlow, as in training. Install the packages "
      "of requirements.txt (tensorflow-cpu, or tensorflow on a Mac)."
    ) from error
  return image_files


def _prepared(
  reading: ModuleType, picture: Any, evaluation: EvalPreprocessing
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare one picture.

  Raises:
    DataError: says why not.
  """
  if isinstance(picture, np.ndarray | jax.Array):
    return reading.prepare_pixels(_rgb(np.asarray(picture)), evaluation)
  if isinstance(picture, str | os.PathLike):
    picture = reading.file_content(os.fspath(picture))
  if not isinstance(picture, bytes):
    raise DataError(
      "expected a path, the bytes of a file, or a uint8 array; of a picture of "
      "Pillow, np.asarray(picture.convert('RGB'))"
    )
  return reading.prepare_encoded(picture, evaluation)


def _rgb(pixels: np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
  """Grey and alpha as decoding treats them.

  Raises:
    DataError: for other shapes and types.
  """
  channels = pixels.shape[2] if pixels.ndim == 3 else 1
  if (
    pixels.dtype != np.uint8
    or pixels.ndim not in (2, 3)
    or channels not in (1, 3, 4)
    or pixels.size == 0
  ):
    raise DataError(
      "expected uint8 pixels of 0 to 255 of shape (h, w, 3), (h, w), (h, w, 1) "
      "or (h, w, 4), or a list of such arrays"
    )
  if channels == 1:
    return np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
  return pixels[:, :, :3]


def _shown(picture: Any) -> str:
  """Name of a picture in a message."""
  if isinstance(picture, str | os.PathLike):
    return repr(os.fspath(picture))
  if isinstance(picture, np.ndarray | jax.Array):
    return f"{picture.dtype} {picture.shape}"
  if isinstance(picture, bytes):
    return f"of {len(picture)} bytes"
  return f"of type {type(picture).__name__}"
