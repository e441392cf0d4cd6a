"""The ledger of changes, with replicas that say what a test wants."""

import asyncio
import dataclasses
import time

import pytest

from memory_vit.ray_serve.ledger import Ledger, Patience
from memory_vit.ray_serve.listing import (
  Entry,
  Listing,
  Refusal,
  Report,
  with_entry,
)
from memory_vit.serving.task_store import TaskStore

PATIENCE = Patience(ready=0.5, shown=0.3, news=0.2, founding=0.05, alive=0.05)
BIRDS, PETS, CATS = (
  Entry(slot, name, f"content of {name}", added=True)
  for slot, name in enumerate(("birds", "pets", "cats"))
)
FILES = {e.content: e.name.encode() for e in (BIRDS, PETS, CATS)}


def test_a_task_takes_the_place_of_the_one_in_its_slot():
  other = Entry(BIRDS.slot, "birds", "other", added=True)
  assert with_entry((BIRDS, PETS), other) == (other, PETS)
  assert with_entry((PETS,), BIRDS) == (BIRDS, PETS)


class Replica:
  """Does what the ledger says, and remembers every set that it answered by.

  `refuses` holds contents that it cannot take; `is_silent`: it asks no more;
  `is_stuck`: it is ready, and never shows.
  """

  def __init__(self, ledger, name):
    self.ledger, self.name = ledger, name
    self.shown = []
    self.refuses, self.is_silent, self.is_stuck = set(), False, False

  async def run(self, listing):
    board = await self.ledger.found(listing, FILES)
    while not await self.ledger.join(self.name, self, board.current.version):
      board = await self.ledger.board()
    self.shown.append(board.current)
    report = Report(board.current.version)
    while True:
      while self.is_silent:
        await asyncio.sleep(0.01)
      board = await self.ledger.follow(self.name, board, report)
      if board is None:
        return
      if board.current != self.shown[-1] and not self.is_stuck:
        self.shown.append(board.current)
      judged, refusal = report.judged, report.refusal
      if board.proposal and board.proposal.key != judged:
        judged, refusal = board.proposal.key, None
        if self.refuses & board.proposal.listing.contents:
          refusal = Refusal("no room.", by_task=False)
      report = Report(self.shown[-1].version, judged, refusal)


def with_replicas(check, count=2, store=None):
  """Run a check of a ledger, its replicas, and the names of dead ones."""
  dead = set()

  async def is_alive(replica):
    return replica.name not in dead

  async def run():
    ledger = Ledger(store, is_alive, PATIENCE)
    replicas = [Replica(ledger, f"r{i}") for i in range(count)]
    running = [
      asyncio.create_task(one.run(Listing(0, (BIRDS,)))) for one in replicas
    ]
    async with asyncio.timeout(30):
      while len(ledger.members) < count:
        await asyncio.sleep(0.01)
    try:
      return await check(ledger, replicas, dead)
    finally:
      for one in running:
        one.cancel()

  return asyncio.run(run())


def versions(replica):
  return [listing.version for listing in replica.shown]


def test_a_change_is_taken_by_all_before_it_is_confirmed():
  async def check(ledger, replicas, dead):
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, done.replicas) == ("taken", ())
    for one in replicas:
      assert one.shown[-1] == Listing(2, (BIRDS, PETS))
    assert await ledger.content(PETS.content) == b"pets"

  with_replicas(check)


def test_changes_have_one_order():
  """However many come at once: each is made from the one before it."""

  async def check(ledger, replicas, dead):
    async def add(entry):
      while True:
        current = (await ledger.board()).current
        entries = (*current.entries, entry)
        done = await ledger.propose(current.version, entries, FILES)
        if done.kind != "outdated":
          return done.kind
        await asyncio.sleep(0)

    assert await asyncio.gather(add(PETS), add(CATS)) == ["taken", "taken"]
    assert replicas[0].shown == replicas[1].shown
    assert versions(replicas[0]) == [1, 2, 3]
    final = replicas[0].shown[-1].entries
    assert set(final) == {BIRDS, PETS, CATS}
    stale = await ledger.propose(1, (BIRDS,), FILES)
    assert stale.kind == "outdated"
    assert versions(replicas[0]) == [1, 2, 3]

  with_replicas(check)


def test_what_one_replica_refuses_is_shown_by_none():
  async def check(ledger, replicas, dead):
    replicas[1].refuses = {PETS.content}
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, done.refusal.reason) == ("refused", "no room.")
    assert await ledger.content(PETS.content) is None
    done = await ledger.propose(1, (BIRDS, CATS), FILES)
    assert done.kind == "taken"
    for one in replicas:
      assert one.shown == [Listing(1, (BIRDS,)), Listing(2, (BIRDS, CATS))]

  with_replicas(check)


