"""Serve an application with uvicorn."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief
from memory_vit.serving.settings import ServerSettings

if TYPE_CHECKING:
  from uvicorn.protocols.http.h11_impl import H11Protocol


def bind(host: str, port: int) -> socket.socket:
  """Bind an address without listening, so that no client can connect yet."""
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
  except (OSError, UnicodeError) as error:
    reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
      f"--host={brief(host)} --port={port} cannot be used: {reason}."
    ) from error
  return bound


def url(bound: socket.socket) -> str:
  """Return the URL of a socket, as a user types it into a browser."""
  host, port = bound.getsockname()[:2]
  return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: FastAPI, settings: ServerSettings, bound: socket.socket) -> None:
  """Serve until SIGTERM or Ctrl-C, then end the process with that signal."""
  config = uvicorn.Config(
    app,
    http="h11",  # even if httptools is installed
    ws="none",
    lifespan="on",
    loop="asyncio",
    log_config=None,
    access_log=False,
    # Audit lines name the client by its socket, because headers can be forged.
    proxy_headers=False,
    server_header=False,
    timeout_keep_alive=settings.timeout_keep_alive,
    timeout_graceful_shutdown=settings.grace,
    limit_concurrency=settings.max_connections,
  )
  # While a thread traces programs, each step of a request waits this long for
  # the GIL. With the default of 5 ms, the p99 latency was three times as high.
  sys.setswitchinterval(0.001)
  # Requests are logged by `RequestLog`, not by uvicorn.
  logging.getLogger("uvicorn").setLevel(logging.WARNING)
  # When a signal has stopped uvicorn, uvicorn raises this signal again. SIG_DFL
  # then ends the process at once, without waiting for threads.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
  _Server(config, app, settings.receive_timeout).run(sockets=[bound])


class _Server(uvicorn.Server):
  """Uvicorn server with a time limit for the headers of a request."""

  def __init__(
    self, config: uvicorn.Config, app: FastAPI, header_seconds: float
  ) -> None:
    super().__init__(config)
    self._app, self._header_seconds = app, header_seconds
    self._waiting: dict[tuple[H11Protocol, object], float] = {}
    self._frozen = 0  # number of calls of gc.freeze

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Shut down gracefully at the first signal, at once at the second."""
    if self.should_exit:
      signal.signal(sig, signal.SIG_DFL)
      signal.raise_signal(sig)
      os._exit(0)  # process 1 of a container survives the signal
    self._app.state.service.stopping = True
    super().handle_exit(sig, frame)

  async def serve(self, sockets: list[socket.socket] | None = None) -> None:
    await super().serve(sockets)
    if self.started:
      # After the shutdown, uvicorn raises the signal again, but process 1 of a
      # container survives it. Exit here: a normal exit would wait for threads.
      os._exit(0)

  async def on_tick(self, counter: int) -> bool:
    """Close connections whose headers take too long; uvicorn does not.

    At the first tick, and again once all programs are compiled, exclude all
    existing objects from garbage collection.
    """
    service = self._app.state.service
    is_compiled = service.state == "ready" and not service.compiler.missing
    if self._frozen < 1 + is_compiled:
      # Without a freeze, a full garbage collection stops all threads for 0.1 s.
      gc.collect()
      gc.freeze()
      self._frozen += 1
    now = time.monotonic()
    connections = cast("set[H11Protocol]", self.server_state.connections)
    self._waiting = {
      (c, c.cycle): self._waiting.get((c, c.cycle), now)
      for c in connections
      if c.timeout_keep_alive_task is None  # else uvicorn's own timer runs
      and (c.cycle is None or c.cycle.response_complete)
    }
    for (connection, _), since in self._waiting.items():
      if now > since + self._header_seconds:
        connection.timeout_keep_alive_handler()
    return await super().on_tick(counter)
