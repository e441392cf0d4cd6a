"""Paths from users: `~` expanded, impossible ones refused."""

import contextlib
import os
import tempfile
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief

# Of 255 bytes, what is left when a new directory lies beside an old one for a
# while, under a longer name.
_LONGEST_NAME = 240


def local(
  text: str | os.PathLike[str],
  where: str,
  error: type[Exception] = ConfigError,
) -> Path:
  """The path of a file or directory, which may not be there.

  Args:
    text: as it was typed; "~" and "~user" at its start are homes.
    where: what to call it in a message, such as "--workdir".
    error: what to raise.

  Raises:
    error: for a name that cannot be: of a user who does not exist, too long,
      or empty.
  """
  try:
    if not os.fspath(text):
      raise ValueError("it is empty")
    path = Path(text).expanduser()
    # Whether it is there is for whoever opens it to say.
    with contextlib.suppress(
      FileNotFoundError, NotADirectoryError, PermissionError
    ):
      os.lstat(path)
  except (OSError, RuntimeError, ValueError) as problem:
    raise error(
      f"{where} is {brief(os.fspath(text))}: no path ({_reason(problem)})."
    ) from problem
  return path


def make_directory(
  path: Path, where: str, error: type[Exception] = ConfigError
) -> None:
  """Make a directory to write to, where there is none.

  Raises:
    error: where it cannot be, or nothing can be written there.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as problem:
    raise error(
      f"{where} is {brief(str(path))}, where nothing can be written "
      f"({_reason(problem)}). Give another directory."
    ) from problem


def require_writable(path: Path, where: str) -> None:
  """Try whether a file can be written, and leave nothing behind.

  Devices, pipes and the like are refused: a whole file takes the place of what
  is there.

  Raises:
    ConfigError: where it cannot be.
  """
  if path.exists() and not path.is_file():
    raise ConfigError(
      f"{where} is {brief(str(path))}, which is no file: expected one that is "
      "replaced, or a name that is free."
    )
  try:
    with tempfile.TemporaryFile(dir=path.resolve().parent):
      pass
  except (OSError, RuntimeError) as problem:
    raise ConfigError(
      f"{where} is {brief(str(path))}, which cannot be written "
      f"({_reason(problem)})."
    ) from problem


def require_replaceable(
  path: Path, where: str, error: type[Exception] = ConfigError
) -> None:
  """Refuse a directory that another one cannot take the place of.

  Raises:
    error: for a mount point, and for the current directory or one above it,
      which would be gone for the shell that is there; for a directory that is
      protected against writing, and for a name that is too long.
  """
  place = os.path.realpath(path)
  if len(os.fsencode(os.path.basename(place))) > _LONGEST_NAME:
    raise error(
      f"{where} is {brief(str(path))}, whose last name is too long: expected "
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
      f"{where} is {brief(str(path))}, the current directory or one above it, "
      "which would be replaced as a whole. Give another one, such as "
      f"{cwd / 'results'}."
    )


def _reason(problem: Exception) -> str:
  """The message of an error of the operating system, without the path."""
  return getattr(problem, "strerror", None) or str(problem)[:200]
