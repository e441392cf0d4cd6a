"""Refuse requests that pages of other sites send by a visitor's browser.

A page may give its own name the address of this server (DNS rebinding), and is
then of one origin with it for the browser: only the header Host differs.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError

# What no other site can be called.
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":\d*$")
_SENDING = ("POST", "PUT", "DELETE")


class TrustedHosts:
  """ASGI middleware: raises a `RequestError`, which `BodyLimits` answers."""

  def __init__(self, app: ASGIApp, allowed_hosts: str | None) -> None:
    """Take requests to these names and to loopback; None is any name."""
    self._app = app
    names = (allowed_hosts or "*").lower().split(",")
    self._names = None if "*" in names else {*names, *_LOOPBACK}

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application on a request that no other site's page has sent."""
    if scope["type"] == "http":
      self._check(Headers(scope=scope), scope["method"])
    await self._app(scope, receive, send)

  def _check(self, headers: Headers, method: str) -> None:
    host = headers.get("host", "")
    name = _PORT.sub("", host.lower())
    if self._names is not None and name not in self._names:
      raise RequestError(
        400,
        f"the host {brief(host)} is not trusted here; --allowed_hosts=NAME "
        "of the server adds a name.",
      )
    if method in _SENDING and headers.get("sec-fetch-site") == "cross-site":
      raise RequestError(403, "the page of another site sent this request.")
