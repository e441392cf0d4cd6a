"""What an evaluation says of all outputs of a model."""

import numpy as np
from conftest import one_device

from memory_vit.evaluation import evaluate


def digest(*pixels):
  """Of the outputs on a batch of each value, which are the pixels."""
  batches = [
    {
      "image": np.full((2, 1, 1, 3), pixel, np.float32),
      "label": np.zeros(2, np.int32),
      "mask": np.ones(2, np.float32),
    }
    for pixel in pixels
  ]
  found = evaluate.evaluate(
    lambda images: {"a": images[:, 0, 0]},
    batches,
    one_device(),
    also=["digest"],
  )
  return found["a"].digest


def test_a_digest_is_over_all_batches_in_their_order():
  whole = digest(1, 2, 3)
  assert digest(1, 2, 3) == whole
  last = np.nextafter(np.float32(1), np.float32(2))
  others = [(last, 2, 3), (1, 2 + 1e-6, 3), (1, 2, 4), (2, 1, 3), (1, 2)]
  assert whole not in {digest(*other) for other in others}
