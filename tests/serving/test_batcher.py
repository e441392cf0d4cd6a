"""Requests that arrive together share a pass, and none is split."""

import asyncio
import threading

import numpy as np
import pytest

from memory_vit.serving.batcher import Batcher
from memory_vit.serving.request_error import RequestError

SIZES = (1, 4, 8)


def pixels(*values):
  """Images of one value each."""
  return np.array(values, np.float32).reshape(-1, 1, 1, 1)


class Passes:
  """Doubles numbers, and notes the number of images in each pass."""

  def __init__(self):
    self.sizes = []
    self.begun = 0
    self.go = threading.Event()
    self.go.set()

  def __call__(self, batch):
    self.begun += 1
    self.go.wait(5)  # a test that fails must end
    self.sizes.append(len(batch))
    if -1 in batch:
      raise ValueError("a pass that fails")
    return 2 * batch.reshape(-1)


def batcher(passes, **options):
  options = {
    "sizes": lambda: SIZES, "least_fill": 0.75, "wait_seconds": 0,
    "max_queue": 100, **options,
  }  # fmt: skip
  return Batcher(passes, **options)


async def answer(b, *values, heavy=False):
  """The answer to a request of these numbers."""
  with b.room(len(values), heavy=heavy):
    found, rows = await b.submit(pixels(*values))
  return found[rows].tolist()


async def until(condition):
  """Wait for an event, however slow the machine is."""
  while not condition():
    await asyncio.sleep(0.001)


def run(check):
  """A request without an answer fails the test instead of blocking it."""
  asyncio.run(asyncio.wait_for(check, 30))


def test_each_request_gets_its_own_rows():
  async def check():
    passes = Passes()
    b = batcher(passes)
    requests = [[i + j / 10 for j in range(1 + i % 3)] for i in range(30)]
    found = await asyncio.gather(*(answer(b, *r) for r in requests))
    b.close()
    for request, got in zip(requests, found, strict=True):
      np.testing.assert_allclose(got, 2 * np.array(request), rtol=1e-6)
    assert sum(passes.sizes) == sum(map(len, requests))
    assert len(passes.sizes) < len(requests)  # they share passes
    assert max(passes.sizes) <= SIZES[-1]
    assert b.taken == 0

  run(check())


@pytest.mark.fault("changing-tasks")
def test_a_request_is_in_one_pass():
  """So one set of tasks answers all its images, whatever else waits."""

  async def check():
    passes = Passes()
    b = batcher(passes)
    passes.go.clear()
    first = asyncio.create_task(answer(b, 0))
    await until(lambda: passes.begun)
    rest = [asyncio.create_task(answer(b, *[i] * 5)) for i in (1, 2, 3)]
    large = asyncio.create_task(answer(b, *range(20)))
    await until(lambda: b.taken == 36)
    passes.go.set()
    await asyncio.gather(first, large, *rest)
    b.close()
    assert passes.sizes == [1, 5, 5, 5, 20]

  run(check())


@pytest.mark.fault("compiling-server")
def test_requests_share_batches_of_the_sizes_that_are_compiled():
  async def check():
    passes, sizes = Passes(), [1]
    b = batcher(passes, sizes=lambda: sizes)
    await asyncio.gather(*(answer(b, i) for i in range(4)))
    assert passes.sizes == [1] * 4
    sizes.append(4)
    await asyncio.gather(*(answer(b, i) for i in range(4)))
    b.close()
    assert passes.sizes[4:] == [4]

  run(check())


@pytest.mark.fault("failing-pass")
def test_a_failing_pass_fails_its_requests_alone():
  async def check():
    passes = Passes()
    b = batcher(passes, least_fill=0)
    passes.go.clear()
    first = asyncio.create_task(answer(b, 1))
    await until(lambda: passes.begun)
    bad = [
      asyncio.create_task(answer(b, -1)),
      asyncio.create_task(answer(b, 3)),
    ]
    await until(lambda: b.taken == 3)
    passes.go.set()
    found = await asyncio.gather(*bad, return_exceptions=True)
    assert [str(one) for one in found] == ["a pass that fails"] * 2
    assert await first == [2]
    assert await answer(b, 4) == [8]
    b.close()

  run(check())


@pytest.mark.fault("failing-pass", "leaving-client")
def test_a_pass_that_fails_for_a_client_that_left_ends_no_later_one():
  async def check():
    passes = Passes()
    b = batcher(passes)
    passes.go.clear()
    left = asyncio.create_task(answer(b, -1))
    await until(lambda: passes.begun)
    left.cancel()
    await asyncio.wait([left])
    passes.go.set()
    assert await asyncio.wait_for(answer(b, 3), 5) == [6]
    b.close()

  run(check())


