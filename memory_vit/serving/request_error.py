"""The error of a request that is refused: a status, and one line why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from memory_vit.runtime.messages import escaped, shortened

_MOST_SAID = 2_000


class RequestError(Exception):
  """A request that is refused, with what the client is told.

  Attributes:
    status: of HTTP.
    message: one line, escaped here.
    headers: of the answer, beside the usual ones.
    more: keys of the answer beside "error".
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    headers: Mapping[str, str] | None = None,
    **more: Any,
  ) -> None:
    super().__init__(message)
    self.status = status
    self.message = one_line(message)
    self.headers = dict(headers or {})
    self.more = more

  def response(self) -> JSONResponse:
    """The answer to the client."""
    return JSONResponse(
      {"error": self.message, **self.more}, self.status, self.headers
    )


def busy(message: str, seconds: float) -> RequestError:
  """Status 503 for now: the client may come again after some seconds."""
  return RequestError(
    503, message, headers={"Retry-After": str(max(1, round(seconds)))}
  )


def one_line(message: str) -> str:
  """A message as one line that can be shown, of at most 2,000 characters."""
  return shortened(escaped(" ".join(message.splitlines())), _MOST_SAID)
