"""Change tasks on all replicas at once: the replica's side of the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from memory_vit.errors import MemoryVitError, TaskError
from memory_vit.prediction import task_set as sets
from memory_vit.ray_serve.ledger_calls import LedgerCalls, LedgerLost
from memory_vit.ray_serve.listing import (
  Board,
  Entry,
  Listing,
  Outcome,
  Proposal,
  Refusal,
  Report,
  content_of,
  with_entry,
)
from memory_vit.serving.request_error import RequestError, busy, one_line
from memory_vit.serving.task_changes import Changed, TaskChanges
from memory_vit.serving.task_store import SUFFIX, TaskStore
from memory_vit.tasks import store as task_files

if TYPE_CHECKING:
  from memory_vit.model.task import Task
  from memory_vit.prediction import Change, Predictor, TaskSet

logger = logging.getLogger(__name__)
# Changes of others that come first, until a client is told to come again.
_MOST_TRIES = 30
# Until this replica has the change that came first.
_AGAIN_SECONDS = 1.0
# Until it answers by its own change, once all have taken that.
_SHOWN_SECONDS = 10.0
_JOIN_SECONDS = 0.05
_RETRY_SECONDS = 5.0
_LEAVE_SECONDS = 5.0
_MOST_CHANGES = 64


class _Gone(Exception):  # noqa: N818 what happened, not a fault
  """The file of a task that was of an older set."""


@dataclasses.dataclass(frozen=True)
class _Ready:
  """A set of tasks that can be shown, and what the change to it is."""

  listing: Listing
  task_set: TaskSet
  change: Change


class SharedTaskChanges(TaskChanges):
  """Changes the tasks of all replicas, in the one order of a ledger.

  `prepare` gives the predictor the tasks of now, before it is warm. From
  `begin` on this replica takes part in every change.
  """

  def __init__(
    self,
    predictor: Predictor,
    store: TaskStore,
    task_root: str | None,
    on_change: Callable[[str], None],
    *,
    ledger: LedgerCalls,
    member: str,
    handle: Any,
    change_timeout: float | None = None,
    is_kept: bool = False,
  ) -> None:
    """Talk to nobody yet.

    Args:
      predictor: of this replica.
      store: for uploads, and what is checked.
      task_root: see `TaskChanges`.
      on_change: see `TaskChanges`.
      ledger: of all replicas.
      member: name of this one.
      handle: by which the ledger can tell whether it lives.
      change_timeout: seconds until all replicas are ready for a change that
        comes by this one; None leaves that to the ledger.
      is_kept: whether the ledger has a --state_dir.
    """
    super().__init__(predictor, store, task_root, on_change)
    self._is_kept = is_kept  # the store is for uploads alone
    self._ledger = ledger
    self._member, self._handle = member, handle
    self._change_timeout = change_timeout
    self._shown = Listing(0, ())
    self._board = Board(self._shown)
    self._report = Report(0)
    self._ready: dict[int, _Ready] = {}
    self._changes: dict[int, Change] = {}
    self._changed = asyncio.Condition()
    self._following: asyncio.Task[None] | None = None
    self._problem = ""

  @property
  def problem(self) -> str:
    """Why it no longer follows the ledger; "" where it does."""
    return self._problem

  def restore(self) -> None:
    """Do nothing: `prepare` asks the ledger for what is kept."""

  async def begin(self) -> None:
    """Join the others, once this replica answers by what they answer by."""
    while not await self._join():
      await self.prepare()
      await asyncio.sleep(_JOIN_SECONDS)  # a change may be being written
    self._following = asyncio.create_task(self._follow())

  async def prepare(self) -> None:
    """Take the tasks of the others, so that they are there at the warm-up.

    Raises:
      MemoryVitError: for tasks that cannot be used here.
    """
    board = await self._asked(self._ledger.board)
    if board is None:
      board = await self._found()
    elif not self._shown.version:
      await asyncio.to_thread(self._warn_of_other_tasks, board.current)
    with contextlib.suppress(_Gone):  # `begin` asks again
      await self._obey(Board(board.current))

  def _warn_of_other_tasks(self, current: Listing) -> None:
    """Say where a task that was given is another one than the others have.

    Such as where its files were replaced after the application was deployed.
    """
    mine = {entry.name: entry.content for entry in self._listed({}).entries}
    for entry in current.entries:
      if not entry.added and mine.get(entry.name, entry.content) != (
        entry.content
      ):
        logger.warning(
          "task %r that was given is not the one by which the other replicas "
          "answer: theirs is used. Deploy again to change it for all.",
          entry.name,
        )

  async def end(self) -> None:
    """Take no part any more."""
    if self._following is not None:
      self._following.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await self._following
    with contextlib.suppress(LedgerLost, TimeoutError):
      async with asyncio.timeout(_LEAVE_SECONDS):
        await self._ledger.leave(self._member)

  async def take(self, name: str, task: Task) -> Changed:
    """Let a task answer on all replicas; see `TaskChanges.take`.

    Raises:
      RequestError: where a replica cannot take it, or is late; nothing has
        changed then. And where the ledger ended, which leaves that open.
    """
    file = await asyncio.to_thread(self._file, sets.named(task, name))

    def changed(listing: Listing) -> tuple[str, tuple[Entry, ...]]:
      action, wanted = self._with(name, task)
      self._require_restorable(wanted.values())
      slot = next(s for s, one in wanted.items() if one.name == name)
      entry = Entry(slot, name, content_of(file), added=True)
      return action, with_entry(listing.entries, entry)

    return await self._change(changed, {content_of(file): file})

  async def drop(self, name: str) -> Changed:
    """Remove a task on all replicas; see `TaskChanges.drop`."""

    def changed(listing: Listing) -> tuple[str, tuple[Entry, ...]]:
      self._require_restorable(self._without(name).values())
      return "remove", tuple(e for e in listing.entries if e.name != name)

    return await self._change(changed, {})

  async def _change(
    self,
    changed: Callable[[Listing], tuple[str, tuple[Entry, ...]]],
    files: Mapping[str, bytes],
  ) -> Changed:
    """Propose a change of what answers; again where others were first."""
    for _ in range(_MOST_TRIES):
      base = self._shown
      action, entries = changed(base)
      try:
        outcome = await self._ledger.propose(
          base.version, entries, files, self._change_timeout
        )
      except LedgerLost:
        raise busy(
          "the order of changes was lost and is being restored: whether the "
          "task was changed is not known; GET /v1/tasks says it.",
          _RETRY_SECONDS,
        ) from None
      if outcome.kind != "outdated":
        return await self._concluded(action, base.version + 1, outcome)
      # There may be no newer one: a new ledger is still learning what there is.
      await self._until_newer(base.version, _AGAIN_SECONDS)
    raise busy("other changes of tasks came first.", _RETRY_SECONDS)

  async def _concluded(
    self, action: str, version: int, outcome: Outcome
  ) -> Changed:
    """What the client is told of an outcome."""
    if outcome.kind == "refused" and outcome.refusal:
      raise RequestError(
        422 if outcome.refusal.by_task else 500,
        f"{outcome.refusal.reason} Nothing was changed on any replica.",
      )
    if outcome.kind == "late":
      raise busy(
        f"not ready in time: {', '.join(outcome.replicas)}. Nothing was "
        "changed on any replica.",
        _RETRY_SECONDS,
      )
    if outcome.kind == "not kept":
      raise OSError(0, outcome.reason)
    await self._until_newer(version - 1, _SHOWN_SECONDS)
    change = self._changes.get(version)
    if change is None:
      raise busy(
        f"the task was changed ({action}), but this replica is late to say by "
        "which set it answers: see GET /v1/tasks.",
        _RETRY_SECONDS,
      )
    return Changed(action, change, outcome.replicas)

  async def _until_newer(self, version: int, seconds: float) -> None:
    """Wait until this replica answers by a later set, but not for long."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(seconds), self._changed:
        await self._changed.wait_for(lambda: self._shown.version > version)

  async def _found(self, is_member: bool = False) -> Board:
    """Tell a ledger that knows nothing what this replica answers by."""
    if not self._shown.version:
      kept = await self._asked(self._ledger.kept)
      await asyncio.to_thread(self._restore, kept)
      self._shown = await asyncio.to_thread(self._listed, dict(kept))
    member = (self._member, self._handle) if is_member else ("", None)
    files = await asyncio.to_thread(self._all_files)
    return await self._asked(
      lambda: self._ledger.found(self._shown, files, *member)
    )

  def _restore(self, kept: list[tuple[str, bytes]]) -> None:
    """Add what --state_dir keeps to what was given, as one server does."""
    with contextlib.ExitStack() as stack:
      files = []
      for name, content in kept:
        path = stack.enter_context(self._store.upload())
        path.write_bytes(content)
        files.append((name, path))
      try:
        self.add_kept(files)
      except TaskError as error:
        message = str(error)
        for name, path in files:
          message = message.replace(str(path), f"tasks/{name}{SUFFIX}")
        raise TaskError(f"--state_dir: {message}") from error

  def _listed(self, kept: Mapping[str, bytes]) -> Listing:
    """What the predictor answers by, of version 0; its files are kept."""
    entries = []
    for slot, task in self._predictor.task_set.by_slot.items():
      content = content_of(self._file(task))
      entries.append(Entry(slot, task.name, content, task.name in kept))
    return Listing(0, tuple(entries))

  def _all_files(self) -> dict[str, bytes]:
    """{content: file} of all tasks of now."""
    tasks = self._predictor.task_set.by_slot.values()
    files = [self._file(task) for task in tasks]
    return {content_of(file): file for file in files}

  def _file(self, task: Task) -> bytes:
    """The file of a task: the same bytes, whoever writes it."""
    with self._store.upload() as path:
      task_files.save_task(task, path, format="safetensors")
      return path.read_bytes()

  async def _join(self) -> bool:
    shown = self._shown.version
    return bool(shown) and await self._asked(
      lambda: self._ledger.join(self._member, self._handle, shown)
    )

  async def _follow(self) -> None:
    """Do what the ledger says, until the end."""
    try:
      while True:
        board = await self._news()
        with contextlib.suppress(_Gone):  # asked again, as it is not known yet
          await self._obey(board)
    except Exception as error:
      self._problem = f"it follows the ledger no more: {one_line(str(error))}"
      logger.exception("this replica follows the ledger no more")

  async def _news(self) -> Board:
    """What the ledger says, once that is new, or one that starts knows it."""
    with contextlib.suppress(LedgerLost):
      board = await self._ledger.follow(self._member, self._board, self._report)
      if board is not None:
        return board
    return await self._found(is_member=True)

  @contextlib.asynccontextmanager
  async def _known_to_ledger(self) -> AsyncIterator[None]:
    """Go on asking during the body, which may compile for minutes.

    A ledger that is restarted meanwhile would take the set of others, which may
    be older.
    """

    async def ask() -> None:
      while True:
        await self._news()
        await asyncio.sleep(_AGAIN_SECONDS)

    asking = asyncio.create_task(ask())
    try:
      yield
    finally:
      asking.cancel()
      # What fails here fails again in `_follow`, which says so.
      await asyncio.gather(asking, return_exceptions=True)

  async def _obey(self, board: Board) -> None:
    """Answer by the current set; make a proposed one ready, and judge it."""
    if board.current != self._shown:
      await self._show(board.current)
    self._board = board
    self._report = dataclasses.replace(self._report, shown=self._shown.version)
    self._drop_given_up(board)
    proposal = board.proposal
    if proposal is None or proposal.key == self._report.judged:
      return
    async with self._known_to_ledger():
      refusal = await self._judge(proposal)
    self._report = Report(self._shown.version, proposal.key, refusal)

  def _drop_given_up(self, board: Board) -> None:
    """Free sets that were refused or late: each holds memory of the device."""
    wanted = [board.current]
    if board.proposal is not None:
      wanted.append(board.proposal.listing)
    self._ready = {
      version: ready
      for version, ready in self._ready.items()
      if ready.listing in wanted
    }

  async def _judge(self, proposal: Proposal) -> Refusal | None:
    """Make a proposed set ready; why it cannot be.

    Raises:
      _Gone: where it was given up meanwhile.
    """
    listing = proposal.listing
    try:
      ready = await self._made_ready(listing)
      new = {e.name for e in listing.entries} - {
        e.name for e in listing.entries if e in self._shown.entries
      }
      for name in new:
        await asyncio.to_thread(self._require_finite, name, ready.task_set)
    except MemoryVitError as error:
      return Refusal(one_line(str(error)), by_task=True)
    except _Gone:
      raise
    except Exception as error:  # such as no memory on the device
      logger.exception("this replica cannot take a change")
      reason = one_line(str(error)) or type(error).__name__
      return Refusal(
        f"replica {self._member} cannot take it: {reason}.", by_task=False
      )
    self._ready[listing.version] = ready
    self._note(ready)
    return None

  def _note(self, ready: _Ready) -> None:
    """Remember the last changes for clients that wait for them."""
    self._changes[ready.listing.version] = ready.change
    while len(self._changes) > _MOST_CHANGES:
      del self._changes[min(self._changes)]

  async def _show(self, listing: Listing) -> None:
    """Answer by a set from now on."""
    ready = self._ready.get(listing.version)
    if ready is None or ready.listing != listing:
      ready = await self._made_ready(listing)
      self._note(ready)
    # In a thread: a warm-up may hold the predictor for long.
    await asyncio.to_thread(self._predictor.show, ready.task_set)
    self._ready = {listing.version: ready}
    async with self._changed:
      self._shown = listing
      self._changed.notify_all()
    logger.info(
      "answers by version %d of the tasks, digest=%s",
      listing.version, ready.task_set.digest,
    )  # fmt: skip

  async def _made_ready(self, listing: Listing) -> _Ready:
    """Make a listing ready, with files of the ledger for what is not here."""
    here = {e.content: e for e in self._shown.entries}
    by_slot = self._predictor.task_set.by_slot
    wanted: dict[int, Task] = {}
    for entry in listing.entries:
      old = here.get(entry.content)
      if old is not None and old.name == entry.name and old.slot in by_slot:
        wanted[entry.slot] = by_slot[old.slot]
      else:
        wanted[entry.slot] = await self._fetched(entry)
    task_set, change = await asyncio.to_thread(
      self._predictor.make_ready, wanted, listing.version
    )
    return _Ready(listing, task_set, change)

  async def _fetched(self, entry: Entry) -> Task:
    """Load a task from its file, which is checked as every one."""
    file = await self._asked(lambda: self._ledger.content(entry.content))
    if file is None:
      raise _Gone(f"the ledger has no such task {entry.name!r} any more")
    return await asyncio.to_thread(self._loaded, entry.name, file)

  def _loaded(self, name: str, file: bytes) -> Task:
    with self._store.upload() as path:
      path.write_bytes(file)
      try:
        task = task_files.load_task(path, self._predictor.backbone)
      except TaskError as error:  # without the name of a file that goes
        message = str(error).replace(str(path), f"task {name!r}")
        raise TaskError(message) from error
    return sets.named(task, name)

  async def _asked(self, call: Callable[[], Awaitable[Any]]) -> Any:
    """Ask the ledger, or the one after it."""
    while True:
      with contextlib.suppress(LedgerLost):
        return await call()
