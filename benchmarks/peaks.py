"""Peak memory of a training step, each in a process of its own.

The number is what a step needs beside one copy of the weights and one batch of
images: the trained values that are no part of those weights, the slots of the
optimiser, gradients, and whatever is alive in between. It is the sum of

- the bytes of the training state, without the copy of the weights that full
  fine-tuning holds in it, and
- how far memory rises in three steps above what is in use between steps.

So neither the second copy of the weights that lies around in this benchmark nor
what compiling left behind is charged to anyone. In use is, on an accelerator,
what jax's allocator says. Its peak cannot be reset, and choosing kernels while
compiling would raise it: the process runs twice, and the second time finds its
programs in a cache of the first. On CPU it is the resident set, whose peak can
be reset on Linux alone; on other systems there is no number.

The parent must not have touched the device: it may be one that a single process
can use.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import workloads

ROOT = Path(__file__).resolve().parent.parent
RESIDENT_SET = "resident set"
ALLOCATOR = "device allocator"
_CLEAR = Path("/proc/self/clear_refs")

# What can be measured, by name.
TRAININGS = {
  "train_1": lambda setting: workloads.training(setting, 1),
  "masked_sequence_train_1": (
    lambda setting: workloads.masked_training(setting, 1)
  ),
  "full_finetune": workloads.full_finetuning,
}


class Peak(NamedTuple):
  """Bytes, or None where they cannot be told; and how, or why not."""

  bytes: int | None
  how: str


def in_process(arguments: Sequence[str], what: str) -> Peak:
  """Has `passes` call `measure` in a fresh process.

  Args:
    arguments: of the command `benchmarks.passes`.
    what: a key of `TRAININGS`.
  """
  with tempfile.TemporaryDirectory() as cache:
    peak = _child(arguments, what, cache)
    if peak.how == ALLOCATOR:
      peak = _child(arguments, what, cache)
  return peak


def _child(arguments: Sequence[str], what: str, cache: str) -> Peak:
  environment = {
    **os.environ,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  command = [sys.executable, "-m", "benchmarks.passes", *arguments]
  done = subprocess.run(
    [*command, f"--peak={what}"],
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=environment,
  )
  if done.returncode:  # for example too little memory for full fine-tuning
    return Peak(None, f"the process ended with {done.returncode}")
  return Peak(*json.loads(done.stdout.splitlines()[-1]))


def measure(setting: workloads.Setting, what: str) -> Peak:
  """Take steps in this process; see the top of the file."""
  if not _can_measure():
    return Peak(None, f"no peak of the resident set on {sys.platform}")
  train = TRAININGS[what](setting)
  jax.block_until_ready(train())  # compiles
  state = _size(train.state)
  if what == "full_finetune":
    state -= _size(setting.backbone.params)
  idle = _forget_peak()
  for _ in range(3):
    jax.block_until_ready(train())
  how = ALLOCATOR if _device_stats() else RESIDENT_SET
  return Peak(state + _peak_so_far() - idle, how)


def _size(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _can_measure() -> bool:
  return bool(_device_stats()) or _CLEAR.exists()


def _device_stats() -> dict[str, int] | None:
  return jax.devices()[0].memory_stats()


def _forget_peak() -> int:
  """Bytes in use; peaks so far are forgotten where that is possible."""
  stats = _device_stats()
  if stats:
    return stats["bytes_in_use"]
  ctypes.CDLL(None).malloc_trim(0)
  _CLEAR.write_text("5", encoding="ascii")
  return _status("VmRSS")


def _peak_so_far() -> int:
  stats = _device_stats()
  return stats["peak_bytes_in_use"] if stats else _status("VmHWM")


def _status(field: str) -> int:
  """A field of /proc/self/status, in bytes."""
  lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
  (line,) = [line for line in lines if line.startswith(f"{field}:")]
  return int(line.split()[1]) * 1024
