"""One line of the log for each request: nothing of what was sent."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memory_vit.serving.metrics import Metrics

logger = logging.getLogger("memory_vit.serving.requests")
# Paths that are asked for again and again by machines.
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})


class RequestLog:
  """ASGI middleware: logs and counts requests by the route that they took.

  A path itself, which a stranger chooses, appears nowhere.
  """

  def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
    """Count into `metrics`."""
    self._app, self._metrics = app, metrics

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application, and log what it answered."""
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    begun = time.monotonic()
    status = 500  # where it ends without an answer

    async def noted(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
      await send(message)

    try:
      await self._app(scope, receive, noted)
    finally:
      seconds = time.monotonic() - begun
      route = getattr(scope.get("route"), "path", "none")
      method = scope["method"] if scope["method"] in _METHODS else "other"
      self._metrics.request(method, route, status, seconds)
      level = logging.DEBUG if route in _QUIET else logging.INFO
      logger.log(
        level, "%s %s %s %d %.1f ms",
        client_of(scope), method, route, status, 1e3 * seconds,
      )  # fmt: skip


def client_of(scope: Scope) -> str:
  """Address of the client, as the socket has it: headers may lie."""
  client = scope.get("client")
  return f"{client[0]}:{client[1]}" if client else "unknown"
