"""Limits on the bodies of requests, while they arrive.

Content-Length is not believed: bytes are counted. A client that sends too much,
or too slowly, gets its answer while it is still sending.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.settings import MIB, ServerSettings

# After a refusal: so that the client can read the answer, what it is still
# sending is read for a while, and thrown away.
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 * MIB


class BodyLimits:
  """ASGI middleware: refuses bodies that are too large, slow or many.

  Within a request, `receive` raises a `RequestError`: 413 (too large), 408 (too
  slow), 503 (all bodies together).
  """

  def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
    self._app = app
    self._settings = settings
    self._held = 0

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application on a body that is counted."""
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    body = _Body(self, receive, send, _most_mib(scope, self._settings))
    try:
      await self._app(scope, body.receive, body.send)
    except RequestError as refusal:  # where nobody inside has answered
      await refusal.response()(scope, body.receive, body.send)
    finally:
      self._held -= body.size

  def hold(self, size: int) -> None:
    """Count bytes that have arrived for a request.

    Raises:
      RequestError: where all requests together hold too many.
    """
    most = self._settings.max_held_mib
    if self._held + size > most * MIB:
      raise busy(
        f"the requests that are being taken hold {most} MiB: come again.", 1
      )
    self._held += size

  @property
  def receive_timeout(self) -> float:
    """Seconds until a body must have arrived."""
    return self._settings.receive_timeout


def _most_mib(scope: Scope, settings: ServerSettings) -> int:
  """The limit of one body: tasks have their own, and are sent by PUT."""
  if scope["method"] == "PUT":
    return settings.max_task_mib
  return settings.max_body_mib


class _Body:
  """The body of one request, counted and timed as it arrives."""

  def __init__(
    self, limits: BodyLimits, receive: Receive, send: Send, most_mib: int
  ) -> None:
    self.size = 0
    self._limits = limits
    self._receive = receive
    self._send = send
    self._most_mib = most_mib
    self._deadline = time.monotonic() + limits.receive_timeout
    self._whole = False

  async def receive(self) -> Message:
    """Receive a part of the body; see `BodyLimits`."""
    if self._whole:  # now only for the end of the connection
      return await self._receive()
    try:
      async with asyncio.timeout(self._deadline - time.monotonic()):
        message = await self._receive()
    except TimeoutError:
      raise RequestError(
        408,
        "the body of the request did not arrive within "
        f"{self._limits.receive_timeout:g} seconds.",
        headers={"Connection": "close"},
      ) from None
    if message["type"] == "http.request":
      self._count(len(message.get("body", b"")))
      self._whole = not message.get("more_body", False)
    else:
      self._whole = True
    return message

  def _count(self, size: int) -> None:
    if self.size + size > self._most_mib * MIB:
      raise RequestError(
        413,
        f"the body of the request has more than {self._most_mib} MiB.",
        headers={"Connection": "close"},
      )
    self._limits.hold(size)
    self.size += size

  async def send(self, message: Message) -> None:
    """Send; the last part waits until the client has stopped sending."""
    if message["type"] == "http.response.start" and not self._whole:
      # What is left of the body must not be taken for the next request.
      headers = [
        (name, value)
        for name, value in message.get("headers", [])
        if name.lower() != b"connection"
      ]
      message = {**message, "headers": [*headers, (b"connection", b"close")]}
    is_last = message["type"] == "http.response.body" and not message.get(
      "more_body", False
    )
    if self._whole or not is_last:
      await self._send(message)
      return
    await self._send({**message, "more_body": True})
    await self._linger()
    await self._send({"type": "http.response.body", "body": b""})

  async def _linger(self) -> None:
    """Throw away what still comes: closing at once would lose the answer."""
    left = _LINGER_BYTES
    try:
      async with asyncio.timeout(_LINGER_SECONDS):
        while left > 0 and not self._whole:
          message = await self._receive()
          left -= len(message.get("body", b""))
          self._whole = not message.get("more_body", False)
    except TimeoutError:
      pass
