"""How uvicorn is set up."""

import asyncio
import signal
import types

import pytest
import uvicorn
from fastapi import FastAPI

from memory_vit.serving import ServerSettings, http_server


def test_no_header_names_the_client(monkeypatch):
  """Audit and log would otherwise trust X-Forwarded-For."""
  given = {}

  def config(app, **options):
    given.update(options)
    raise InterruptedError

  monkeypatch.setattr(http_server.uvicorn, "Config", config)
  with pytest.raises(InterruptedError):
    http_server.serve(None, ServerSettings(), None)
  assert given["proxy_headers"] is False


@pytest.mark.fault("server-stop")
def test_a_signal_ends_readiness_at_once():
  app = FastAPI()
  app.state.service = types.SimpleNamespace(stopping=False)
  server = http_server._Server(uvicorn.Config(app), app, 1.0)
  server.handle_exit(signal.SIGTERM, None)
  assert app.state.service.stopping
  assert server.should_exit


@pytest.mark.fault("large-answer")
def test_objects_of_the_warm_up_are_not_collected_again(monkeypatch):
  """A full collection of them would stop all threads every ten seconds.

  The first freeze is before the server is ready, since it stops requests.
  """
  frozen = []
  monkeypatch.setattr(http_server.gc, "freeze", lambda: frozen.append(1))
  app = FastAPI()
  compiler = types.SimpleNamespace(missing=["attention"])
  app.state.service = types.SimpleNamespace(
    state="warming up", compiler=compiler
  )
  server = http_server._Server(uvicorn.Config(app), app, 1.0)

  async def tick():
    for state, missing in (
      ("warming up", ["attention"]), ("ready", ["attention"]),
      ("ready", ["attention"]), ("ready", []), ("ready", []),
    ):  # fmt: skip
      app.state.service.state, compiler.missing = state, missing
      await server.on_tick(1)
      yield len(frozen)

  async def check():
    assert [count async for count in tick()] == [1, 1, 1, 2, 2]

  asyncio.run(check())
