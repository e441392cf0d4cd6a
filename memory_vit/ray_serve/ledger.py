"""One order for the changes of tasks of all replicas: the ledger.

A change is a new listing of the whole set, made from the one that its replica
answers by. The ledger takes one at a time, and only of the current listing, so
there is one order. It then goes in two steps, and so never by halves:

1. All replicas make the new set ready, which nobody is answered by yet. Where
   one of them refuses, or is late, it is forgotten everywhere.
2. Once all are ready, it is written down where there is a --state_dir, and all
   show it. Only then is the client told.

Replicas ask what is new and wait for the answer; nobody has to reach them. A
replica that starts joins once it answers by the current set, and is asked for
changes from then on. The set itself is known by all replicas: a ledger that
was restarted learns it from those that have the newest.

Nothing here knows of Ray: `ledger_actor` makes it an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from memory_vit.errors import TrainingError
from memory_vit.ray_serve.listing import (
  Board,
  Entry,
  Listing,
  Outcome,
  Proposal,
  Refusal,
  Report,
)
from memory_vit.serving.task_store import TaskStore

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Member:
  """A replica that answers requests; `handle` is what tells if it lives."""

  handle: Any
  report: Report


@dataclasses.dataclass(frozen=True)
class Patience:
  """Seconds that the ledger waits.

  Attributes:
    ready: until all replicas are ready for a change; they may have to compile.
    shown: until all that live have said that they answer by it.
    news: until a replica that asks for news is told that there is none.
    founding: after a start, for the replica that knows the newest set.
    survivors: after a restart, for the first replica that has answered before,
      where only replicas that start have come.
    alive: between two looks at whether a replica lives that is waited for.
  """

  ready: float = 300.0
  shown: float = 10.0
  news: float = 10.0
  founding: float = 2.0
  survivors: float = 15.0
  alive: float = 1.0


class Ledger:
  """Holds the set of tasks that replicas answer by; for one event loop."""

  def __init__(
    self,
    store: TaskStore | None,
    is_alive: Callable[[Any], Awaitable[bool]],
    patience: Patience,
    *,
    is_restarted: bool = False,
  ) -> None:
    """Know nothing yet: the first replicas say what the set is.

    Args:
      store: where tasks that were added are kept; None for nowhere.
      is_alive: whether the replica of a handle lives.
      patience: how long it waits.
      is_restarted: whether there was one before it, which replicas followed.
    """
    self._store = store
    self._is_alive = is_alive
    self._patience = patience
    self._is_restarted = is_restarted
    self._board: Board | None = None
    self._founders: list[Listing] = []
    self._founding: asyncio.Task[Board] | None = None
    # Calls of members that know a newer set, for which a change gives way.
    self._correcting = 0
    # From the answers of all replicas to a change until it is shown or not.
    self._is_deciding = False
    self._is_on_disk = True
    self._proposing: set[asyncio.Task[Outcome]] = set()
    self._contents: dict[str, bytes] = {}
    self._members: dict[str, _Member] = {}
    self._one = asyncio.Lock()
    self._news = asyncio.Condition()

  @property
  def members(self) -> tuple[str, ...]:
    """Names of the replicas that answer requests."""
    return tuple(self._members)

  async def board(self) -> Board | None:
    """What is known; None where no replica has said yet what the set is."""
    return self._board

  async def kept(self) -> list[tuple[str, bytes]]:
    """Name and file of each task that --state_dir keeps, the oldest first."""
    if self._store is None:
      return []
    kept = self._store.kept()
    return [(name, await asyncio.to_thread(p.read_bytes)) for name, p in kept]

  async def content(self, content: str) -> bytes | None:
    """The file of a task; None where it is of no set that there is now."""
    return self._contents.get(content)

  async def found(
    self, listing: Listing, contents: Mapping[str, bytes], member: str = "",
    handle: Any = None,
  ) -> Board:  # fmt: skip
    """Say what the set of tasks is, to a ledger that does not know.

    Of several that say so within a while the newest is taken: those that have
    answered requests by it know every change that was confirmed. One of those
    that comes later still is believed, and its newer set answers from then on.

    Args:
      listing: version 0 of a replica that starts, else what it answers by.
      contents: the files of its tasks.
      member: the name of a replica that answers already, and goes on.
      handle: of that one.

    Raises:
      OSError: where --state_dir cannot be read or written.
    """
    if self._board is None:
      self._contents |= contents
      self._founders.append(listing)
      await self._tell()
      if self._founding is None or self._founding.done():
        self._founding = asyncio.create_task(self._choose_newest())
    elif member and listing.version > self._board.current.version:
      await self._correct(listing, contents)
    if member:
      self._members[member] = _Member(handle, Report(listing.version))
    if self._board is not None:
      return self._board
    assert self._founding is not None
    return await asyncio.shield(self._founding)

  async def join(self, member: str, handle: Any, shown: int) -> bool:
    """Be asked for changes from now on.

    False where `shown` is outdated, or will be in a moment: it was not asked
    for the change that is being decided.
    """
    if self._board is None or shown != self._board.current.version:
      return False
    if self._is_deciding:
      return False
    self._members[member] = _Member(handle, Report(shown))
    return True

  async def leave(self, member: str) -> None:
    """Be asked no more."""
    self._members.pop(member, None)
    await self._tell()

  async def follow(
    self, member: str, known: Board, report: Report
  ) -> Board | None:
    """Report, and wait for what is new; None for a replica to join (again)."""
    if member not in self._members:
      return None
    self._members[member].report = report
    await self._tell()
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._patience.news), self._news:
        await self._news.wait_for(lambda: self._board != known)
    return self._board

  async def propose(
    self, base: int, entries: tuple[Entry, ...], contents: Mapping[str, bytes],
    seconds: float | None = None,
  ) -> Outcome:  # fmt: skip
    """Change the set of tasks on all replicas, or on none.

    A change whose client leaves goes on to its end.

    Args:
      base: version of the set that was changed.
      entries: of the new set.
      contents: files that are new in it.
      seconds: until all replicas are ready; None is that of `Patience`.
    """
    change = asyncio.create_task(
      self._propose(base, entries, contents, seconds)
    )
    self._proposing.add(change)
    change.add_done_callback(self._proposing.discard)
    return await asyncio.shield(change)

  async def _propose(
    self, base: int, entries: tuple[Entry, ...], contents: Mapping[str, bytes],
    seconds: float | None,
  ) -> Outcome:  # fmt: skip
    async with self._one:
      if self._board is None or base != self._board.current.version:
        return Outcome("outdated")
      current = self._board.current
      proposal = Proposal(uuid.uuid4().hex, Listing(base + 1, entries))
      self._contents |= contents
      await self._show(Board(current, proposal))
      decided = Board(current)
      try:
        refused = await self._judged(proposal, seconds)
        self._is_deciding = True
        if self._correcting:
          refused = Outcome("outdated")
        if refused is None:
          refused = await self._keep(current, proposal.listing)
        if refused is None:
          decided = Board(proposal.listing)
      finally:
        self._is_deciding = False
        await self._show(decided)
        self._forget_contents()
      return refused or await self._confirmed(proposal.listing)

  async def drop_dead(self, names: Iterable[str] | None = None) -> None:
    """Forget replicas that do not live any more."""
    for name in list(self._members if names is None else names):
      member = self._members.get(name)
      if member and not await self._is_alive(member.handle):
        logger.info("replica %s is gone", name)
        self._members.pop(name, None)

  async def _choose_newest(self) -> Board:
    await asyncio.sleep(self._patience.founding)
    if self._is_restarted:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(self._patience.survivors), self._news:
          await self._news.wait_for(lambda: self._newest_founder().version > 0)
    chosen = None
    # Another one may come while files are written.
    while chosen != (chosen := self._newest_founder()):
      current = Listing(max(1, chosen.version), chosen.entries)
      await self._put_on_disk(current)
    board = Board(current)
    await self._show(board)
    self._founders.clear()
    self._forget_contents()
    return board

  def _newest_founder(self) -> Listing:
    return max(self._founders, key=lambda listing: listing.version)

  async def _correct(
    self, newer: Listing, contents: Mapping[str, bytes]
  ) -> None:
    """Let a set answer that was confirmed, and that nobody had told of."""
    self._correcting += 1
    await self._tell()  # a change that waits for replicas gives way
    try:
      async with self._one:
        assert self._board is not None
        if newer.version > self._board.current.version:
          logger.warning("a replica has a newer set: version %d", newer.version)
          self._contents |= contents
          await self._put_on_disk(newer)
          await self._show(Board(newer))
          self._forget_contents()
    finally:
      self._correcting -= 1

  async def _put_on_disk(self, current: Listing) -> None:
    """Let --state_dir have what is answered by; else the next change does it.

    Tasks answer although they cannot be written: replicas have them, and they
    were confirmed.
    """
    if self._store is None:
      return
    try:
      await asyncio.to_thread(self._reconcile, current)
      self._is_on_disk = True
    except (OSError, TrainingError) as error:
      self._is_on_disk = False
      logger.error(
        "--state_dir is not what answers (%s): tried again with the next "
        "change of tasks.",
        _reason(error),
      )

  def _reconcile(self, current: Listing) -> None:
    """Let --state_dir have what is answered by, and no change besides."""
    assert self._store is not None
    there = {name: path.read_bytes() for name, path in self._store.kept()}
    added = {entry.name: entry for entry in current.entries if entry.added}
    for name in there.keys() - added.keys():
      with self._store.removing(name):
        pass
    for name, entry in added.items():
      content = self._contents[entry.content]
      if there.get(name) != content:
        with self._store.keeping(name, content):
          pass

  async def _judged(
    self, proposal: Proposal, seconds: float | None
  ) -> Outcome | None:
    """Wait until all replicas are ready; else why it ends here."""

    def late() -> list[str]:
      return [
        name
        for name, member in self._members.items()
        if member.report.judged != proposal.key
      ]

    def refusal() -> Refusal | None:
      return next(
        (
          member.report.refusal
          for member in self._members.values()
          if member.report.judged == proposal.key and member.report.refusal
        ),
        None,
      )

    def lacking() -> list[str]:
      return [] if refusal() or self._correcting else late()

    seconds = self._patience.ready if seconds is None else seconds
    await self._wait(lacking, seconds)
    if found := refusal():
      return Outcome("refused", refusal=found)
    if missing := late():
      return Outcome("late", replicas=tuple(missing))
    return None

  async def _confirmed(self, listing: Listing) -> Outcome:
    """Wait until all replicas answer by a listing."""

    def behind() -> list[str]:
      return [
        name
        for name, member in self._members.items()
        if member.report.shown < listing.version
      ]

    await self._wait(behind, self._patience.shown)
    return Outcome("taken", replicas=tuple(behind()))

  async def _keep(self, old: Listing, new: Listing) -> Outcome | None:
    """Write down what has changed; else why that cannot be."""
    if self._store is None:
      return None
    try:
      if not self._is_on_disk:
        await asyncio.to_thread(self._reconcile, old)
        self._is_on_disk = True
      await asyncio.to_thread(self._write, self._store, old, new)
    except (OSError, TrainingError) as error:
      return Outcome("not kept", reason=_reason(error))
    return None

  def _write(self, store: TaskStore, old: Listing, new: Listing) -> None:
    names = {entry.name for entry in new.entries}
    with contextlib.ExitStack() as stack:
      for entry in new.entries:
        if entry.added and entry not in old.entries:
          content = self._contents[entry.content]
          stack.enter_context(store.keeping(entry.name, content))
      for entry in old.entries:
        if entry.name not in names:
          stack.enter_context(store.removing(entry.name))

  async def _wait(
    self, lacking: Callable[[], list[str]], seconds: float
  ) -> None:
    """Wait until no living replica is lacking, or so many seconds are over."""
    end = time.monotonic() + seconds
    while lacking() and (left := end - time.monotonic()) > 0:
      try:
        async with asyncio.timeout(min(left, self._patience.alive)), self._news:
          await self._news.wait_for(lambda: not lacking())
      except TimeoutError:
        await self.drop_dead(lacking())

  def _forget_contents(self) -> None:
    """Keep the files of tasks alone that answer."""
    assert self._board is not None
    wanted = self._board.current.contents
    self._contents = {c: f for c, f in self._contents.items() if c in wanted}

  async def _show(self, board: Board) -> None:
    self._board = board
    await self._tell()

  async def _tell(self) -> None:
    async with self._news:
      self._news.notify_all()


def _reason(error: OSError | TrainingError) -> str:
  """Why a file cannot be written or removed, in few words."""
  cause = error if isinstance(error, OSError) else error.__cause__
  return getattr(cause, "strerror", None) or type(error).__name__
