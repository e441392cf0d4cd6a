"""Access control: trusted host names, and the token for task changes."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from memory_vit.errors import ConfigError
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError

LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_SCHEME = "bearer "
# Names of this machine, always trusted, because no other site can have them.
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":\d*$")
_SENDING = ("POST", "PUT", "DELETE")


class TrustedHosts:
  """ASGI middleware that refuses requests sent by pages of other sites."""

  def __init__(self, app: ASGIApp, allowed_hosts: str | None) -> None:
    self._app = app
    names = (allowed_hosts or "*").lower().split(",")
    self._names = None if "*" in names else {*names, *_LOOPBACK}

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
      self._check(Headers(scope=scope), scope["method"])
    await self._app(scope, receive, send)

  def _check(self, headers: Headers, method: str) -> None:
    """Raise if the host is untrusted, or if another site sent the request."""
    host = headers.get("host", "")
    name = _PORT.sub("", host.lower())
    # With DNS rebinding, another site's name points to this server. To the
    # browser, the site and this server are then one origin; only the Host
    # header shows that the request used the site's name.
    if self._names is not None and name not in self._names:
      raise RequestError(
        400,
        f"the host {brief(host)} is not trusted by this server: add it to "
        "--allowed_hosts of the server, or use a trusted name.",
      )
    if method in _SENDING and headers.get("sec-fetch-site") == "cross-site":
      raise RequestError(403, "requests by pages of another site are refused.")


class Token:
  """Checks the token for task changes; without a token, refuses all changes."""

  def __init__(self, secret: str | None) -> None:
    self._digest = _digest(secret) if secret is not None else None

  @property
  def is_set(self) -> bool:
    return self._digest is not None

  def require(self, authorization: str | None) -> None:
    """Raise 403 if no token is set, 401 unless the header is "Bearer TOKEN"."""
    if self._digest is None:
      raise RequestError(
        403,
        "tasks cannot be changed here: the server was started without a token "
        "for changes (--token_file=FILE).",
      )
    header = authorization or ""
    secret = header[len(_SCHEME) :].strip()
    is_bearer = header[: len(_SCHEME)].lower() == _SCHEME
    # Constant-time comparison: its duration must not reveal parts of the token.
    same = hmac.compare_digest(_digest(secret), self._digest)
    if not (is_bearer and same):
      raise RequestError(
        401,
        f"{'a wrong' if header else 'no'} token was sent: to change tasks, "
        "send the token of this server as Authorization: Bearer TOKEN.",
        headers={"WWW-Authenticate": "Bearer"},
      )


def _digest(secret: str) -> bytes:
  return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def read_token(file: str | None) -> Token:
  if file is None:
    return Token(None)
  path = paths.local(file, "--token_file")
  try:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
      raise ConfigError(
        f"--token_file {brief(file)} is not a regular file, or is larger "
        f"than {_MOST_BYTES} bytes."
      )
    secret = path.read_text(encoding="ascii").strip()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "the file is not ASCII"
    raise ConfigError(
      f"--token_file {brief(file)} cannot be read: {reason}."
    ) from error
  _require_private(path, status.st_mode)
  if len(secret) < LEAST_CHARACTERS or not secret.isprintable():
    raise ConfigError(
      f"--token_file {brief(file)}: expected one line of at least "
      f"{LEAST_CHARACTERS} characters, for example the output of python -c "
      "'import secrets; print(secrets.token_urlsafe(32))'."
    )
  return Token(secret)


def _require_private(path: Path, mode: int) -> None:
  """Raise if other users can access the file, or if its group can write it."""
  if mode & (stat.S_IRWXO | stat.S_IWGRP):
    raise ConfigError(
      f"--token_file {brief(str(path))} has the mode {mode & 0o777:o}, which "
      f"lets other users access the file: run chmod 600 {path}"
    )
