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
  """`tf.numpy_function` whose errors do not write a traceback.

  TensorFlow logs a traceback whenever Python raises: for a broken image, in
  every epoch. So the reason is returned, and an assertion raises it: an
  `InvalidArgumentError`, eagerly too.
  """

  def attempt(*arguments: Any) -> list[Any]:
    try:
      found = function(*arguments)
      return [b"", *(found if len(dtypes) > 1 else [found])]
    except Exception as error:  # also one of a user's data set
      reason = str(error) or type(error).__name__
      return [reason.encode("utf-8", "backslashreplace"), *map(_empty, dtypes)]

  if tf.executing_eagerly():
    tensors = map(tf.convert_to_tensor, inputs)
    reason, *found = attempt(*(tensor.numpy() for tensor in tensors))
    if reason:
      raise tf.errors.InvalidArgumentError(None, None, reason.decode())
    return [*map(tf.constant, found, dtypes)]
  reason, *found = tf.numpy_function(attempt, inputs, [tf.string, *dtypes])
  with tf.control_dependencies([tf.debugging.Assert(reason == "", [reason])]):
    return [tf.identity(tensor) for tensor in found]


def _empty(dtype: tf.DType | np.dtype) -> Any:
  if dtype == tf.string:
    return b""
  return np.zeros((), tf.as_dtype(dtype).as_numpy_dtype)
