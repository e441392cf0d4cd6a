"""Serve an application with uvicorn, and end it gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief
from memory_vit.serving.settings import ServerSettings

if TYPE_CHECKING:
  from memory_vit.serving.app import Service

logger = logging.getLogger(__name__)
# After the time to finish: in which those that were cut off are counted.
_END_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
  """Take an address, without listening yet: nobody is let in before.

  Args:
    host: an address or a name; IPv6 without brackets.
    port: 0 for any that is free.

  Raises:
    ConfigError: where it cannot be had.
  """
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, kind, protocol)
    try:
      found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      found.bind(address)
    except OSError:
      found.close()
      raise
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


def serve(app: FastAPI, settings: ServerSettings, bound: socket.socket) -> int:
  """Serve until SIGTERM or Ctrl-C; a second signal ends it at once.

  Then no connection is taken any more, and what was taken is finished within
  `settings.grace` seconds. After them the process ends, with status 1 where
  requests were cut off: a thread that compiles or decodes cannot be stopped
  otherwise. The caller goes on only where all was finished before.

  Returns:
    How many requests were cut off.
  """
  config = uvicorn.Config(
    app,
    http=_connection_class(settings.receive_timeout),
    ws="none",
    lifespan="on",
    loop="asyncio",  # the same everywhere, whatever is installed
    log_config=None,
    access_log=False,
    # A header could lie about the client; audit lines name the socket.
    proxy_headers=False,
    server_header=False,
    timeout_keep_alive=settings.timeout_keep_alive,
    timeout_graceful_shutdown=settings.grace,
    limit_concurrency=settings.max_connections,
  )
  # Beside our own lines only what went wrong.
  logging.getLogger("uvicorn").setLevel(logging.WARNING)
  server = _Server(config, app)
  server.run(sockets=[bound])
  cut_off: int = app.state.service.cut_off
  if not cut_off:  # else threads may still be at work
    server.forget_end()
  return cut_off


class _Server(uvicorn.Server):
  """Tells the application that it stops, and lets the process go on after."""

  def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
    super().__init__(config)
    self._service: Service = app.state.service
    self._seconds = (config.timeout_graceful_shutdown or 0) + _END_SECONDS
    self._end: threading.Timer | None = None

  def forget_end(self) -> None:
    """Let the process go on: nothing is at work any more."""
    if self._end is not None:
      self._end.cancel()

  @contextlib.contextmanager
  def capture_signals(self) -> Generator[None, None, None]:
    """Take signals; uvicorn would raise them again after the shutdown."""
    before = {s: signal.signal(s, self.handle_exit) for s in _SIGNALS}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """End gracefully; at the second signal, without waiting."""
    self._service.stopping = True
    if self.should_exit:
      _end_process(self._service)
    self.should_exit = True
    # In a thread of its own: the event loop may wait for others.
    self._end = threading.Timer(self._seconds, _end_process, [self._service])
    self._end.daemon = True
    self._end.start()


def _end_process(service: Service) -> NoReturn:
  """End at once, whatever threads do; a file that is kept is whole or absent.

  The exit status is 1 where requests were cut off, else 0.
  """
  cut_off = service.cut_off + service.open_requests
  if cut_off:
    print(f"{cut_off} requests were cut off", file=sys.stderr, flush=True)
  service.remove_files()
  os._exit(1 if cut_off else 0)


def _connection_class(header_seconds: float) -> type[H11Protocol]:
  """The protocol of a connection whose headers must arrive in some seconds.

  Uvicorn waits for the rest of them for ever.
  """

  class Connection(H11Protocol):
    """A connection that is closed where headers take too long."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
      super().connection_made(transport)
      self._wait()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self.cycle is not None and not self.cycle.response_complete:
        self._stop_waiting()  # they are there; a body has its own limit
      else:
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
      self._stop_waiting()
      super().connection_lost(exc)

    def _wait(self) -> None:
      if self._waiting is None and not self.transport.is_closing():
        self._waiting = self.loop.call_later(header_seconds, self._too_slow)

    def _stop_waiting(self) -> None:
      if self._waiting is not None:
        self._waiting.cancel()
        self._waiting = None

    def _too_slow(self) -> None:
      self._waiting = None
      self.timeout_keep_alive_handler()  # closes the connection

  return Connection
