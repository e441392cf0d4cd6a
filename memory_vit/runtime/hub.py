"""Addresses, downloads and errors of the Hugging Face hub (hf://)."""

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
# Names become folders of the cache; ".." could lead to folders outside of it.
_ADDRESS = re.compile(
  rf"(?!.*\.\.)hf://(?P<repository>{_PART}/{_PART})(?:/(?P<task>{_PART}))?"
  rf"(?:@(?P<revision>(?=.{{1,100}}$){_PART}(?:/{_PART})*))?"
)
_OWNER = re.compile(_PART)
# Secrets in errors of HTTP libraries: tokens, "Bearer" headers, passwords in
# URLs. Only long tokens match: names such as hf_hub_download do not.
_SECRET = re.compile(
  r"\b(?:hf|api|api_org)_[A-Za-z0-9]{16,}|Bearer\s+\S+|(?<=://)[^/@\s]+(?=@)"
)
_REMEDIES = {
  401: "Private repositories and uploads need a token: run `hf auth login`, or "
  "set HF_TOKEN. Without a token, private repositories seem not to exist.",
  403: "The token lacks this permission: use another token, or accept the "
  "owner's terms on the page of the repository.",
  404: "The repository, revision or file does not exist, or the token may not "
  "read it.",
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
  """Return whether a value begins with hf://; `parse` checks the rest."""
  return isinstance(text, str) and text.startswith(PREFIX)


def parse(text: str) -> Address | None:
  match = _ADDRESS.fullmatch(text)
  return Address(**match.groupdict()) if match else None


def is_owner(text: str) -> bool:
  return _OWNER.fullmatch(text) is not None


def library(
  purpose: str, error: type[MemoryVitError], advice: str = ""
) -> ModuleType:
  """Import and return huggingface_hub; raise `error` if it is missing."""
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
  """Turn exceptions of huggingface_hub into `error`: one line, no secrets."""
  try:
    yield
  except MemoryVitError:
    raise
  except Exception as refused:
    message = f"cannot {purpose}: {_reason(refused)} {advice}".rstrip()
    # `from refused` would print the secrets in the traceback.
    raise error(message) from None


def _reason(error: BaseException) -> str:
  """Return the messages of an error and of its causes, with advice."""
  causes = list(_causes(error))
  if type(causes[-1]).__name__ == "OfflineModeIsEnabled":
    return "HF_HUB_OFFLINE is set, so only cached files are loaded: unset it."
  texts = dict.fromkeys(map(_without_secrets, causes))
  status = getattr(getattr(causes[-1], "response", None), "status_code", 0)
  remedy = _REMEDIES.get(status, "")
  return f"{': '.join(texts)}. {remedy}".rstrip()


def _without_secrets(error: BaseException) -> str:
  """Return the type and first line of an error, with secrets masked."""
  # Mask secrets before `first_line` can cut them, so that `_SECRET` finds them.
  text = _SECRET.sub("***", str(error)).strip() or type(error).__name__
  return f"{type(error).__name__}: {first_line(text)}".rstrip(".")


def _causes(error: BaseException) -> Iterator[BaseException]:
  """Yield an error, its cause, and so on; stop after one with a `response`."""
  yield error
  if error.__cause__ and not hasattr(error, "response"):
    yield from _causes(error.__cause__)


def fetch(
  address: Address,
  patterns: Sequence[str],
  error: type[MemoryVitError],
  by_hand: str,
) -> Path:
  """Fetch files that match `patterns`; return the folder that contains them."""
  hub = library(str(address), error, by_hand)
  with asking(f"fetch {address}", error, by_hand):
    directory = hub.snapshot_download(
      address.repository,
      revision=address.revision,
      allow_patterns=list(patterns),
      # A "*" in `patterns` also matches "/", so exclude files in folders.
      ignore_patterns=["*/*"],
    )
  # REPOSITORY/snapshots/REVISION/FILE is a link to REPOSITORY/blobs/ETAG. The
  # server chooses ETAG, so the link could lead out of the repository.
  repository = Path(directory).parents[1].resolve()
  for file in Path(directory).glob("*"):
    if not file.resolve().is_relative_to(repository):
      raise error(
        f"{address}: {escaped(str(file))} is a link that leads out of "
        f"the directory {repository}: delete the directory, and check which "
        "server HF_ENDPOINT names."
      )
  return Path(directory)
