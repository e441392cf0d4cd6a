"""The error of a refused request: an HTTP status and one line of reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from memory_vit.runtime.messages import one_line


class RequestError(Exception):
  """Refusal of a request; `more` has the JSON keys next to "error"."""

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
    return JSONResponse(
      {"error": self.message, **self.more}, self.status, self.headers
    )


def busy(message: str, seconds: float) -> RequestError:
  """Return status 503, which tells the client to retry after `seconds`."""
  return RequestError(
    503, message, headers={"Retry-After": str(max(1, round(seconds)))}
  )


def client_left() -> RequestError:
  """Return nginx's status 499, which only the metrics and the log show."""
  return RequestError(499, "the client left.")
