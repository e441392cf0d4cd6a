"""Compile while requests are answered: batch sizes, then attention."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from memory_vit.runtime.messages import one_line
from memory_vit.serving.attention import AttentionService

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

logger = logging.getLogger(__name__)
# Between looks for tasks whose programs are not compiled: those that were added
# while a batch size was compiled may lack it.
_LOOK_SECONDS = 1.0
_BATCH_SIZES, _ATTENTION = "batch sizes", "attention"


class BackgroundCompiler:
  """Compiles what the current tasks lack, while requests are answered.

  Attributes:
    problems: {"batch sizes" or "attention": why it cannot be compiled}. It is
      not tried again; requests are answered by what is compiled.
  """

  def __init__(self, predictor: Predictor, attention: AttentionService) -> None:
    self.problems: dict[str, str] = {}
    self._predictor, self._attention = predictor, attention

  @property
  def missing(self) -> list[str]:
    """Names of the programs that will be compiled for the current tasks."""
    predictor, found = self._predictor, []
    if predictor.compiled_sizes != predictor.batch_sizes:
      found.append(_BATCH_SIZES)
    if not self._attention.is_warm:
      found.append(_ATTENTION)
    return [name for name in found if name not in self.problems]

  async def run(self) -> None:
    """Compile, in one thread at a time, until it is cancelled."""
    while True:
      for name in self.missing:
        try:
          if name == _BATCH_SIZES:
            await asyncio.to_thread(self._predictor.warm_up)
          else:
            await self._attention.warm_up()
        except Exception as error:  # such as no memory on the device
          self.problems[name] = one_line(str(error)) or type(error).__name__
          logger.exception("%s cannot be compiled; /readyz says so", name)
        else:
          logger.info("compiled: %s", name)
      await asyncio.sleep(_LOOK_SECONDS)
