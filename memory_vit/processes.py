"""What the processes of a run do as one."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memory_vit.errors import TrainingError

# What is told to the others has to be of one size.
_BYTES = 4096


def by_first(action: Callable[[], Any]) -> Any:
  """Does something in the first process alone; where it fails, all fail.

  Args:
    action: its result must be short, and what JSON can hold.

  Returns:
    Its result, in every process.

  Raises:
    TrainingError: in the other processes, in the words of the first. There
      everything that `action` raises.
  """
  if jax.process_count() == 1:
    return action()
  outcome, raised = {}, None
  if jax.process_index() == 0:
    try:
      outcome["result"] = action()
    except Exception as error:
      raised, outcome["error"] = error, str(error)[: _BYTES // 8]
  text = json.dumps(outcome).encode()
  told = np.zeros(_BYTES, np.uint8)
  told[: len(text)] = np.frombuffer(text, np.uint8)
  told = multihost_utils.broadcast_one_to_all(told)
  outcome = json.loads(bytes(np.asarray(told)).rstrip(b"\0"))
  if raised:
    raise raised
  if "error" in outcome:
    raise TrainingError(f"process 0: {outcome['error']}")
  return outcome["result"]
