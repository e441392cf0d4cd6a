"""TensorFlow, imported in silence and without GPUs.

While it is loaded, its C++ writes to the standard error how it was built and
that it found no CUDA: no level of logging leaves that out.
"""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from memory_vit.runtime import progress_bar

logger = logging.getLogger(__name__)

_SAID = re.compile(
  rb"WARNING: All log messages before absl::InitializeLog\(\).*"
  rb"|[A-Z]\d{4} \d\d:\d\d:\d\d\S* +\d+ (cudart_stub|cuda_platform"
  rb"|cuda_executor|cuda_diagnostics|port|computation_placer|cpu_feature_guard"
  rb"|cuda_(dnn|fft|blas))\.cc:\d+\] .*"
)


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
  """Leave remarks of TensorFlow out of the standard error of the body."""
  sys.stderr.flush()
  error = os.dup(2)
  try:
    with tempfile.TemporaryFile() as kept:
      os.dup2(kept.fileno(), 2)
      try:
        yield
      finally:
        sys.stderr.flush()
        os.dup2(error, 2)
        kept.seek(0)
        for line in kept:
          if not _SAID.fullmatch(line.rstrip(b"\n")):
            os.write(2, line)
  finally:
    os.close(error)


# As in commands; jax sets 1.
if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

if "tensorflow" not in sys.modules:
  progress_bar.announce("importing TensorFlow, which takes some seconds")

with without_remarks():
  import tensorflow as tf
  import tensorflow_datasets as tfds

  # It would take all memory of a GPU, which belongs to JAX. Where it has been
  # used before, as in a notebook, it is too late, and no reason to stop.
  try:
    tf.config.set_visible_devices([], "GPU")
  except RuntimeError as problem:
    logger.warning(
      "GPUs cannot be hidden from TensorFlow any more: %s", problem
    )

__all__ = ["tf", "tfds", "without_remarks"]
