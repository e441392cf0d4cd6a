"""The error of a refused request: an HTTP status and a reason in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from memory_vit.runtime.messages import one_line


class RequestError(Exception):
  """Refusal of a request; `more` holds the JSON keys beside "error"."""

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
  """Return an error of status 503: the client should retry after `seconds`."""
  return RequestError(
    503, message, headers={"Retry-After": str(max(1, round(seconds)))}
  )


def client_left() -> RequestError:
  """Return an error of status 499 (nginx's), seen only in metrics and log."""
  return RequestError(499, "the client left.")
