"""Paths from users: "~" is expanded, and impossible paths are refused."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.runtime import bucket
from memory_vit.runtime.messages import brief

# Maximum bytes of a directory's name. File systems allow 255, but a directory
# is first written under a longer name.
_LONGEST_NAME = 240
# Start of an address. One slash is enough: pathlib shortens "s3://" to "s3:/".
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# Maximum depth of a path: folders are created and removed by recursion.
_DEEPEST = 200


def place(
  text: str | os.PathLike[str],
  where: str,
  error: type[Exception] = ConfigError,
) -> Path:
  """Return a local path, or a `BucketPath`, which has the methods of `Path`."""
  if bucket.is_address(text):
    return bucket.parse(os.fspath(text), where, error)
  return text if bucket.is_in(text) else local(text, where, error)


def as_path(text: str | os.PathLike[str]) -> Path:
  """Return a path like `place`, but do not check a local path or expand "~"."""
  if bucket.is_address(text):
    return bucket.parse(os.fspath(text), "the path")
  return text if bucket.is_in(text) else Path(text)


def local(
  text: str | os.PathLike[str],
  where: str,
  error: type[Exception] = ConfigError,
) -> Path:
  """Return a local path, with "~" expanded; it need not exist."""
  try:
    if not os.fspath(text):
      raise ValueError("the text is empty")
    if bucket.is_address(text):
      raise ValueError("the text names a bucket")
    if _ADDRESS.match(os.fspath(text)):
      raise ValueError("the text is an address")
    path = Path(text).expanduser()
    if len(path.parts) > _DEEPEST:
      raise ValueError(f"the path is over {_DEEPEST} folders deep")
    # A missing or unreadable file is reported by the code that opens it.
    with contextlib.suppress(
      FileNotFoundError, NotADirectoryError, PermissionError
    ):
      os.lstat(path)
  except (OSError, RuntimeError, ValueError) as problem:
    raise error(
      f"{where} is {brief(os.fspath(text))}, not a local path "
      f"({_reason(problem)})."
    ) from problem
  return path


def make_directory(
  path: Path, where: str, error: type[Exception] = ConfigError
) -> None:
  """Make a directory; raise `error` if nothing can be written there."""
  try:
    if bucket.is_in(path):
      bucket.require_writable(path)
      return
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as problem:
    raise error(
      f"{where} is {brief(str(path))}, where nothing can be written "
      f"({_reason(problem)}). Give another directory."
    ) from problem


def require_writable(path: Path, where: str) -> None:
  """Refuse a path that no new file can replace, such as a device or a pipe."""
  if path.exists() and not path.is_file():
    raise ConfigError(
      f"{where} is {brief(str(path))}, which is not a file: expected a file to "
      "replace, or a name that does not exist yet."
    )
  try:
    with tempfile.TemporaryFile(dir=path.resolve().parent):
      pass
  except (OSError, RuntimeError) as problem:
    raise ConfigError(
      f"{where} is {brief(str(path))}, which cannot be written "
      f"({_reason(problem)})."
    ) from problem


def followed(path: Path) -> Path:
  """Resolve all links in a path; a circle of links gives one of its links."""
  return path if bucket.is_in(path) else Path(os.path.realpath(path))


def require_replaceable(
  path: Path, where: str, error: type[Exception] = ConfigError
) -> None:
  """Refuse a directory that cannot be replaced by another directory."""
  if bucket.is_in(path):
    return
  place = os.path.realpath(path)
  if len(os.fsencode(os.path.basename(place))) > _LONGEST_NAME:
    raise error(
      f"{where} is {brief(str(path))}, whose last part is too long: expected "
      f"at most {_LONGEST_NAME} bytes."
    )
  if os.path.isdir(place) and not os.access(place, os.W_OK):
    raise error(
      f"{where} is {brief(str(path))}, which is protected against writing and "
      "cannot be replaced. Give another directory, or make it writable."
    )
  if os.path.ismount(place):
    raise error(
      f"{where} is {brief(str(path))}, a mount point, which cannot be replaced "
      f"as a whole. Give a directory inside it, such as {path / 'results'}."
    )
  cwd = Path.cwd()
  if Path(place) in (cwd, *cwd.parents):
    raise error(
      f"{where} is {brief(str(path))}, which is or contains the current "
      "directory, and cannot be replaced as a whole. Give another directory, "
      f"such as {cwd / 'results'}."
    )


def _reason(problem: Exception) -> str:
  """Return the message of an operating system error, without the path."""
  return getattr(problem, "strerror", None) or str(problem)[:200]
