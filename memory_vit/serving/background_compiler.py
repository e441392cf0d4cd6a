"""Compile programs in the background: batch sizes, then attention."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from memory_vit.runtime.messages import one_line
from memory_vit.serving.attention import AttentionService

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

logger = logging.getLogger(__name__)
# Seconds between checks for missing programs. If a task is added while a batch
# size is being compiled, the new set of tasks may lack a program of that size.
_LOOK_SECONDS = 1.0
_BATCH_SIZES, _ATTENTION = "batch sizes", "attention"


class BackgroundCompiler:
  """Compiles missing programs of the current tasks while requests are answered.

  Attributes:
    problems: {"batch sizes" or "attention": why it cannot be compiled}. Failed
      programs are not retried; compiled programs continue to answer requests.
  """

  def __init__(self, predictor: Predictor, attention: AttentionService) -> None:
    self.problems: dict[str, str] = {}
    self._predictor, self._attention = predictor, attention

  @property
  def missing(self) -> list[str]:
    """Names of the programs that will be compiled for the current tasks."""
    predictor, missing = self._predictor, []
    if predictor.compiled_sizes != predictor.batch_sizes:
      missing.append(_BATCH_SIZES)
    if not self._attention.is_warm:
      missing.append(_ATTENTION)
    return [name for name in missing if name not in self.problems]

  async def run(self) -> None:
    """Compile missing programs, one at a time, until cancelled."""
    while True:
      for name in self.missing:
        try:
          if name == _BATCH_SIZES:
            await asyncio.to_thread(self._predictor.warm_up)
          else:
            await self._attention.warm_up()
        except Exception as error:  # such as out of memory
          self.problems[name] = one_line(str(error)) or type(error).__name__
          logger.exception("%s cannot be compiled; /readyz says why", name)
        else:
          logger.info("compiled: %s", name)
      await asyncio.sleep(_LOOK_SECONDS)
