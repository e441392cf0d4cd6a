import logging

import pytest

from memory_vit.errors import DivergedError
from memory_vit.train.divergence import DivergenceMonitor, SkipCount


def watch_of(step=0, lost=(), skipped=(), **options):
  options = {"max_skipped": 3, **options}
  return DivergenceMonitor(
    step, "run", lost=dict(lost), skipped=dict(skipped), **options
  )


def add(watch, **skips):
  watch.add({name: {"loss": 1.0, "skipped": s} for name, s in skips.items()})


@pytest.mark.fault("non-finite-update")
def test_trial_is_lost_after_three_skipped_updates_in_a_row():
  watch = watch_of()
  for a in (1, 1, 0, 1, 1, 0, 1, 1, 1, 0):
    add(watch, a=a, b=0)
  assert list(watch.check()) == ["b"]
  assert watch.lost == {"a": 9}
  assert watch.skipped["a"] == SkipCount(7, (7, 8, 9))
  assert "b" not in watch.skipped


def test_skips_are_counted_alike_if_checked_late_or_resumed():
  steps = (0, 1, 0, 1, 1)
  at_once, often = watch_of(), watch_of()
  for step, a in enumerate(steps, start=1):
    add(at_once, a=a)
    add(often, a=a)
    often.check()
    # As saved and resumed.
    often = watch_of(step, often.lost, often.skipped)
  at_once.check()
  assert at_once.skipped == often.skipped == {"a": SkipCount(3, (4, 5))}
  add(often, a=1)
  with pytest.raises(DivergedError, match="stopped at step 6") as error:
    often.check()
  assert error.value.lost == {"a": 6}


def test_lost_trial_is_not_monitored():
  watch = watch_of(lost={"a": 2})
  add(watch, a=1, b=0)
  assert list(watch.check()) == ["b"]
  assert watch.lost == {"a": 2}
  assert watch.skipped == {}


def test_messages_name_the_examples_of_skipped_steps(caplog, monkeypatch):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  watch = watch_of(
    max_skipped=2,
    examples=lambda step: [f"{10 * step + i}" for i in range(9)],
  )
  add(watch, a=1)
  watch.check()
  assert "step 1: an update of 'a' is not finite" in caplog.text
  add(watch, a=1)
  with pytest.raises(DivergedError) as error:
    watch.check()
  assert "of step 1: 10, 11, 12, 13, 14, 15, 16, 17, ...;" in str(error.value)
  assert "; step 2: 20, 21" in str(error.value)
  # The log has them all.
  assert "of step 2: 20, 21, 22, 23, 24, 25, 26, 27, 28\n" in caplog.text


def test_reading_the_newest_metrics_counts_no_skips():
  """A clock decides when to look, and each process has its own."""
  watch = watch_of(lost={"b": 1})
  assert watch.newest() == {}
  for _ in range(3):
    add(watch, a=1, b=0)
  assert watch.newest() == {"a": {"loss": 1.0, "skipped": 1.0}}
  assert watch.skipped == {}
  with pytest.raises(DivergedError):
    watch.check()
