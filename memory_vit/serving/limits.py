"""Limits on the bodies of requests, enforced while they arrive.

Content-Length is not trusted: bytes are counted. A client that sends too much,
or too slowly, gets its answer while it is still sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.settings import MIB, ServerSettings

_DISCARD_SECONDS = 2.0


class BodyLimits:
  """ASGI middleware: refuses bodies that are too large, slow or many."""

  def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
    self.held = 0  # bytes of the bodies of all unanswered requests
    self.settings = settings
    self._app = app

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    body = _Body(self, scope, receive, send)
    try:
      await self._app(scope, body.receive, body.send)
    except RequestError as refusal:  # raised by an inner middleware
      await refusal.response()(scope, body.receive, body.send)
    finally:
      self.held -= body.size


class _Body:
  """The body of one request, counted and timed as it arrives."""

  def __init__(
    self, limits: BodyLimits, scope: Scope, receive: Receive, send: Send
  ) -> None:
    settings = limits.settings
    self.size = 0
    self._limits = limits
    self._receive, self._send = receive, send
    # The body of PUT is a task, which has its own size limit.
    is_task = scope["method"] == "PUT"
    self._most_mib = settings.max_task_mib if is_task else settings.max_body_mib
    self._deadline = time.monotonic() + settings.receive_timeout
    self._is_whole = False

  async def receive(self) -> Message:
    if self._is_whole:  # after the body, only a disconnect can arrive
      return await self._receive()
    settings = self._limits.settings
    try:
      async with asyncio.timeout(self._deadline - time.monotonic()):
        message = await self._receive()
    except TimeoutError:
      raise RequestError(
        408,
        "the body of the request did not arrive within "
        f"{settings.receive_timeout:g} seconds.",
        headers={"Connection": "close"},
      ) from None
    self._is_whole = not message.get("more_body", False)
    part = len(message.get("body", b""))
    if self.size + part > self._most_mib * MIB:
      raise RequestError(
        413, f"the body of the request has more than {self._most_mib} MiB."
      )
    if self._limits.held + part > settings.max_held_mib * MIB:
      raise busy(
        "this body and the bodies of open requests together exceed "
        f"{settings.max_held_mib} MiB: try again later.",
        1,
      )
    self.size += part
    self._limits.held += part
    return message

  async def send(self, message: Message) -> None:
    """Send a message; before the last one, discard the unread request body."""
    is_last = message["type"] == "http.response.body" and not message.get(
      "more_body", False
    )
    # Leave the answer open while the client still sends: if the connection
    # closed now, the client would lose the answer.
    if is_last and not self._is_whole:
      await self._send({**message, "more_body": True})
      message = {"type": "http.response.body"}
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
          while not self._is_whole:
            part = await self._receive()
            self._is_whole = not part.get("more_body", False)
    await self._send(message)
