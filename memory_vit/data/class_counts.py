"""Count the examples of each class in a split."""

import logging

import numpy as np

from memory_vit.data import sources
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.reader import Reader

logger = logging.getLogger(__name__)


def class_counts(reader: Reader) -> np.ndarray:
  """How many examples of each class a split has.

  Every record is read, and no image is decoded. Records that cannot be read do
  not count; images that turn out to be broken once they are decoded do.

  Returns:
    int64 (c,).

  Raises:
    BrokenDataError: for a label that is no class, or more unreadable examples
      than may be.
  """
  source = reader.source
  if source.embedded and source.labels is not None:
    return np.bincount(source.labels, minlength=reader.num_classes)
  logger.info("counting the classes of %d examples", reader.size)
  counts = np.zeros(reader.num_classes, np.int64)
  labels = reader.each(lambda index: source.fetch(index)[1])
  for index, label in enumerate(labels):
    if isinstance(label, tf.errors.OpError):
      reader.mark_unreadable({index: sources.reason_of(label)})
    elif index not in reader.unreadable:
      # Its only row is that example.
      source.check_labels(np.atleast_1d(label), [index].__getitem__)
      counts[label] += 1
  return counts
