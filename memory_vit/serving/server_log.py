"""The server's log on stderr: a line for each request and each change of tasks.

Of the text that clients send, the log shows only task names and the parts that
error messages quote, escaped and shortened.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from memory_vit.runtime.messages import brief, escaped
from memory_vit.runtime.progress_bar import LogHandler

if TYPE_CHECKING:  # keeps the parsing of the command line fast
  from starlette.types import ASGIApp, Message, Receive, Scope, Send

  from memory_vit.serving.metrics import Metrics

_requests = logging.getLogger("memory_vit.serving.requests")
_audit = logging.getLogger("memory_vit.serving.audit")
# Monitoring requests these paths all the time, so log them at DEBUG only.
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})


def log_to_stderr() -> None:
  handler = LogHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
  for name, level in (
    ("memory_vit", logging.INFO), ("uvicorn", logging.WARNING),
  ):  # fmt: skip
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)


def audit(action: str, name: str, client: str, outcome: str) -> None:
  when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
  _audit.info(
    "audit %s %s name=%s client=%s %s",
    when, action, brief(name), escaped(client), outcome,
  )  # fmt: skip


def client_of(scope: Scope) -> str:
  """Return the client's address from its socket: headers can be forged."""
  client = scope.get("client")
  return f"{client[0]}:{client[1]}" if client else "unknown"


class RequestLog:
  """ASGI middleware that logs and counts requests by route, not by path."""

  def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
    self._app, self._metrics = app, metrics

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    begun = time.monotonic()
    status = 500  # if the request ends without an answer

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
      _requests.log(
        level, "%s %s %s %d %.1f ms",
        client_of(scope), method, route, status, 1e3 * seconds,
      )  # fmt: skip
