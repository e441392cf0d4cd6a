"""Signals to this process; those that end one are in test_faults.py."""

import os
import signal

import pytest

from memory_vit.interrupt import PREEMPTED, STOPPED, Interrupted, Stop


def send(number=signal.SIGTERM):
  os.kill(os.getpid(), number)


def send_and_return(value):
  send()
  return value


@pytest.mark.parametrize(
  ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_outside_of_a_loop_it_stops_at_once(number, status):
  stop = Stop()
  before = signal.getsignal(number)
  with pytest.raises(Interrupted) as error, stop.listening():
    send(number)
  assert error.value.status == status
  assert status in (PREEMPTED, STOPPED)
  assert not isinstance(error.value, Exception)
  assert signal.getsignal(number) is before


def test_a_loop_asks_when_it_likes():
  stop = Stop()
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
  stop = Stop()
  with pytest.raises(ZeroDivisionError), stop.listening(), stop.asked_for():
    print(1 / send_and_return(0))


def test_nobody_listens_unless_told_to():
  stop = Stop()
  with stop.asked_for():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not stop.is_wanted()
