"""The reader of images: what nobody waits for any more is not read."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

import memory_vit as mv
from memory_vit.images import reader

VIEW = mv.EvalPreprocessing(image_size=4)


@pytest.mark.parametrize("ahead", [0, 1])
def test_interrupt_cancels_images_not_yet_begun(monkeypatch, ahead):
  """Else a command that was told to stop would read its whole batch first."""
  go_on, read = threading.Event(), []

  def prepare(image, preprocessing, memory):
    go_on.wait()
    read.append(image)
    return np.zeros((4, 4, 3), np.float32)

  def interrupted(self):
    raise KeyboardInterrupt

  monkeypatch.setattr(reader, "prepare_image", prepare)
  monkeypatch.setattr(reader, "THREADS", 2)
  images = reader.ImageReader(8, 50, 4, ahead=ahead)
  monkeypatch.setattr(Future, "result", interrupted)
  with pytest.raises(KeyboardInterrupt):
    next(images.read_ahead([(0, ["a"] * 50), (1, ["b"] * 50)], VIEW))
  with pytest.raises(KeyboardInterrupt):
    images.each(["c"] * 50, VIEW)
  go_on.set()
  images._threads.shutdown()
  assert len(read) <= 2  # one for each thread
