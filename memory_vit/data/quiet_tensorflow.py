"""Import TensorFlow without messages on stderr, and without GPUs.

While TensorFlow is imported, its C++ code writes to stderr how it was built and
that it found no CUDA, whatever the log level is.
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
  """Remove TensorFlow's import messages from what the body writes to stderr."""
  sys.stderr.flush()
  stderr = os.dup(2)
  try:
    with tempfile.TemporaryFile() as captured:
      os.dup2(captured.fileno(), 2)
      try:
        yield
      finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        captured.seek(0)
        for line in captured:
          if not _SAID.fullmatch(line.rstrip(b"\n")):
            os.write(2, line)
  finally:
    os.close(stderr)


# Set TensorFlow's log level to 2, as commands do, unless the user set a level.
# Level 1 does not count as set by the user, because JAX sets this level.
if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

if "tensorflow" not in sys.modules:
  progress_bar.announce("importing TensorFlow, which takes some seconds")

with without_remarks():
  import tensorflow as tf
  import tensorflow_datasets as tfds

  # Hide GPUs from TensorFlow, which would take the GPU memory that JAX needs.
  # Hiding fails if a notebook has already used TensorFlow: then only warn.
  try:
    tf.config.set_visible_devices([], "GPU")
  except RuntimeError as problem:
    logger.warning(
      "GPUs cannot be hidden from TensorFlow any more: %s", problem
    )

__all__ = ["tf", "tfds", "without_remarks"]
