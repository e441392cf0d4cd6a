"""The pages at `/` and `/docs`, which load nothing from other sites."""

from __future__ import annotations

import functools
import importlib.resources

from fastapi import FastAPI
from starlette.responses import Response

_TYPES = {
  "index.html": "text/html; charset=utf-8",
  "docs.html": "text/html; charset=utf-8",
  "page.css": "text/css; charset=utf-8",
  "page.js": "text/javascript; charset=utf-8",
}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
# The pages load nothing from other sites, and no site may frame them. `blob:`
# allows image files dropped on the page; `data:` allows images from the server.
_HEADERS = {
  "Content-Security-Policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
  ),
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "no-referrer",
  "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
  for name in _TYPES:
    path = _PATHS.get(name, f"/{name}")
    answer = functools.partial(page_response, name)
    app.add_api_route(path, answer, include_in_schema=False)


def page_response(name: str) -> Response:
  folder = importlib.resources.files("memory_vit.serving") / "page"
  content = (folder / name).read_bytes()
  return Response(content, media_type=_TYPES[name], headers=_HEADERS)
