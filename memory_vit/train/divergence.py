"""Count updates that are not finite, and give up trials that diverge."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from memory_vit.errors import DivergedError

logger = logging.getLogger(__name__)

# Function from a step to the names of the examples in its batch.
Examples = Callable[[int], Sequence[str]]
# Maximum number of examples that a message names for each step.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class SkipCount:
  """Skipped updates of a trial: total, and steps of the current streak."""

  total: int = 0
  row: tuple[int, ...] = ()


class DivergenceMonitor:
  """Counter of skipped updates, from metrics that are read every few steps.

  Reading metrics at every step would make the device wait for the host. Reading
  them late does no harm: a `Step` skips updates that are not finite.
  """

  def __init__(
    self,
    step: int,
    title: str,
    *,
    lost: Mapping[str, int],
    skipped: Mapping[str, SkipCount],
    max_skipped: int,
    examples: Examples | None = None,
  ) -> None:
    """Prepare to count the skipped updates after step `step`.

    `lost` names the trials that were lost up to this step, and `skipped` counts
    the updates of each trial that were skipped up to this step.
    """
    self.lost, self.skipped = dict(lost), dict(skipped)
    self._step, self._title = step, title
    self._max, self._examples = max_skipped, examples
    self._pending: list[Any] = []
    self._last: dict[str, dict[str, float]] = {}

  def add(self, metrics: Any) -> None:
    """Add the metrics of a step; wait until at most two steps are in flight.

    Steps in flight cannot be cancelled, so a run that is asked to stop waits
    for them. With only one step in flight, the device would wait for the host
    if steps are short.
    """
    self._pending.append(metrics)
    jax.block_until_ready(self._pending[-3:-2])

  def check(self) -> dict[str, dict[str, float]]:
    """Count skipped updates; return the last metrics of all trials not lost.

    Raise `DivergedError` once all trials are lost.
    """
    for metrics in jax.device_get(self._pending):
      self._step += 1
      self._last = jax.tree.map(float, metrics)
      for name, values in self._last.items():
        if name not in self.lost:
          self._count(name, values)
    self._pending = []
    return self._well(self._last)

  def newest(self) -> dict[str, dict[str, float]]:
    """Return metrics of the last step, without counting skipped updates.

    Use this for reports that depend on the clock. Clocks of processes differ,
    but all processes must count skipped updates, and stop, at the same step.
    """
    newest = jax.device_get(self._pending[-1:])
    return self._well(jax.tree.map(float, newest[-1]) if newest else self._last)

  def _well(
    self, metrics: dict[str, dict[str, float]]
  ) -> dict[str, dict[str, float]]:
    return {n: v for n, v in metrics.items() if n not in self.lost}

  def _count(self, name: str, values: dict[str, float]) -> None:
    skipped = self.skipped.get(name, SkipCount())
    if not values["skipped"]:
      if skipped.row:
        self.skipped[name] = dataclasses.replace(skipped, row=())
      return
    row = (*skipped.row, self._step)
    self.skipped[name] = SkipCount(skipped.total + 1, row)
    shown = ", ".join(f"{k} {v}" for k, v in values.items() if k != "skipped")
    if len(row) < self._max:
      logger.warning(
        "step %d: an update of %r is not finite (%s), and is skipped%s",
        self._step, name, shown, self._named([self._step]),
      )  # fmt: skip
    else:
      self._lose(name, row, shown)

  def _lose(self, name: str, row: Sequence[int], shown: str) -> None:
    """Record a lost trial; raise `DivergedError` if all trials are lost."""
    self.lost[name] = self._step
    if self._examples:
      for step in row:
        names = ", ".join(self._examples(step))
        logger.warning("training examples of step %d: %s", step, names)
    message = (
      f"at step {self._step}: an update of {name!r} is not finite ({shown}); "
      f"{len(row)} in a row were skipped. Earlier saved states are unchanged. "
      "Try a lower learning_rate or a longer optim.warmup, and look for broken "
      f"images in the data{self._named(row)}"
    )
    if len(self.lost) == len(self._last):
      text = f"training of {self._title!r} stopped {message}"
      raise DivergedError(text, dict(self.lost))
    logger.warning(
      "training of %r stopped %s Other tasks continue.", name, message
    )

  def _named(self, steps: Sequence[int]) -> str:
    """Return the end of a message: a full stop, then the examples if known."""
    if not self._examples:
      return "."
    parts = []
    for step in steps:
      names = self._examples(step)
      shown = [*names[:_SHOWN], *["..."] * (len(names) > _SHOWN)]
      parts.append(f"step {step}: {', '.join(shown)}")
    return f". Training examples of {'; '.join(parts)}."