@pytest.mark.slow
def test_a_replica_that_lives_and_is_silent_is_late():
  """It may answer still: so nothing changes, until it is known to be dead."""

  async def check(ledger, replicas, dead):
    replicas[1].is_silent = True
    await asyncio.sleep(2 * PATIENCE.news)  # it is in no call any more
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, done.replicas) == ("late", ("r1",))
    assert versions(replicas[0]) == [1]
    dead.add("r1")
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, ledger.members) == ("taken", ("r0",))
    assert versions(replicas[0]) == [1, 2]

  with_replicas(check)


def test_who_does_not_confirm_is_named():
  async def check(ledger, replicas, dead):
    replicas[0].is_stuck = True
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, done.replicas) == ("taken", ("r0",))
    assert versions(replicas[1]) == [1, 2]

  with_replicas(check)


@pytest.mark.slow
def test_who_starts_during_a_change_is_asked_as_well():
  async def check(ledger, replicas, dead):
    replicas[0].is_silent = True
    await asyncio.sleep(2 * PATIENCE.news)
    change = asyncio.create_task(ledger.propose(1, (BIRDS, PETS), FILES))
    await asyncio.sleep(0.05)
    late = Replica(ledger, "late")
    late.refuses = {PETS.content}
    running = asyncio.create_task(late.run(Listing(0, (CATS,))))
    done = await change
    assert (done.kind, bool(done.refusal)) == ("refused", True)
    assert late.shown == [Listing(1, (BIRDS,))]  # not what it brought
    running.cancel()

  with_replicas(check, count=1)


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_new_ledger_takes_the_newest_set(newest_first):
  """Of replicas that have answered; one that starts has version 0."""
  offers = [Listing(7, (PETS,)), Listing(8, (PETS, CATS)), Listing(0, (BIRDS,))]
  if not newest_first:
    offers.reverse()

  async def found(ledger, number, offer):
    await asyncio.sleep(0.005 * number)
    return await ledger.found(offer, FILES)

  async def check():
    ledger = Ledger(None, lambda handle: None, PATIENCE)
    boards = await asyncio.gather(
      *(found(ledger, i, offer) for i, offer in enumerate(offers))
    )
    assert {board.current for board in boards} == {Listing(8, (PETS, CATS))}
    assert not await ledger.join("r", None, 7)
    assert await ledger.join("r", None, 8)

  asyncio.run(check())


def kept_in(store):
  return {name: path.read_bytes() for name, path in store.kept()}


@pytest.mark.slow
def test_a_newer_set_that_is_known_late_answers(tmp_path):
  """It was confirmed; the ledger began with the set of one that started."""
  store = TaskStore(str(tmp_path))

  async def check(ledger, replicas, dead):
    replicas[0].is_silent = True
    await asyncio.sleep(2 * PATIENCE.news)
    change = asyncio.create_task(ledger.propose(1, (BIRDS, CATS), FILES))
    await asyncio.sleep(0.05)
    confirmed = Listing(2, (BIRDS, PETS))
    survivor = Replica(ledger, "survivor")
    board = await ledger.found(confirmed, FILES, "survivor", survivor)
    assert board.current == confirmed
    assert (await change).kind == "outdated"  # it gives way, at once
    assert kept_in(store) == {"birds": b"birds", "pets": b"pets"}
    replicas[0].is_silent = False
    await asyncio.sleep(2 * PATIENCE.news)
    assert replicas[0].shown[-1] == confirmed
    # Who only starts is not believed.
    board = await ledger.found(Listing(9, (CATS,)), FILES)
    assert board.current == confirmed

  with_replicas(check, count=1, store=store)
  store.close()


def test_a_newer_set_that_comes_while_files_are_written(tmp_path, monkeypatch):
  store = TaskStore(str(tmp_path))
  real = Ledger._reconcile

  def slow(*arguments):
    time.sleep(0.2)
    real(*arguments)

  async def check():
    ledger = Ledger(store, lambda handle: None, PATIENCE)
    first = asyncio.create_task(ledger.found(Listing(0, (BIRDS,)), FILES))
    await asyncio.sleep(PATIENCE.founding + 0.1)
    newer = Listing(7, (PETS,))
    board = await ledger.found(newer, FILES, "survivor", None)
    assert board.current == (await first).current == newer
    assert kept_in(store) == {"pets": b"pets"}

  monkeypatch.setattr(Ledger, "_reconcile", slow)
  asyncio.run(check())
  store.close()


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_restarted_ledger_waits_for_who_has_answered(is_restarted):
  async def check():
    patience = dataclasses.replace(PATIENCE, survivors=5)
    ledger = Ledger(
      None, lambda handle: None, patience, is_restarted=is_restarted
    )
    starting = asyncio.create_task(ledger.found(Listing(0, (BIRDS,)), FILES))
    await asyncio.sleep(4 * PATIENCE.founding)
    assert starting.done() != is_restarted
    await ledger.found(Listing(7, (PETS,)), FILES, "survivor", None)
    expected = (7, (PETS,)) if is_restarted else (1, (BIRDS,))
    assert (await starting).current == Listing(*expected)

  asyncio.run(check())


