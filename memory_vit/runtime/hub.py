"""Addresses, downloads and refusals of the Hugging Face hub (hf://)."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from memory_vit.errors import MemoryVitError
from memory_vit.runtime.messages import escaped, first_line, not_installed

PREFIX = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,95})"
# Names become parts of paths in the cache, which ".." would leave.
_ADDRESS = re.compile(
  rf"(?!.*\.\.)hf://(?P<repository>{_PART}/{_PART})(?:/(?P<task>{_PART}))?"
  rf"(?:@(?P<revision>(?=.{{1,100}}$){_PART}(?:/{_PART})*))?"
)
_OWNER = re.compile(_PART)
# In errors of HTTP libraries: a token, its header, the password of a URL.
# Tokens are long, unlike the parts of a name such as hf_hub_download.
_SECRET = re.compile(
  r"\b(?:hf|api|api_org)_[A-Za-z0-9]{16,}|Bearer\s+\S+|(?<=://)[^/@\s]+(?=@)"
)
_REMEDIES = {
  401: "A repository that is private, and any upload, needs a token: `hf auth "
  "login`, or HF_TOKEN. Without one, what is private seems not to exist.",
  403: "The token lacks this permission: take another one, or accept the "
  "owner's terms on the page of the repository.",
  404: "There is no such repository, revision or file, or the token may not "
  "see it.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
  """hf://OWNER/NAME[/TASK][@REVISION]."""

  repository: str
  task: str | None = None
  revision: str | None = None

  def __str__(self) -> str:
    task = f"/{self.task}" if self.task else ""
    revision = f"@{self.revision}" if self.revision else ""
    return f"{PREFIX}{self.repository}{task}{revision}"


def is_address(text: Any) -> bool:
  """Whether it is meant as one; `parse` says whether it is right."""
  return isinstance(text, str) and text.startswith(PREFIX)


def parse(text: str) -> Address | None:
  found = _ADDRESS.fullmatch(text)
  return Address(**found.groupdict()) if found else None


def is_owner(text: str) -> bool:
  return _OWNER.fullmatch(text) is not None


def library(
  purpose: str, error: type[MemoryVitError], advice: str = ""
) -> ModuleType:
  """huggingface_hub, which is imported only by what needs it."""
  try:
    import huggingface_hub
  except ModuleNotFoundError as missing:
    reason = not_installed(purpose, missing.name, "hf")
    raise error(f"{reason}. {advice}".rstrip()) from missing
  return huggingface_hub


@contextlib.contextmanager
def asking(
  purpose: str, error: type[MemoryVitError], advice: str = ""
) -> Iterator[None]:
  """Turn whatever huggingface_hub raises into one line without secrets."""
  try:
    yield
  except MemoryVitError:
    raise
  except Exception as found:
    message = f"cannot {purpose}: {_reason(found)} {advice}".rstrip()
    # Not `from found`: a traceback would show the text with its secrets.
    raise error(message) from None


def _reason(error: BaseException) -> str:
  """What was said, and what to do."""
  causes = list(_causes(error))
  if type(causes[-1]).__name__ == "OfflineModeIsEnabled":
    return "HF_HUB_OFFLINE is set, so only what is cached is loaded: unset it."
  texts = dict.fromkeys(map(_without_secrets, causes))
  status = getattr(getattr(causes[-1], "response", None), "status_code", 0)
  remedy = _REMEDIES.get(status, "")
  return f"{': '.join(texts)}. {remedy}".rstrip()


def _without_secrets(error: BaseException) -> str:
  """The first line, shortened once no part of a token can be left."""
  text = _SECRET.sub("***", str(error)).strip() or type(error).__name__
  return f"{type(error).__name__}: {first_line(text)}".rstrip(".")


def _causes(error: BaseException) -> Iterator[BaseException]:
  """An error and what it was raised from, up to an answer of the hub."""
  yield error
  if error.__cause__ and not hasattr(error, "response"):
    yield from _causes(error.__cause__)


def fetch(
  address: Address,
  patterns: Sequence[str],
  error: type[MemoryVitError],
  by_hand: str,
) -> Path:
  """The cached directory with the files of these names, and perhaps others."""
  hub = library(str(address), error, by_hand)
  with asking(f"fetch {address}", error, by_hand):
    directory = hub.snapshot_download(
      address.repository,
      revision=address.revision,
      allow_patterns=list(patterns),
      # "*" of a pattern matches "/" too.
      ignore_patterns=["*/*"],
    )
  # REPOSITORY/snapshots/REVISION/FILE is a link to REPOSITORY/blobs/ETAG, and
  # the endpoint chooses the ETag.
  repository = Path(directory).parents[1].resolve()
  for file in Path(directory).glob("*"):
    if not file.resolve().is_relative_to(repository):
      raise error(
        f"{address}: {escaped(str(file))} is a link that leads out of "
        f"{repository}: delete this directory, and look whom HF_ENDPOINT names."
      )
  return Path(directory)
