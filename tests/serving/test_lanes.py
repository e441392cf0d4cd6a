"""Light work passes heavy work, and the lightest goes first."""

import asyncio
import threading

import pytest

from memory_vit.images.reader import THREADS
from memory_vit.serving import lanes

HEAVY = 10_000_000


class Work:
  """Notes names of finished work; work that is held waits for `go`."""

  def __init__(self):
    self.done, self.begun = [], []
    self.go = threading.Event()

  def make(self, name, held=False):
    def work():
      self.begun.append(name)
      if held:
        assert self.go.wait(20)
      self.done.append(name)
      return name

    return work


async def until(condition):
  while not condition():
    await asyncio.sleep(0.001)


def run(check):
  async def checked():
    threads, work = lanes.Lanes(), Work()
    try:
      await asyncio.wait_for(check(threads, work), 30)
    finally:
      work.go.set()
      threads.close()

  asyncio.run(checked())


def begin(threads, work, *weights, held=False):
  return [
    asyncio.create_task(threads.run(w, work.make(w, held))) for w in weights
  ]


@pytest.mark.fault("many-pixels")
def test_light_work_passes_heavy_work():
  async def check(threads, work):
    heavy = begin(threads, work, *[HEAVY] * 4 * THREADS, held=True)
    await until(lambda: work.begun)
    assert await threads.run(1, work.make("light")) == "light"
    assert work.done == ["light"]
    work.go.set()
    await asyncio.gather(*heavy)

  run(check)


@pytest.mark.fault("many-pixels")
def test_lightest_then_oldest_work_goes_first(monkeypatch):
  monkeypatch.setattr(lanes, "HEAVY_THREADS", 1)

  async def check(threads, work):
    held = begin(threads, work, HEAVY, held=True)
    await until(lambda: work.begun)
    weights = [HEAVY + 3, HEAVY + 1, HEAVY + 2]
    rest = begin(threads, work, *weights)
    for name in "bcde":
      rest += [asyncio.create_task(threads.run(HEAVY, work.make(name)))]
    await asyncio.sleep(0)
    work.begun.clear()
    work.go.set()
    await asyncio.gather(*held, *rest)
    found = [one for one in work.begun if one != HEAVY]
    assert found == [*"bcde", *sorted(weights)]

  run(check)


@pytest.mark.fault("leaving-client")
def test_abandoned_work_is_not_run():
  async def check(threads, work):
    held = begin(threads, work, *[HEAVY] * THREADS, held=True)
    await until(lambda: work.begun)
    left, *later = begin(threads, work, HEAVY + 1, HEAVY + 2)
    await asyncio.sleep(0)
    left.cancel()
    held[0].cancel()  # its thread finishes it
    await asyncio.wait([left, held[0]])
    work.go.set()
    await asyncio.gather(*held[1:], *later)
    assert HEAVY + 1 not in work.begun

  run(check)


@pytest.mark.fault("many-pixels")
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "busy"])
def test_heavy_work_begins_once_no_light_request_is_answered(monkeypatch, ends):
  """In a server that is never without one it begins nevertheless."""
  monkeypatch.setattr(lanes, "PATIENCE_SECONDS", 600 if ends else 0.2)

  async def check(threads, work):
    with threads.light_request(), threads.light_request():
      with threads.light_request():
        heavy = begin(threads, work, HEAVY)
        assert await threads.run(1, work.make("light")) == "light"
      await asyncio.sleep(0.05)
      assert work.begun == ["light"]
      if not ends:
        await asyncio.gather(*heavy)
    await asyncio.gather(*heavy)

  run(check)


def test_an_error_is_that_of_its_own_work():
  async def check(threads, work):
    with pytest.raises(ZeroDivisionError):
      await threads.run(1, lambda: 1 / 0)
    assert await threads.run(1, work.make("next")) == "next"

  run(check)