def test_a_restarted_ledger_does_not_wait_for_ever():
  async def check():
    patience = dataclasses.replace(PATIENCE, survivors=0.05)
    ledger = Ledger(None, lambda handle: None, patience, is_restarted=True)
    board = await ledger.found(Listing(0, (BIRDS,)), FILES)
    assert board.current == Listing(1, (BIRDS,))

  asyncio.run(check())


@pytest.fixture
def slow_write(monkeypatch):
  real = Ledger._write

  def slow(*arguments):
    time.sleep(0.3)
    real(*arguments)

  monkeypatch.setattr(Ledger, "_write", slow)


def test_nobody_joins_while_a_change_is_written(tmp_path, slow_write):
  """All others were asked for it already."""
  store = TaskStore(str(tmp_path))

  async def check(ledger, replicas, dead):
    change = asyncio.create_task(ledger.propose(1, (BIRDS, PETS), FILES))
    await asyncio.sleep(0.15)
    assert (await ledger.board()).current.version == 1
    assert not await ledger.join("late", None, 1)
    assert (await change).kind == "taken"
    assert not await ledger.join("late", None, 1)
    assert await ledger.join("late", None, 2)

  with_replicas(check, store=store)
  store.close()


@pytest.mark.slow
def test_a_client_that_leaves_leaves_no_half_change(tmp_path, slow_write):
  store = TaskStore(str(tmp_path))

  async def check(ledger, replicas, dead):
    change = asyncio.create_task(ledger.propose(1, (BIRDS, PETS), FILES))
    await asyncio.sleep(0.15)
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
      await change
    await asyncio.sleep(0.3)
    assert kept_in(store) == {"birds": b"birds", "pets": b"pets"}
    for one in replicas:
      assert one.shown[-1] == Listing(2, (BIRDS, PETS))

  with_replicas(check, store=store)
  store.close()


def test_a_full_disk_ends_no_replica(tmp_path, monkeypatch, caplog):
  """They go on by what they answer by; it is written with the next change."""
  store = TaskStore(str(tmp_path))

  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(TaskStore, "keeping", full)

    async def check(ledger, replicas, dead):
      assert replicas[0].shown == [Listing(1, (BIRDS,))]
      assert "No space left on device" in caplog.text
      done = await ledger.propose(1, (BIRDS, PETS), FILES)
      assert done.kind == "not kept"
      patch.undo()
      done = await ledger.propose(1, (BIRDS, PETS), FILES)
      assert done.kind == "taken"
      assert kept_in(store) == {"birds": b"birds", "pets": b"pets"}

    with_replicas(check, store=store)
  store.close()


def test_state_dir_has_what_answers(tmp_path):
  store = TaskStore(str(tmp_path))

  def kept():
    return {name: path.read_bytes() for name, path in store.kept()}

  async def check(ledger, replicas, dead):
    assert kept() == {"birds": b"birds"}  # of the first replicas
    await ledger.propose(1, (BIRDS, PETS), FILES)
    assert kept() == {"birds": b"birds", "pets": b"pets"}
    replicas[1].refuses = {CATS.content}
    await ledger.propose(2, (BIRDS, PETS, CATS), FILES)
    assert kept().keys() == {"birds", "pets"}
    await ledger.propose(2, (PETS,), FILES)
    assert kept() == {"pets": b"pets"}

  with_replicas(check, store=store)

  async def restarted():
    """A change that nobody was told of is not there any more."""
    (tmp_path / "tasks" / "cats.safetensors").write_bytes(b"cats")
    ledger = Ledger(store, lambda handle: None, PATIENCE)
    await ledger.found(Listing(3, (PETS,)), FILES)
    assert kept() == {"pets": b"pets"}

  asyncio.run(restarted())
  store.close()


def test_what_cannot_be_kept_is_shown_by_none(tmp_path, monkeypatch):
  store = TaskStore(str(tmp_path))

  def full(*_):
    raise OSError(28, "No space left on device")

  async def check(ledger, replicas, dead):
    monkeypatch.setattr(TaskStore, "keeping", full)
    done = await ledger.propose(1, (BIRDS, PETS), FILES)
    assert (done.kind, done.reason) == ("not kept", "No space left on device")
    assert [versions(one) for one in replicas] == [[1], [1]]

  with_replicas(check, store=store)
  store.close()