@pytest.mark.fault("full-queue")
def test_heavy_requests_leave_half_of_the_queue_to_others():
  async def check():
    passes = Passes()
    b = batcher(passes, max_queue=8)
    passes.go.clear()
    heavy = [asyncio.create_task(answer(b, *[1] * 4, heavy=True))]
    await until(lambda: b.taken == 4)
    with pytest.raises(RequestError, match="4 images are waiting"):
      await answer(b, 1, heavy=True)
    light = [asyncio.create_task(answer(b, i)) for i in range(4)]
    await until(lambda: b.taken == 8)
    passes.go.set()
    await asyncio.gather(*heavy, *light)
    # One that is larger than half of the queue is taken if it is alone.
    assert len(await answer(b, *range(6), heavy=True)) == 6
    b.close()

  run(check())


@pytest.mark.fault("full-queue")
def test_a_full_queue_says_when_to_come_again():
  async def check():
    passes = Passes()
    b = batcher(passes, max_queue=3)
    passes.go.clear()
    waiting = asyncio.create_task(answer(b, 1, 2))
    await until(lambda: passes.begun)
    with pytest.raises(RequestError, match="2 images are waiting") as refused:
      await answer(b, 3, 4)
    assert refused.value.status == 503
    assert int(refused.value.headers["Retry-After"]) >= 1
    another = asyncio.create_task(answer(b, 3))  # for which there is room
    await until(lambda: b.taken == 3)
    passes.go.set()
    assert await waiting == [2, 4]
    assert await another == [6]
    assert await answer(b, 3, 4, 5) == [6, 8, 10]
    b.close()

  run(check())


@pytest.mark.fault("leaving-client")
def test_abandoned_requests_are_not_computed():
  async def check():
    passes = Passes()
    b = batcher(passes)
    passes.go.clear()
    first = asyncio.create_task(answer(b, 1))
    await until(lambda: passes.begun)
    late = asyncio.create_task(asyncio.wait_for(answer(b, 2), 0.01))
    cancelled = asyncio.create_task(answer(b, 3))
    await until(lambda: b.taken == 3)
    cancelled.cancel()
    with pytest.raises(TimeoutError):
      await late
    passes.go.set()
    await first
    b.close()
    assert passes.sizes == [1]
    assert b.taken == 0

  run(check())


@pytest.mark.fault("leaving-client")
def test_client_that_leaves_during_a_pass_moves_no_rows():
  async def check():
    passes = Passes()
    b = batcher(passes)
    passes.go.clear()
    some = [asyncio.create_task(answer(b, i, i + 0.5)) for i in (1, 2, 3)]
    await until(lambda: passes.begun)
    some[0].cancel()
    await asyncio.wait(some[:1])
    passes.go.set()
    assert await asyncio.gather(*some[1:]) == [[4, 5], [6, 7]]
    assert passes.sizes == [6]
    b.close()

  run(check())


def test_a_lone_request_does_not_wait():
  async def check():
    b = batcher(Passes(), wait_seconds=30.0)
    async with asyncio.timeout(5):
      assert await answer(b, 1) == [2]
      b.close()

  run(check())


def test_images_wait_for_those_that_are_decoded():
  async def check():
    passes = Passes()
    decoded = asyncio.Event()

    async def slow():
      with b.room(1):
        await decoded.wait()
        await b.submit(pixels(7))

    b = batcher(passes, least_fill=0, wait_seconds=30.0)
    both = [asyncio.create_task(one) for one in (slow(), answer(b, 1))]
    await until(lambda: b.taken == 2)
    decoded.set()
    async with asyncio.timeout(15):
      await asyncio.gather(*both)
    assert passes.sizes == [2]
    passes.sizes.clear()
    decoded.clear()
    b = batcher(passes, wait_seconds=0.01)
    late = asyncio.create_task(slow())
    await answer(b, 1)  # but not for long
    decoded.set()
    await late
    assert passes.sizes == [1, 1]
    b.close()

  run(check())


@pytest.mark.parametrize(
  ("waiting", "cpu", "accelerator"),
  [
    ([1], 1, 1),
    ([1, 1], 1, 4),
    ([2], 4, 4),  # never less than the oldest request needs
    ([1, 2], 4, 4),
    ([1, 2, 2], 4, 8),
    ([3, 2], 4, 8),
    ([5], 8, 8),
    ([1, 2, 3], 8, 8),
    ([3] * 9, 8, 8),
  ],
)
def test_the_batch_size_follows_a_fixed_rule(waiting, cpu, accelerator):
  async def check():
    for size, least_fill in ((cpu, 0.75), (accelerator, 0)):
      b = batcher(Passes(), least_fill=least_fill)
      assert b._batch_size(waiting) == size
      b.close()

  run(check())


def test_rows_count_padding():
  async def check():
    rows = []
    b = batcher(Passes(), on_batch=lambda *batch: rows.append(batch[1]))
    for count in (1, 2, 4, 5, 8, 9, 10, 20):
      await answer(b, *range(count))
    b.close()
    assert rows == [1, 4, 4, 8, 8, 9, 12, 20]

  run(check())
