"""Apply a function to the elements of a tf.data data set, in parallel."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.source import ExampleError

# Pattern of the text that TensorFlow puts before the error of an operation.
_AROUND = re.compile(
  r"Error in user-defined function .* iterator: \S+: "
  r"(jpeg::Uncompress failed\. )?"
)
# Pattern of the error of a failed `Assert`, for example in `python_op.call`.
_ASSERTED = re.compile(r"assertion failed: \[(.*)\]")
# Pattern of TensorFlow's error for a broken image. `reason_of` replaces this
# error by the words that `images.decoding` uses.
_BROKEN = re.compile(r"Invalid (JPEG|PNG)\b.*")


def parallel_map(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> tf.data.Dataset:
  # Disable autotuning: its thread sleeps for 1, 2, 4, ... up to 60 seconds, and
  # closing an iterator waits until that thread wakes.
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset.map(
    make, num_parallel_calls=os.cpu_count(), deterministic=True
  ).with_options(options)


def attempts(
  dataset: tf.data.Dataset, make: Callable[..., Any]
) -> Iterator[Any | ExampleError]:
  """Yield each result of `make`, as NumPy arrays, or an `ExampleError`."""
  # Only `make` may read files: after an error in `make`, `next` continues with
  # the next element. After an error in `dataset` itself, `next` could fail at
  # the same element again and again.
  elements = parallel_map(dataset, make).as_numpy_iterator()
  for _ in range(len(dataset)):
    try:
      yield next(elements)
    except tf.errors.OpError as error:
      yield ExampleError(reason_of(error))


def reason_of(error: Exception) -> str:
  """Describe an error in one line, without TensorFlow's graph node names."""
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  text = re.sub(r"\s*\[\[\{\{.*?\}\}\]\]|\{\{.*?\}\}|\[Op:.*", "", text)
  if asserted := _ASSERTED.search(text):
    # Decode the octal escapes that TensorFlow writes for non-ASCII bytes.
    text = asserted[1].encode("ascii", "ignore").decode("unicode_escape")
    text = text.encode("latin-1", "ignore").decode("utf-8", "replace")
    return " ".join(text.split()).strip(".")
  lines = text.strip().splitlines() or [type(error).__name__]
  line = _AROUND.sub("", lines[0])
  return _BROKEN.sub(r"not a whole \1 file", line).strip(" .")
