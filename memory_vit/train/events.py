"""Events and profiles of a run, for TensorBoard and Weights & Biases.

Training continues without them if they cannot be written.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from clu import metric_writers

from memory_vit.runtime.files import Outbox
from memory_vit.runtime.messages import named
from memory_vit.train.wandb_run import Images, Scalars, WandbRun

logger = logging.getLogger(__name__)


class Events:
  """TensorBoard events, one directory per name, written by process 0.

  A run of Weights & Biases gets the same; its opener closes it.
  """

  def __init__(
    self, logdirs: Mapping[str, Path], wandb_run: WandbRun | None = None
  ) -> None:
    own_logdirs = logdirs if jax.process_index() == 0 else {}
    self._writers: dict[str, Any] = {}
    self._outboxes: dict[str, Outbox] = {}
    self._failed: dict[str, Path] = {}
    self._logdirs, self._wandb = own_logdirs, wandb_run
    for name in own_logdirs:
      self._try(name, functools.partial(self._open, name))

  def __enter__(self) -> "Events":
    return self

  def __exit__(self, *args: object) -> None:
    for name in list(self._writers):
      self._try(name, self._writers[name].close)
    for name in list(self._outboxes):
      self._try(name, self._outboxes[name].close)
    for name, path in self._failed.items():
      logger.warning("the TensorBoard events of %r in %s are not complete",
                     name, path)  # fmt: skip

  def write(self, step: int, scalars: Scalars) -> None:
    """Write {name: {key: value}} of a step."""
    for name, values in scalars.items():
      if writer := self._writers.get(name):
        self._try(
          name, functools.partial(writer.write_scalars, step, dict(values))
        )
    if self._wandb:
      self._wandb.write_scalars(step, scalars)

  def write_images(self, step: int, images: Images) -> None:
    """Write {name: {key: uint8 (height, width, 3)}} of a step."""
    for name, values in images.items():
      if writer := self._writers.get(name):
        self._try(
          name, functools.partial(writer.write_images, step, dict(values))
        )
    if self._wandb:
      self._wandb.write_images(step, images)

  def flush(self) -> None:
    for name in list(self._writers):
      self._try(name, self._writers[name].flush)
      self._try(name, self._outboxes[name].send)

  def _open(self, name: str) -> None:
    self._outboxes[name] = outbox = Outbox(self._logdirs[name])
    self._writers[name] = metric_writers.SummaryWriter(str(outbox.local))

  def _try(self, name: str, action: Callable[[], None]) -> None:
    """Give up a writer that fails, with a warning."""
    try:
      action()
    except Exception as error:  # full disks, and errors of TensorFlow
      self._writers.pop(name, None)
      self._failed[name] = self._logdirs[name]
      logger.warning(
        "TensorBoard events of %r cannot be written, training continues "
        "without (%s)", name, named(error),
      )  # fmt: skip


class Profile:
  """Profiles five steps for TensorBoard, or the remaining ones if fewer."""

  def __init__(
    self, logdirs: Mapping[str, Path], first: int, total: int
  ) -> None:
    """Step 0 as `first` profiles nothing.

    The first of `logdirs` gets the profile.
    """
    self._first = first
    self._last = min(self._first + 4, total)
    self._logdir = next(iter(logdirs.values()), None)
    self._outbox: Outbox | None = None

  def __enter__(self) -> "Profile":
    return self

  def __exit__(self, *args: object) -> None:
    if self._outbox:
      self._stop(self._outbox)

  def before(self, step: int) -> None:
    if step == self._first and self._logdir:
      self._outbox = Outbox(self._logdir)
      jax.profiler.start_trace(str(self._outbox.local))

  def after(self, step: int, state: Any) -> None:
    """Stop once the last step has been computed, not only dispatched."""
    if self._outbox and step == self._last:
      jax.block_until_ready(state)
      self._stop(self._outbox)

  def _stop(self, outbox: Outbox) -> None:
    self._outbox = None
    try:
      jax.profiler.stop_trace()
      outbox.close()
    except Exception as error:  # as of events
      logger.warning(
        "the profile cannot be written to %s: %s", self._logdir, error
      )
