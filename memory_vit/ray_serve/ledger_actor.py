"""The ledger as a named actor of a Ray cluster, and how replicas reach it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any

import ray
from ray.exceptions import (
  ActorUnavailableError,
  GetTimeoutError,
  RayActorError,
  RayError,
)

from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.ray_serve.ledger import Ledger, Patience
from memory_vit.ray_serve.ledger_calls import LedgerLost
from memory_vit.ray_serve.listing import Board, Entry, Listing, Outcome, Report
from memory_vit.runtime.messages import first_line
from memory_vit.serving.task_store import TaskStore

NAMESPACE = "memory_vit"
# Calls at once: each replica waits in one, and sends some.
_MOST_CALLS = 10_000
_ALIVE_SECONDS = 5.0
# After the last replica has gone: one that starts anew may still come, and
# wants what was added. With a state_dir that is on disk, which others may want.
_IDLE_SECONDS = 600.0
_IDLE_SECONDS_ON_DISK = 10.0
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 0.2


class LedgerActor:
  """Runs a `Ledger` in a process of its own, and ends it when it is idle."""

  def __init__(self, state_dir: str | None) -> None:
    """Take nothing yet: one that Ray restarts may be asked by nobody."""
    self._state_dir = state_dir
    self._store: TaskStore | None = None
    self._made: Ledger | None = None
    self._watching: asyncio.Task[None] | None = None

  @property
  def _ledger(self) -> Ledger:
    """Made in the event loop, as its parts belong to it, with its directory.

    Raises:
      ConfigError: where that cannot be had, as where another one uses it; the
        next call tries again.
    """
    if self._watching is None:
      self._watching = asyncio.create_task(self._end_when_idle())
    if self._made is None:
      context = ray.get_runtime_context()
      is_restarted = bool(context.was_current_actor_reconstructed)
      self._store = TaskStore(self._state_dir) if self._state_dir else None
      self._made = Ledger(
        self._store, is_alive, Patience(), is_restarted=is_restarted
      )
    return self._made

  async def board(self) -> Board | None:
    """See `Ledger`, as all others."""
    return await self._ledger.board()

  async def kept(self) -> list[tuple[str, bytes]]:
    """See `Ledger`."""
    return await self._ledger.kept()

  async def content(self, content: str) -> bytes | None:
    """See `Ledger`."""
    return await self._ledger.content(content)

  async def found(
    self, listing: Listing, contents: Mapping[str, bytes], member: str,
    handle: Any,
  ) -> Board:  # fmt: skip
    """See `Ledger`."""
    return await self._ledger.found(listing, contents, member, handle)

  async def join(self, member: str, handle: Any, shown: int) -> bool:
    """See `Ledger`."""
    return await self._ledger.join(member, handle, shown)

  async def leave(self, member: str) -> None:
    """See `Ledger`."""
    await self._ledger.leave(member)

  async def follow(
    self, member: str, known: Board, report: Report
  ) -> Board | None:
    """See `Ledger`."""
    return await self._ledger.follow(member, known, report)

  async def propose(
    self, base: int, entries: tuple[Entry, ...], contents: Mapping[str, bytes],
    seconds: float | None = None,
  ) -> Outcome:  # fmt: skip
    """See `Ledger`."""
    return await self._ledger.propose(base, entries, contents, seconds)

  async def _end_when_idle(self) -> None:
    """End the process a while after the last replica."""
    idle = 0.0
    most = _IDLE_SECONDS_ON_DISK if self._state_dir else _IDLE_SECONDS
    while idle < most:
      await asyncio.sleep(_LOOK_SECONDS)
      if self._made is not None:
        await self._made.drop_dead()
      has_members = self._made is not None and self._made.members
      idle = 0.0 if has_members else idle + _LOOK_SECONDS
    if self._store is not None:
      self._store.close()
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


async def is_alive(handle: Any) -> bool:
  """Whether an actor lives, as far as the cluster knows."""
  try:
    await asyncio.wait_for(handle.__ray_ready__.remote(), _ALIVE_SECONDS)
  except ActorUnavailableError:
    return True  # out of reach for a moment; it may answer requests
  except RayActorError:
    return False
  except (TimeoutError, GetTimeoutError):
    return True  # it is busy; only a death that is known counts
  return True


class LedgerClient:
  """The calls of the ledger of a name, which is made where there is none."""

  def __init__(self, name: str, state_dir: str | None) -> None:
    """Reach nobody yet.

    Args:
      name: of the actor; all replicas with this name share one ledger.
      state_dir: where it keeps tasks that were added.
    """
    self._name = name
    self._state_dir = state_dir
    self._actor: Any = None

  async def board(self) -> Board | None:
    """See `Ledger`, as all others."""
    return await self._call("board")

  async def kept(self) -> list[tuple[str, bytes]]:
    """See `Ledger`."""
    return await self._call("kept")

  async def content(self, content: str) -> bytes | None:
    """See `Ledger`."""
    return await self._call("content", content)

  async def found(
    self, listing: Listing, contents: Mapping[str, bytes], member: str = "",
    handle: Any = None,
  ) -> Board:  # fmt: skip
    """See `Ledger`."""
    return await self._call("found", listing, contents, member, handle)

  async def join(self, member: str, handle: Any, shown: int) -> bool:
    """See `Ledger`."""
    return await self._call("join", member, handle, shown)

  async def leave(self, member: str) -> None:
    """See `Ledger`."""
    if self._actor is not None:
      await self._call("leave", member)

  async def follow(
    self, member: str, known: Board, report: Report
  ) -> Board | None:
    """See `Ledger`."""
    return await self._call("follow", member, known, report)

  async def propose(
    self, base: int, entries: tuple[Entry, ...], contents: Mapping[str, bytes],
    seconds: float | None = None,
  ) -> Outcome:  # fmt: skip
    """See `Ledger`."""
    return await self._call("propose", base, entries, contents, seconds)

  async def _call(self, method: str, *arguments: Any) -> Any:
    """Call a method of the actor.

    Raises:
      LedgerLost: where it ended meanwhile.
      MemoryVitError: where it cannot be had at all.
    """
    if self._actor is None:
      self._actor = await asyncio.to_thread(self._made)
    call: Awaitable[Any] = getattr(self._actor, method).remote(*arguments)
    try:
      return await call
    except RayActorError as error:
      self._actor = None
      _raise_own(error)
      await asyncio.sleep(_RETRY_SECONDS)
      raise LedgerLost(first_line(error)) from error
    except RayError as error:
      _raise_own(error)
      raise

  def _made(self) -> Any:
    """The actor of this name; the first who asks makes it."""
    return (
      ray.remote(LedgerActor)
      .options(
        name=self._name, namespace=NAMESPACE, get_if_exists=True,
        lifetime="detached", num_cpus=0, max_restarts=-1,
        max_concurrency=_MOST_CALLS,
      )
      .remote(self._state_dir)
    )  # fmt: skip


def _raise_own(error: BaseException) -> None:
  """Raise the error of ours that one of Ray tells of, if it does."""
  inner: BaseException | None = error
  while inner is not None:
    # Ray makes errors that are of its own class as well, with long texts.
    if isinstance(inner, MemoryVitError) and not isinstance(inner, RayError):
      raise type(inner)(str(inner)) from error
    inner = getattr(inner, "cause", None) or inner.__cause__
  with contextlib.suppress(IndexError):
    # Of a constructor that failed there is only the text.
    text = str(error).rpartition(f"{ConfigError.__name__}: ")
    if text[1]:
      raise ConfigError(text[2].splitlines()[0]) from error
