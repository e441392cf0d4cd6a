"""Apply a function to the elements of a tf.data data set, in parallel."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.source import ExampleError

# In front of what an operation of TensorFlow says of an image.
_AROUND = re.compile(
  r"Error in user-defined function .* iterator: \S+: "
  r"(jpeg::Uncompress failed\. )?"
)
# Of `python_op`, and of other assertions.
_ASSERTED = re.compile(r"assertion failed: \[(.*)\]")
# As `images.decoding` says it.
_BROKEN = re.compile(r"Invalid (JPEG|PNG)\b.*")


def parallel_map(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> tf.data.Dataset:
  # The thread of autotuning sleeps for 1, 2, 4, ... up to 60 seconds, and an
  # iterator that is closed waits until it wakes.
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset.map(
    make, num_parallel_calls=os.cpu_count(), deterministic=True
  ).with_options(options)


def attempts(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> Iterator[Any | ExampleError]:
  """Yield what `make` returns, as NumPy arrays, or the error in its place."""
  # Not for a reader of files: it could fail at the same place again and again.
  elements = parallel_map(dataset, make).as_numpy_iterator()
  for _ in range(len(dataset)):
    try:
      yield next(elements)
    except tf.errors.OpError as error:
      yield ExampleError(reason_of(error))


def reason_of(error: Exception) -> str:
  """The message of a reader or of TensorFlow in one line, without its nodes."""
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  text = re.sub(r"\s*\[\[\{\{.*?\}\}\]\]|\{\{.*?\}\}|\[Op:.*", "", text)
  if asserted := _ASSERTED.search(text):
    # As in C, other bytes than ASCII are octal there.
    text = asserted[1].encode("ascii", "ignore").decode("unicode_escape")
    text = text.encode("latin-1", "ignore").decode("utf-8", "replace")
    return " ".join(text.split()).strip(".")
  lines = text.strip().splitlines() or [type(error).__name__]
  line = _AROUND.sub("", lines[0])
  return _BROKEN.sub(r"not a whole \1 file", line).strip(" .")
