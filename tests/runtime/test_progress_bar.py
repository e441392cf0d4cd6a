"""Bars on a terminal, lines in a log."""

import io
import logging
import os
import sys
import threading
import types

import pytest
import tqdm
from terminals import screen

from memory_vit.runtime import progress_bar
from memory_vit.runtime.progress_bar import ProgressBar


class Terminal(io.StringIO):
  """Standard error, as a terminal that remembers all output."""

  encoding = "utf-8"

  def isatty(self):
    return True

  @property
  def screen(self):
    """The visible lines."""
    return screen(self.getvalue())


@pytest.fixture
def terminal(monkeypatch):
  """Stderr is a terminal."""
  monkeypatch.setenv("TERM", "xterm")
  terminal = Terminal()
  stands_for = types.SimpleNamespace(stderr=terminal, modules=sys.modules)
  monkeypatch.setattr(progress_bar, "sys", stands_for)
  return terminal


@pytest.fixture
def clock(monkeypatch):
  """Time that passes only as the test says."""
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
  return clock


def test_a_bar_counts_and_is_gone_at_the_end(terminal):
  with ProgressBar("pets", 40, delay=0) as bar:
    bar.update(10)
    bar._bar.refresh()
    assert "pets:  25%" in terminal.screen[-1]
    assert "10/40" in terminal.screen[-1]
  assert terminal.screen == [""]


def test_a_bar_may_stay(terminal):
  with ProgressBar("pets", 40, delay=0, stays=True) as bar:
    bar.update(40)
  assert "pets: 100%" in terminal.screen[0]
  assert terminal.screen[1:] == [""]


def test_short_work_shows_no_bar(terminal, clock):
  with ProgressBar("pets", 4) as bar:
    bar.update(2)
    clock.now = 0.9
    bar.update(2)
    assert terminal.getvalue() == ""
  assert terminal.screen == [""]


@pytest.fixture
def impatient(monkeypatch):
  """A first count is waited for in vain at once."""
  monkeypatch.setattr(progress_bar, "_PATIENCE_SECONDS", 0.0)


def test_a_bar_comes_before_a_late_first_count(terminal, impatient):
  with ProgressBar("pets", 4) as bar:
    bar._waiting.join()
    assert "pets:   0%" in terminal.screen[0]
    assert "0/4" in terminal.screen[0]
  assert terminal.screen == [""]


def test_a_line_comes_before_a_late_first_count(clock, impatient):
  said = []
  with ProgressBar("pets", 4, say=said.append) as bar:
    bar._waiting.join()
    assert said == ["pets:   0% 0/4 [00:00<?, ? images/s]"]


def test_nothing_comes_after_the_first_count_or_the_end(clock):
  bars = [ProgressBar("pets", 4) for _ in range(2)]
  bars[0].update()
  bars[1].close()
  assert all(bar._waiting.finished.is_set() for bar in bars)
  bars[0].close()


def test_late_bar_counts_earlier_work(terminal, clock):
  with ProgressBar("pets", 4) as bar:
    bar.update(2)
    clock.now = 1.5
    bar.update(1)
    assert "3/4" in terminal.screen[-1]


@pytest.mark.fault("progress-bar")
def test_an_error_leaves_the_terminal_clean(terminal):
  def interrupted():
    with ProgressBar("pets", 4, delay=0) as bar:
      bar.update()
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  assert "pets:" in terminal.getvalue()
  assert terminal.screen == [""]


def test_log_lines_stand_above_bars(terminal):
  logger = logging.getLogger("test_progress_bar")
  logger.propagate = False
  handler = progress_bar.LogHandler(terminal)
  logger.addHandler(handler)
  try:
    with (
      ProgressBar("outer", 3, delay=0),
      ProgressBar("inner", 40, delay=0) as bar,
    ):
      bar.update(10)
      logger.warning("a line")
      bar.update(10)
      logger.warning("another line")
      seen = terminal.screen
  finally:
    logger.removeHandler(handler)
  assert seen[:2] == ["a line", "another line"]
  assert seen[2].startswith("outer:")
  assert seen[3].startswith("inner:")
  assert terminal.screen == ["a line", "another line", "", ""]


