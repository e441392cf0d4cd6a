"""Measure the peak memory of a training step, in a process of its own.

The number is what a step needs in addition to one copy of the weights and one
batch of images: trained parameters beside those weights, optimizer slots,
gradients, and everything alive in between. It is the sum of

- the bytes of the training state, without the copy of the weights that full
  fine-tuning has in it, and
- the rise of memory in three steps above the level between steps.

So the second copy of the weights in this benchmark, and memory left by
compilation, are not included. The level is, on an accelerator, that of jax's
allocator. Its peak cannot be reset, and autotuning during compilation would
raise it, so the process runs twice, the second time with the compilation cache
of the first. On CPU it is the resident set, whose peak can be reset on Linux
only; on other systems there is no number.

The parent must not use the device, which may allow only one process.
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

TRAININGS = {
  "train_1": lambda setting: workloads.training(setting, 1),
  "masked_sequence_train_1": (
    lambda setting: workloads.masked_training(setting, 1)
  ),
  "full_finetune": workloads.full_finetuning,
}


class Peak(NamedTuple):
  """Bytes, or None if unknown; and how they were measured, or why not."""

  bytes: int | None
  how: str


def in_process(arguments: Sequence[str], what: str) -> Peak:
  """Run `measure` in a fresh process of `benchmarks.passes`."""
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
  if done.returncode:  # for example, out of memory
    return Peak(None, f"the process ended with {done.returncode}")
  return Peak(*json.loads(done.stdout.splitlines()[-1]))


def measure(setting: workloads.Setting, what: str) -> Peak:
  """Take steps in this process, as the module says."""
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
  """Bytes in use; resets the peak if possible."""
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
