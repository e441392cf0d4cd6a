"""How uvicorn is set up."""

import pytest

from memory_vit.serving import ServerSettings, http_server


def test_no_header_names_the_client(monkeypatch):
  """Audit lines and logs would believe X-Forwarded-For."""
  given = {}

  def config(app, **options):
    given.update(options)
    raise InterruptedError

  monkeypatch.setattr(http_server.uvicorn, "Config", config)
  with pytest.raises(InterruptedError):
    http_server.serve(None, ServerSettings(), None)
  assert given["proxy_headers"] is False
