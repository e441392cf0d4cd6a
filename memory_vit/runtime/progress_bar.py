"""How far something long is: a bar on a terminal, lines in a log.

  with ProgressBar("evaluating pets", 3_669) as bar:
    for batch in batches:
      bar.update(len(batch))

Bars go to stderr, and stdout stays for results. What is printed meanwhile
stands above them: log lines by `LogHandler`, other text in `above_bars()`.
"""

import contextlib
import contextvars
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from etils import epy

from memory_vit.runtime.messages import escaped

with epy.lazy_imports():  # most of a command's help needs neither
  import jax
  import tqdm

logger = logging.getLogger(__name__)

# Whether a call asked for no bars: see `shown`.
_hidden = contextvars.ContextVar("hidden", default=False)

# A log in which nothing has been said for so long looks like one of a run that
# hangs.
SILENCE_SECONDS = 30.0
# What is over sooner gets no bar: it would only flicker.
_DELAY_SECONDS = 1.0
_BYTES = "B"


def on_terminal() -> bool:
  """Whether bars are shown: stderr is a terminal whose lines can change."""
  # None without a console; an application may put any writer there.
  isatty = getattr(sys.stderr, "isatty", None)
  return (
    not _hidden.get()
    and isatty is not None
    and isatty()
    and os.environ.get("TERM") != "dumb"
    and _has_width()
    and (not jax.distributed.is_initialized() or jax.process_index() == 0)
  )


def _has_width() -> bool:
  """Whether stderr is as wide as anything: nobody may look at a terminal.

  One that a container or a program has opened may have no size: it is 0x0.
  """
  try:
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0
  except (AttributeError, OSError, ValueError):  # no file of the system's
    return True


class ProgressBar:
  """How far something long is, with its speed and the time to go, by tqdm.

  On a terminal that is a bar, shown by process 0 alone. Elsewhere it is a line
  each half minute, by every process in its own log.

  Attributes:
    total: how much there is; None if nobody knows. It may change.
    is_bar: whether it is a bar.
  """

  def __init__(
    self,
    title: str,
    total: int | None = None,
    unit: str = "images",
    *,
    done: int = 0,
    delay: float = _DELAY_SECONDS,
    stays: bool = False,
    say: Callable[[str], None] | None = None,
  ) -> None:
    """Begin to count; nothing is shown yet, unless `delay` is 0.

    Args:
      title: what is done; is escaped.
      total: see the class.
      unit: what is counted, "images" or "B" for instance.
      done: how much was done before.
      delay: seconds after which a bar appears.
      stays: whether the bar is left on the terminal at the end.
      say: is called with the lines where there is no terminal; by default they
        are logged.
    """
    self.total, self.is_bar = total, on_terminal()
    self._say = say or logger.info
    bar = {"file": sys.stderr, "dynamic_ncols": True, "delay": delay}
    # tqdm counts here, and `update` prints: not while it holds its lock, for
    # which `LogHandler` waits.
    lines = {
      "file": io.StringIO(), "ncols": 0, "miniters": 1,
      "mininterval": SILENCE_SECONDS,
    }  # fmt: skip
    self._bar = tqdm.tqdm(
      total=total or None,
      initial=done,
      desc=escaped(title),
      unit=unit if unit == _BYTES else f" {unit}",
      unit_scale=unit == _BYTES,
      unit_divisor=1024,
      leave=stays,
      **(bar if self.is_bar else lines),
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def update(self, count: int = 1) -> None:
    """Count what was done, and show it if that is due.

    A last batch may be padded: never more is done than there is in all.
    """
    bar = self._bar
    bar.total = self.total or None
    if bar.total:
      count = min(count, bar.total - bar.n)
    if bar.update(count) and not self.is_bar:
      self._say(str(bar))

  @property
  def done(self) -> int:
    """How much is done by now."""
    return self._bar.n

  def note(self, text: str) -> None:
    """Show some numbers behind the bar, from now on."""
    self._bar.set_postfix_str(text)

  def reset(self) -> None:
    """Do nothing: pooch calls it at the end, before it counts all again."""

  def close(self) -> None:
    """End the bar, and leave the cursor at the start of a line."""
    # Before that tqdm would leave a bar that a log line has made appear.
    self._bar.delay = 0
    self._bar.close()


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
  """Take bars away while something is printed, and show them again below."""
  if "tqdm" not in sys.modules:  # then there are none
    yield
    return
  with tqdm.tqdm.external_write_mode(file=sys.stderr):
    yield


def log_to_stderr() -> None:
  """Show lines of progress in a command that shows no other log lines."""
  if not logger.hasHandlers():
    handler = LogHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%X"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def shown(progress: bool) -> Iterator[None]:
  """Show bars and this package's log lines in a call, or warnings alone."""
  package = logging.getLogger("memory_vit")
  before = package.handlers, package.propagate, package.level
  token = _hidden.set(not progress)
  if progress:
    log_package()
  else:
    package.setLevel(logging.WARNING)
  try:
    yield
  finally:
    package.handlers, package.propagate, level = before
    package.setLevel(level)
    _hidden.reset(token)


def log_package(*, verbose: bool = False) -> None:
  """Show this package's log lines above bars."""
  handler = LogHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
  package = logging.getLogger("memory_vit")
  package.handlers, package.propagate = [handler], False
  package.setLevel(logging.DEBUG if verbose else logging.INFO)


class LogHandler(logging.StreamHandler[Any]):
  """Writes log lines to stderr, above all bars."""

  def emit(self, record: logging.LogRecord) -> None:
    """Write a line."""
    with above_bars():
      super().emit(record)


def duration(seconds: float) -> str:
  """75 -> "1:15", 3700 -> "1:01:40"."""
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minute:02}:{second:02}"
  return f"{minute}:{second:02}"
