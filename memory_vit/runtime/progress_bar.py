"""Progress: a bar on a terminal, lines in a log.

  with ProgressBar("evaluating pets", 3_669) as bar:
    for batch in batches:
      bar.update(len(batch))

Bars go to stderr; stdout is for results. Log lines of `LogHandler`, and text
that is printed in `above_bars()`, appear above the bars.
"""

import contextlib
import contextvars
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from etils import epy

from memory_vit.runtime.messages import escaped

with epy.lazy_imports():  # --help seldom needs these modules
  import jax
  import tqdm

logger = logging.getLogger(__name__)

# Whether bars are hidden in the current context; `shown` sets it.
_hidden = contextvars.ContextVar("hidden", default=False)

# Time between log lines: with longer pauses, a run would seem to hang.
SILENCE_SECONDS = 30.0
# Time before a bar appears: a bar that ends sooner would only flicker.
_DELAY_SECONDS = 1.0
# Time after which a bar appears even if nothing is counted yet, for example
# because a program is still being compiled.
_PATIENCE_SECONDS = 2.0
_BYTES = "B"


def on_terminal() -> bool:
  """Return whether to show bars: stderr is a terminal that can redraw lines."""
  # Without a console, stderr is None. An application may also replace stderr by
  # an object without `isatty`.
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
  """Return False for a terminal of size 0x0, which some containers have."""
  try:
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0
  except (AttributeError, OSError, ValueError):  # stderr is no file
    return True


def announce(line: str) -> None:
  """Log a line with the logger of progress lines."""
  logger.info(line)


class ProgressBar:
  """A bar on the terminal of process 0; elsewhere a line every half minute.

  If two seconds pass before the first count, the bar or a line is shown.
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
    """Start to count at `done`; if `stays`, a finished bar stays visible.

    Where no bar can be drawn, `say` gets lines of progress instead. By default,
    these lines are logged.
    """
    self.total, self.is_bar = total, on_terminal()
    self._say = say or logger.info
    bar = {"file": sys.stderr, "dynamic_ncols": True, "delay": delay}
    # Without a bar, tqdm only counts, and `update` logs lines. If tqdm wrote
    # the lines, it would hold the lock that `LogHandler` waits for.
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
    self._waiting = threading.Timer(_PATIENCE_SECONDS, self._show)
    self._waiting.daemon = True
    self._waiting.start()

  def _show(self) -> None:
    if self.is_bar:
      self._bar.refresh()
    else:
      self._say(str(self._bar))

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
    """Add to the count, at most up to `total`: the last batch may be padded."""
    self._waiting.cancel()
    bar = self._bar
    bar.total = self.total or None
    if bar.total:
      count = min(count, bar.total - bar.n)
    if bar.update(count) and not self.is_bar:
      self._say(str(bar))

  @property
  def done(self) -> int:
    return self._bar.n

  def note(self, text: str) -> None:
    """Show a text after the bar, from now on."""
    self._bar.set_postfix_str(text)

  def reset(self) -> None:
    """Do nothing: pooch calls this at the end, then counts all bytes again."""

  def close(self) -> None:
    """End the bar, with the cursor at the start of a line."""
    self._waiting.cancel()
    self._waiting.join()  # else, the timer could show the bar after its end
    # Until `delay` has passed, tqdm would not erase the bar, because it assumes
    # that the bar is not shown yet. But a log line may have shown the bar.
    self._bar.delay = 0
    self._bar.close()


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
  """Remove bars while something is printed, and show them again below."""
  if "tqdm" not in sys.modules:  # no bar has been made
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
  """Show bars and log lines in a call; without `progress`, only warnings."""
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
  """Show this package's log lines, of level INFO or DEBUG, above bars."""
  handler = LogHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
  package = logging.getLogger("memory_vit")
  package.handlers, package.propagate = [handler], False
  package.setLevel(logging.DEBUG if verbose else logging.INFO)


class LogHandler(logging.StreamHandler[Any]):
  """A handler that writes log lines to stderr, above all bars."""

  def emit(self, record: logging.LogRecord) -> None:
    with above_bars():
      super().emit(record)


def duration(seconds: float) -> str:
  """Format a duration: 75 -> "1:15", 3700 -> "1:01:40"."""
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minute:02}:{second:02}"
  return f"{minute}:{second:02}"
