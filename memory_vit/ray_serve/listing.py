"""What replicas and the ledger tell each other of a set of tasks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Entry:
  """One task of a set.

  Attributes:
    slot: number of its slot, the same on all replicas.
    name: under which it answers.
    content: SHA-256 of its file, by which the ledger hands it out.
    added: whether a client added it: --state_dir keeps those alone.
  """

  slot: int
  name: str
  content: str
  added: bool


@dataclasses.dataclass(frozen=True)
class Listing:
  """A set of tasks; `version` is 1 more than that of the set before it."""

  version: int
  entries: tuple[Entry, ...]

  @property
  def contents(self) -> frozenset[str]:
    """Of all its tasks."""
    return frozenset(entry.content for entry in self.entries)


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A set of tasks that all replicas are asked to make ready.

  `key` is of this proposal alone, also where another ledger made others.
  """

  key: str
  listing: Listing


@dataclasses.dataclass(frozen=True)
class Board:
  """What all replicas shall know: which set answers, and which may be next."""

  current: Listing
  proposal: Proposal | None = None


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Why a replica cannot answer by a proposed set; `by_task`: by its fault."""

  reason: str
  by_task: bool


@dataclasses.dataclass(frozen=True)
class Report:
  """What a replica says of itself.

  Attributes:
    shown: version of the set that it answers by.
    judged: key of the last proposal that it has looked at.
    refusal: why it cannot take that one; None where it is ready for it.
  """

  shown: int
  judged: str = ""
  refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a proposed change.

  Attributes:
    kind: "taken"; or, and nothing has changed then, "outdated" (another change
      was first), "refused", "late" (not all replicas said in time that they
      can), "not kept" (its file cannot be written or removed).
    refusal: of a replica, where it was refused.
    replicas: that were late; where it was taken, that live and did not say in
      time that they answer by it.
    reason: why it cannot be kept.
  """

  kind: str
  refusal: Refusal | None = None
  replicas: tuple[str, ...] = ()
  reason: str = ""


def content_of(file: bytes) -> str:
  """SHA-256 of the file of a task."""
  return hashlib.sha256(file).hexdigest()


def with_entry(entries: Iterable[Entry], new: Entry) -> tuple[Entry, ...]:
  """Put a task into its slot, whatever was there; sorted by slot."""
  others = [entry for entry in entries if entry.slot != new.slot]
  return tuple(sorted([*others, new], key=lambda entry: entry.slot))
