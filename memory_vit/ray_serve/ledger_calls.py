"""The calls of the ledger, wherever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from memory_vit.ray_serve.listing import Board, Entry, Listing, Outcome, Report

# Of what replicas and the ledger say to each other. Raise it when that changes,
# so that replicas of two versions of this program have two ledgers.
PROTOCOL = 1


class LedgerLost(Exception):  # noqa: N818 what happened, not a fault of ours
  """The ledger ended while it was asked; the next call finds another one."""


class LedgerCalls(Protocol):
  """The calls of `Ledger`, wherever it is; `LedgerLost` where it ends."""

  async def board(self) -> Board | None: ...  # noqa: D102
  async def kept(self) -> list[tuple[str, bytes]]: ...  # noqa: D102
  async def content(self, content: str) -> bytes | None: ...  # noqa: D102
  async def found(  # noqa: D102
    self, listing: Listing, contents: Mapping[str, bytes], member: str = "",
    handle: Any = None,
  ) -> Board: ...  # fmt: skip
  async def join(self, member: str, handle: Any, shown: int) -> bool: ...  # noqa: D102
  async def leave(self, member: str) -> None: ...  # noqa: D102
  async def follow(  # noqa: D102
    self, member: str, known: Board, report: Report
  ) -> Board | None: ...
  async def propose(  # noqa: D102
    self, base: int, entries: tuple[Entry, ...], contents: Mapping[str, bytes],
    seconds: float | None = None,
  ) -> Outcome: ...  # fmt: skip
