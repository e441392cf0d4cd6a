"""Signals to this process; `test_interrupted_runs.py` has those that end it."""

import os
import signal
import types

import pytest

from memory_vit.runtime import preemption
from memory_vit.runtime.preemption import (
  PREEMPTED,
  STOPPED,
  Interrupted,
  StopSignal,
)


def send(number=signal.SIGTERM):
  os.kill(os.getpid(), number)


def send_and_return(value):
  send()
  return value


@pytest.mark.parametrize(
  ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_signal_outside_of_a_loop_stops_at_once(number, status):
  stop = StopSignal()
  with pytest.raises(Interrupted) as error, stop.listening():
    send(number)
  assert error.value.status == status
  assert status in (PREEMPTED, STOPPED)
  assert not isinstance(error.value, Exception)


def test_earlier_signal_handlers_are_restored():
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = [signal.getsignal(number) for number in numbers]
  with StopSignal().listening():
    assert signal.getsignal(signal.SIGTERM) not in before
  with pytest.raises(ZeroDivisionError), StopSignal().listening():
    print(1 / 0)
  assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.fault("signal-storm")
def test_later_signal_does_not_change_the_exit_status():
  """A further SIGTERM must not change the exit status."""
  stop = StopSignal()
  with (  # noqa: PT012
    pytest.raises(Interrupted),
    stop.listening(),
    stop.asked_for(),
  ):
    send()
    raise stop.interrupted("saved")
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
  assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.fault("signal-storm")
def test_storm_of_signals_counts_once(monkeypatch):
  """However long it lasts; a signal after a silence is a second request."""
  clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
  monkeypatch.setattr(preemption, "time", clock)
  ended = []
  monkeypatch.setattr(preemption.signal, "SIG_DFL", lambda *_: ended.append(1))
  stop = StopSignal()
  with (  # noqa: PT012
    pytest.raises(Interrupted),
    stop.listening(),
    stop.asked_for(),
  ):
    for _ in range(500):
      send()
      clock.now += 0.9
    assert stop.is_wanted()
    assert not ended
    clock.now += 0.2
    send()
    assert ended


@pytest.mark.fault("second-signal")
def test_loop_decides_when_it_checks_for_signals():
  stop = StopSignal()
  with stop.listening(), pytest.raises(Interrupted) as error:  # noqa: PT012
    with stop.asked_for():
      assert not stop.is_wanted()
      stop.check()
      send()
      send()  # `timeout` sends it to the process, and to its group
      assert stop.is_wanted()
      with pytest.raises(Interrupted):
        stop.check()
    pytest.fail("a signal was forgotten")
  assert error.value.status == PREEMPTED


def test_an_error_is_not_hidden_by_a_signal():
  stop = StopSignal()
  with pytest.raises(ZeroDivisionError), stop.listening(), stop.asked_for():
    print(1 / send_and_return(0))


@pytest.mark.fault("signal-handlers")
def test_signals_are_handled_only_while_listening():
  stop = StopSignal()
  with stop.asked_for():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not stop.is_wanted()
