"""Call Python in a graph of TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memory_vit.data.quiet_tensorflow import tf


def call(
  function: Callable[..., Any],
  inputs: Sequence[tf.Tensor],
  dtypes: Sequence[tf.DType | np.dtype],
) -> list[tf.Tensor]:
  """Call Python as `tf.numpy_function` does, but log no tracebacks.

  TensorFlow logs a traceback whenever Python raises, for example in every epoch
  for a broken image. So Python returns the reason of an error, and an assertion
  raises `InvalidArgumentError` with this reason, also in eager mode.
  """

  def attempt(*arguments: Any) -> list[Any]:
    try:
      result = function(*arguments)
      return [b"", *(result if len(dtypes) > 1 else [result])]
    except Exception as error:  # a user's data set may raise any error
      reason = str(error) or type(error).__name__
      return [reason.encode("utf-8", "backslashreplace"), *map(_empty, dtypes)]

  if tf.executing_eagerly():
    tensors = map(tf.convert_to_tensor, inputs)
    reason, *outputs = attempt(*(tensor.numpy() for tensor in tensors))
    if reason:
      raise tf.errors.InvalidArgumentError(None, None, reason.decode())
    return [*map(tf.constant, outputs, dtypes)]
  reason, *outputs = tf.numpy_function(attempt, inputs, [tf.string, *dtypes])
  with tf.control_dependencies([tf.debugging.Assert(reason == "", [reason])]):
    return [tf.identity(tensor) for tensor in outputs]


def _empty(dtype: tf.DType | np.dtype) -> Any:
  if dtype == tf.string:
    return b""
  return np.zeros((), tf.as_dtype(dtype).as_numpy_dtype)
