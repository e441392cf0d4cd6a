"""Write parameters as a plain orbax checkpoint, for other JAX programs.

`orbax.checkpoint.StandardCheckpointer().restore(path)` returns a tree of NumPy
arrays. (A jax.Array is stored with its sharding, which cannot be restored on
other devices.) This package never reads such a checkpoint.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit.model import trees
from memory_vit.runtime import files

DIRECTORY = "orbax"


def write(tree: Mapping[str, Any], path: Path) -> None:
  """Write a tree to an absolute path, from this process alone.

  Empty arrays (a memory of 0 cells) are left out, because orbax refuses them.
  """
  import orbax.checkpoint as ocp  # slow to import

  flat = {name: np.asarray(a) for name, a in trees.flatten(tree).items()}
  filled = trees.unflatten({name: a for name, a in flat.items() if a.size})
  me = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=me,
    active_processes={me},
    barrier_sync_key_prefix=f"process{me}",
  )
  handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
  path.parent.mkdir(parents=True, exist_ok=True)
  with (
    without_tracebacks(),
    files.replacing_directory(path) as new,
    ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer,
  ):
    checkpointer.save(new, args=ocp.args.StandardSave(filled))


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
  """Silence the tracebacks that orbax prints when a save fails.

  Each thread of orbax logs a traceback, and tensorstore prints a traceback for
  each pending write: hundreds on a full disk. The error itself is still raised.
  """
  log, hook = logging.getLogger("absl"), sys.unraisablehook
  level = log.level

  def show_others(raised: Any) -> None:
    if "Event loop is closed" not in str(raised.exc_value):
      hook(raised)

  log.setLevel(logging.CRITICAL)
  sys.unraisablehook = show_others
  try:
    yield
    # Restore `hook` after a successful save only. After a failed save, pending
    # writes may raise errors later, and `show_others` hides their tracebacks.
    sys.unraisablehook = hook
  finally:
    log.setLevel(level)
