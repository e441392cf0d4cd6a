"""Write parameters as a plain orbax checkpoint, for other programs of JAX.

`orbax.checkpoint.StandardCheckpointer().restore(path)` returns the tree of
NumPy arrays: jax.Array leaves would carry shardings, which another set of
devices refuses. This package never reads such a checkpoint.
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
  """Write a tree to an absolute path, by this process alone.

  Orbax refuses arrays without values (a memory of 0 cells): they are left out.
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
  """Silence what orbax prints in a save that fails.

  Each of its threads logs a traceback, and tensorstore prints another one for
  each write that is left, hundreds on a full disk. The error is raised as well.
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
    sys.unraisablehook = hook  # after an error, writes may be left
  finally:
    log.setLevel(level)
