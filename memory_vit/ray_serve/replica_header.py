"""Name the replica in every answer."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-replica"


class ReplicaHeader:
  """ASGI middleware: adds `x-replica: NAME` to all answers."""

  def __init__(self, app: ASGIApp, replica: str) -> None:
    self._app = app
    self._header = (HEADER.encode(), replica.encode("ascii", "replace"))

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application; its headers get one more."""

    async def named(message: Message) -> None:
      if message["type"] == "http.response.start":
        headers = [*message.get("headers", []), self._header]
        message = {**message, "headers": headers}
      await send(message)

    await self._app(scope, receive, named)