@pytest.mark.fault("progress-bar")
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_lines_replace_the_bar_on_dumb_terminals_and_in_files(
  term, monkeypatch, terminal, clock
):
  """A dumb terminal, and a file."""
  monkeypatch.setenv("TERM", term)
  if term == "xterm":
    monkeypatch.setattr(terminal, "isatty", lambda: False)
  said = []
  with ProgressBar("pets", 4_000, say=said.append, delay=0) as bar:
    for clock.now in (10.0, 29.0, 31.0, 40.0, 62.0):
      bar.update(500)
  first, second = said
  assert first == "pets:  38% 1500/4000 [00:31<00:51, 48.39 images/s]"
  assert second.startswith("pets:  62% 2500/4000 [01:02<00:3")
  assert terminal.getvalue() == ""


def test_no_bar_without_a_terminal_width(monkeypatch, clock):
  """Such as a terminal that a container opened."""
  monkeypatch.setenv("TERM", "xterm")
  said = []
  ours, its = os.openpty()
  with open(ours), open(its, "w") as stderr:
    stands_for = types.SimpleNamespace(stderr=stderr, modules=sys.modules)
    monkeypatch.setattr(progress_bar, "sys", stands_for)
    assert stderr.isatty()
    with ProgressBar("pets", 4, say=said.append, delay=0) as bar:
      clock.now = 31.0
      bar.update(2)
    monkeypatch.undo()
  assert len(said) == 1


def test_a_padded_batch_is_not_counted(terminal):
  with ProgressBar("pets", 10, delay=0, stays=True) as bar:
    bar.update(8)
    bar.update(8)
    assert bar.done == 10
  assert "10/10" in terminal.screen[0]


@pytest.mark.fault("progress-bar")
@pytest.mark.parametrize(
  "stderr", [None, types.SimpleNamespace(write=len)], ids=["none", "a writer"]
)
def test_no_bar_if_stderr_is_no_file(stderr, monkeypatch, clock):
  """A process without a console, or an application with its own writer."""
  stands_for = types.SimpleNamespace(stderr=stderr, modules=sys.modules)
  monkeypatch.setattr(progress_bar, "sys", stands_for)
  said = []
  with ProgressBar("pets", 4, say=said.append, delay=0) as bar:
    clock.now = 31.0
    bar.update(2)
  assert len(said) == 1


def test_speed_excludes_earlier_work(clock):
  """Not of an earlier run; bytes are in mebibytes."""
  said = []
  with (
    ProgressBar("pets", 4_000, done=3_000, say=said.append) as images,
    ProgressBar("weights", 300 * 2**20, "B", say=said.append) as weights,
  ):
    clock.now = 40.0
    images.update(400)
    weights.update(30 * 2**20)
  assert said == [
    "pets:  85% 3400/4000 [00:40<01:00, 10.00 images/s]",
    "weights:  10% 30.0M/300M [00:40<06:00, 786kB/s]",
  ]


def test_a_log_line_leaves_no_bar_behind(terminal, clock):
  """The bar is shown again below the line, before its delay is over."""
  with ProgressBar("pets", 4), progress_bar.above_bars():
    terminal.write("a line\n")
  assert terminal.screen == ["a line", ""]


def test_a_line_waits_for_no_lock_of_a_bar(clock):
  """A log line of another thread may hold the lock of the log."""
  taken = []

  def take():
    with tqdm.tqdm.get_lock():
      taken.append(True)

  def say(line):
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(timeout=10)

  with ProgressBar("pets", 4, say=say) as bar:
    clock.now = 31.0
    bar.update()
  assert taken == [True]


def test_a_foreign_name_sends_nothing_to_the_terminal(terminal):
  with ProgressBar("pets\x1b[2J\n", 4, delay=0) as bar:
    bar.update(2)
    bar._bar.refresh()
  assert "\x1b[2J" not in terminal.getvalue()


def test_only_the_first_process_shows_a_bar(terminal, monkeypatch):
  monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
  monkeypatch.setattr("jax.process_index", lambda: 1)
  with ProgressBar("pets", 4, delay=0) as bar:
    bar.update(2)
  assert terminal.getvalue() == ""
