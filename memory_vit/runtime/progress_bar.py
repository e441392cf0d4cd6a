"""How far something long is: a bar on a terminal, lines in a log.

  with ProgressBar("evaluating pets", 3_669) as bar:
    for batch in batches:
      bar.update(len(batch))

Bars go to stderr, and stdout stays for results. What is printed meanwhile
stands above them: log lines by `LogHandler`, other text in `above_bars()`.
"""

import contextlib
import contextvars
import logging
import os
import sys
import time
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
_MIB = 2**20


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
  """How far something long is, with its speed and the time to go.

  On a terminal that is a bar of tqdm, shown by process 0 alone. Elsewhere it is
  a line each half minute, by every process in its own log.
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
      total: how much there is; None where nobody knows.
      unit: what is counted, "images" or "B" for instance.
      done: how much was done before.
      delay: seconds after which a bar appears.
      stays: whether the bar is left on the terminal at the end.
      say: is called with the lines where there is no terminal; by default they
        are logged.
    """
    self.total = total
    self._title, self._unit, self._start = escaped(title), unit, done
    self._done, self._delay, self._stays = done, delay, stays
    self._say = say or logger.info
    self._began = self._said = time.perf_counter()
    self._bar: Any = None
    self.is_bar = on_terminal()
    self.update(0)

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
    self._done += count
    if self.total:
      self._done = min(self._done, self.total)
    now = time.perf_counter()
    if self.is_bar:
      if self._bar is None and now - self._began >= self._delay:
        self._bar = self._open()
      if self._bar is not None:
        self._bar.total = self.total or None
        self._bar.update(self._done - self._bar.n)
    elif now - self._said >= SILENCE_SECONDS:
      self._said = now
      self._say(self.line)

  def reach(self, done: int) -> None:
    """Say how much is done by now, what was done before included."""
    self.update(done - self._done)

  @property
  def done(self) -> int:
    """How much is done by now."""
    return self._done

  def note(self, text: str) -> None:
    """Show some numbers behind the bar, from now on."""
    if self._bar is not None:
      self._bar.set_postfix_str(text)

  def reset(self) -> None:
    """Count from the beginning again, as pooch does at the end."""
    self._done = self._start = 0

  def close(self) -> None:
    """End the bar, and leave the cursor at the start of a line."""
    if self._bar is not None:
      self._bar.close()
    self._bar, self.is_bar = None, False

  @property
  def line(self) -> str:
    """How far it is: "pets: 1,024/3,669 images, 93 images/s, ETA 0:28"."""
    seconds = max(time.perf_counter() - self._began, 1e-9)
    speed = (self._done - self._start) / seconds
    scale, unit = (_MIB, "MiB") if self._unit == _BYTES else (1, self._unit)
    total = f"/{self.total // scale:,}" if self.total else ""
    rate = speed / scale
    text = f"{self._title}: {self._done // scale:,}{total} {unit}"
    text += f", {rate:.0f} {unit}/s" if rate >= 10 else f", {rate:.2g} {unit}/s"
    if self.total and speed:
      text += f", ETA {duration((self.total - self._done) / speed)}"
    return text

  def _open(self) -> Any:
    bar = tqdm.tqdm(
      total=self.total or None,
      initial=self._done,
      desc=self._title,
      unit=self._unit if self._unit == _BYTES else f" {self._unit}",
      unit_scale=self._unit == _BYTES,
      unit_divisor=1024,
      dynamic_ncols=True,
      leave=self._stays,
      file=sys.stderr,
    )
    bar.start_t -= time.perf_counter() - self._began
    bar.initial = self._start
    return bar


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
