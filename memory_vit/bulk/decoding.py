"""Decode images in threads, within a limit of memory; errors are values."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from memory_vit.errors import ConfigError, DataError
from memory_vit.images import image_files
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.images.preparation import prepare_image
from memory_vit.model.task import EvalPreprocessing

# Batches that are decoded while the device has another one.
AHEAD = 2
# Those, the one that is being made, that of the device, and its copy there.
_BATCHES = AHEAD + 3
_MIB = 2**20


class Decoder:
  """Prepares encoded images for a model."""

  def __init__(
    self, evaluation: EvalPreprocessing, batch_size: int, memory_mib: int
  ) -> None:
    """Share `memory_mib` among batches and what is decoded for them.

    Raises:
      ConfigError: where there is no room for the batches.
    """
    side = evaluation.image_size
    left = memory_mib * _MIB - _BATCHES * batch_size * side**2 * 3 * 4
    if left <= 0:
      raise ConfigError(
        f"{_BATCHES} batches of {batch_size} images of {side} pixels a side do "
        f"not fit into {memory_mib} MiB: expected a smaller --batch_size, or a "
        "larger --memory_mib."
      )
    self._evaluation = evaluation
    self._memory = MemoryLimit(left)
    self._threads = ThreadPoolExecutor(image_files.THREADS, "decoding")

  def each(self, images: Sequence[str | bytes]) -> list[np.ndarray | DataError]:
    """Decode images, paths of files or their bytes.

    Returns:
      For each float32 (side, side, 3) in [-1, 1], or why that fails.
    """
    return list(self._threads.map(self._decoded, images))

  def _decoded(self, image: str | bytes) -> np.ndarray | DataError:
    most = image_files.MAX_FILE_BYTES
    if isinstance(image, bytes) and len(image) > most:
      return DataError(f"the image has more than {most // _MIB} MiB")
    try:
      return prepare_image(image, self._evaluation, self._memory)
    except DataError as error:
      return error
