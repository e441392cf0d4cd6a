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
  """Bind an address without listening yet: no client connects before that."""
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(address)
  except (OSError, UnicodeError) as error:
    reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
      f"--host={brief(host)} --port={port} cannot be had: {reason}."
    ) from error
  return found


def url(bound: socket.socket) -> str:
  """The address of a socket, as one types it into a browser."""
  host, port = bound.getsockname()[:2]
  return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: FastAPI, settings: ServerSettings, bound: socket.socket) -> None:
  """Serve until SIGTERM or Ctrl-C, and end the process by that signal."""
  config = uvicorn.Config(
    app,
    http="h11",  # the same, whether httptools is installed or not
    ws="none",
    lifespan="on",
    loop="asyncio",
    log_config=None,
    access_log=False,
    # A header could lie about the client; audit lines name the socket.
    proxy_headers=False,
    server_header=False,
    timeout_keep_alive=settings.timeout_keep_alive,
    timeout_graceful_shutdown=settings.grace,
    limit_concurrency=settings.max_connections,
  )
  # A thread that traces programs holds the interpreter for as long, 5 ms by
  # default, at each step of a request: p99 was three times as long.
  sys.setswitchinterval(0.001)
  # Requests have lines of ours.
  logging.getLogger("uvicorn").setLevel(logging.WARNING)
  # Uvicorn raises the signal again at the end; Python's own handler would then
  # wait for threads that compile or decode.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
  _Server(config, app, settings.receive_timeout).run(sockets=[bound])


class _Server(uvicorn.Server):
  """Uvicorn's server, with a time limit for headers."""

  def __init__(
    self, config: uvicorn.Config, app: FastAPI, header_seconds: float
  ) -> None:
    super().__init__(config)
    self._app, self._header_seconds = app, header_seconds
    self._waiting: dict[tuple[H11Protocol, object], float] = {}
    self._frozen = 0  # how often

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """End gracefully; at the second signal, at once."""
    if self.should_exit:
      signal.signal(sig, signal.SIG_DFL)
      signal.raise_signal(sig)
      os._exit(0)  # process 1 of a container ignores the signal
    self._app.state.service.stopping = True
    super().handle_exit(sig, frame)

  async def serve(self, sockets: list[socket.socket] | None = None) -> None:
    await super().serve(sockets)
    if self.started:
      # Uvicorn has raised the signal again; process 1 of a container ignores
      # it, and would wait for threads.
      os._exit(0)

  async def on_tick(self, counter: int) -> bool:
    """Close connections whose headers take too long; uvicorn never does.

    Before the server is ready, and again once all is compiled, exclude its
    lasting objects from collections.
    """
    service = self._app.state.service
    is_compiled = service.state == "ready" and not service.compiler.missing
    if self._frozen < 1 + is_compiled:
      # A full collection stops all threads, 0.1 s for what libraries hold.
      gc.collect()
      gc.freeze()
      self._frozen += 1
    now = time.monotonic()
    connections = cast("set[H11Protocol]", self.server_state.connections)
    self._waiting = {
      (c, c.cycle): self._waiting.get((c, c.cycle), now)
      for c in connections
      if c.timeout_keep_alive_task is None  # else it is idle: uvicorn closes it
      and (c.cycle is None or c.cycle.response_complete)
    }
    for (connection, _), since in self._waiting.items():
      if now > since + self._header_seconds:
        connection.timeout_keep_alive_handler()
    return await super().on_tick(counter)
