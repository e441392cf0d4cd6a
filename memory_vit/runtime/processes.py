"""Collective operations of the processes of a run.

All processes must make the same calls in the same order, as jax requires.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime.messages import shortened

# Words that errors of jax contain if another process is gone.
_LOST = ("gloo", "nccl", "connection reset", "connection closed",
         "socket closed", "broken pipe", "coordination service", "heartbeat",
         "barrier")  # fmt: skip


def is_lost_partner(error: BaseException) -> bool:
  """Return whether an error of jax means that another process is gone."""
  if isinstance(error, MemoryVitError) or not isinstance(
    error, RuntimeError | ValueError
  ):
    return False
  # `jax.process_count` is not used, because it fails if no device is found.
  if not jax.distributed.is_initialized():
    return False
  text = str(error).lower()
  return any(sign in text for sign in _LOST)


def require_same(what: str, values: Mapping[str, Any]) -> None:
  """Raise `ConfigError` on all processes if JSON values differ."""
  if jax.process_count() == 1:
    return
  _require_joined()
  text = json.dumps(values, sort_keys=True)
  digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  digests = multihost_utils.process_allgather(digest)
  if (digests == digests[0]).all():
    return
  gathered = [json.loads(line) for line in _gather(text)]
  lines = []
  for key in sorted({key for values in gathered for key in values}):
    shown = [json.dumps(values.get(key)) for values in gathered]
    if len({*shown}) > 1:
      parts = [
        f"process {i} has {shortened(v, 200)}" for i, v in enumerate(shown)
      ]
      lines.append(f"{key}: {', '.join(parts)}")
  raise ConfigError(
    f"the processes differ in their {what}: start all with equal values.\n"
    "  " + "\n  ".join(lines)
  )


def _require_joined() -> None:
  if not jax.distributed.is_initialized():
    raise ConfigError(
      f"this is one of {jax.process_count()} processes that were not joined: "
      "give --distributed to all of them, on every host."
    )
  local, all_of_them = jax.local_device_count(), len(jax.devices())
  if local * jax.process_count() != all_of_them:
    raise ConfigError(
      f"process {jax.process_index()} has {local} of {all_of_them} devices: "
      f"expected the same number on each of {jax.process_count()} processes."
    )


def _gather(text: str) -> list[str]:
  encoded = np.frombuffer(text.encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(encoded.size))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[: encoded.size] = encoded
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:length].tobytes().decode()
    for row, length in zip(rows, lengths, strict=True)
  ]


def gather(value: Any) -> list[Any]:
  """Return the JSON values of all processes, which must all take part."""
  if jax.process_count() == 1:
    return [value]
  return [json.loads(text) for text in _gather(json.dumps(value))]


def union_over_processes(numbers: Collection[int]) -> list[int]:
  """Return the sorted numbers of all processes, which must all take part."""
  everywhere = gather(sorted(numbers))
  return sorted({number for group in everywhere for number in group})


def broadcast_from_process_0(value: Any) -> Any:
  """Return the JSON value of process 0; all processes must take part."""
  return on_process_0(lambda: value)


def on_process_0(action: Callable[[], Any]) -> Any:
  """Call `action` on process 0 alone; all processes must take part.

  Returns:
    The result of `action`, which must be JSON, on every process.

  Raises:
    TrainingError: on the other processes, if `action` raises anything.
  """
  if jax.process_count() == 1:
    return action()
  outcome, raised = {}, None
  if jax.process_index() == 0:
    try:
      outcome["result"] = action()
    except Exception as error:
      raised, outcome["error"] = error, str(error)
  outcome = gather(outcome)[0]
  if raised:
    raise raised
  if "error" in outcome:
    raise TrainingError(f"process 0: {outcome['error']}")
  return outcome["result"]


def process_0_first(action: Callable[[], Any]) -> Any:
  """Call `action`, which may make files, on process 0, then on all others."""
  results = []
  on_process_0(lambda: results.append(action()))
  return results[0] if results else action()


def require_shared(directory: Path) -> None:
  """Raise `ConfigError` on all processes unless all see the same directory."""
  if jax.process_count() == 1:
    return
  token = broadcast_from_process_0(secrets.token_hex(8))
  file = directory / f".seen-by-all-{token}"
  on_process_0(file.touch)
  end = time.monotonic() + 5
  while not file.exists() and time.monotonic() < end:
    time.sleep(0.2)  # some network file systems show files late
  seen = gather(file.exists())
  on_process_0(file.unlink)
  blind = [i for i, sees in enumerate(seen) if not sees]
  if blind:
    raise ConfigError(
      f"--workdir {directory}: processes {blind} do not see the files that "
      "process 0 writes there. Expected a directory on a file system that all "
      "hosts share."
    )
