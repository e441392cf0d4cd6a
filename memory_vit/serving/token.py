"""The token that lets a client add and remove tasks."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError

LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_SCHEME = "bearer "


class Token:
  """A secret, kept as its SHA-256; without one, nobody is let in."""

  def __init__(self, secret: str | None) -> None:
    self._digest = _digest(secret) if secret is not None else None

  @property
  def is_set(self) -> bool:
    """Whether there is one."""
    return self._digest is not None

  def require(self, authorization: str | None) -> None:
    """Let in who sends `Authorization: Bearer TOKEN`.

    Raises:
      RequestError: 403 where no token is set, 401 for another one, or none.
    """
    if self._digest is None:
      raise RequestError(
        403,
        "tasks cannot be changed here: the server was started without "
        "--token_file=FILE, a file with the token for it.",
      )
    header = authorization or ""
    secret = header[len(_SCHEME) :].strip()
    is_bearer = header[: len(_SCHEME)].lower() == _SCHEME
    # Both are of one length; how many characters agree cannot be measured.
    same = hmac.compare_digest(_digest(secret), self._digest)
    if not (is_bearer and same):
      raise RequestError(
        401,
        "to change tasks, send the token of this server: Authorization: "
        f"Bearer TOKEN ({'another' if header else 'none'} was sent).",
        headers={"WWW-Authenticate": "Bearer"},
      )


def _digest(secret: str) -> bytes:
  return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def read_token(file: str | None) -> Token:
  """Read the token file, or none.

  Raises:
    ConfigError: where it cannot be read, others may read it, or the token is
      too short.
  """
  if file is None:
    return Token(None)
  path = paths.local(file, "--token_file")
  try:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
      raise ConfigError(
        f"--token_file {brief(file)} is no file of at most {_MOST_BYTES} bytes."
      )
    secret = path.read_text(encoding="ascii").strip()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not ASCII"
    raise ConfigError(
      f"--token_file {brief(file)} cannot be read: {reason}."
    ) from error
  _require_private(path, status.st_mode)
  if len(secret) < LEAST_CHARACTERS or not secret.isprintable():
    raise ConfigError(
      f"--token_file {brief(file)}: expected one line of at least "
      f"{LEAST_CHARACTERS} characters, such as python -c "
      "'import secrets; print(secrets.token_urlsafe(32))' writes."
    )
  return Token(secret)


def _require_private(path: Path, mode: int) -> None:
  """Refuse a file that others may read, or its group may write."""
  if mode & (stat.S_IRWXO | stat.S_IWGRP):
    raise ConfigError(
      f"--token_file {brief(str(path))} has the mode {mode & 0o777:o}: others "
      f"may use it. chmod 600 {path}"
    )
