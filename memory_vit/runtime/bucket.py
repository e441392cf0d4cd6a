"""Paths in a bucket of Google Cloud Storage (gs://).

An object is written whole or not at all, but a directory cannot be renamed in
one step. Therefore the alphabetically last file of a directory (`state.json` of
a saved state, `task.json` of a task) marks the directory as complete: this file
is written last and deleted first.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeGuard

from etils.epath import gpath

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime.messages import brief, named, not_installed

PREFIX = "gs://"
_ADDRESS = re.compile(r"gs://(?!goog)[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?")


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
  """Turn errors of gcsfs, aiohttp and google-auth into `OSError`."""
  try:
    yield
  except (OSError, MemoryVitError):
    raise
  except Exception as error:  # the libraries' errors share no base class
    raise OSError(errno.EIO, named(error)) from error


class BucketPath(gpath.PosixGPath):  # type: ignore[misc]
  """gs://BUCKET/NAME, with all methods of `pathlib.Path` that callers use.

  Methods that read or write an object raise `OSError`. Methods that look up a
  path, such as `exists`, raise `ConfigError`: on a local path they never fail,
  so callers do not expect an `OSError`.
  """

  read_bytes = as_os_error()(gpath.PosixGPath.read_bytes)
  write_bytes = as_os_error()(gpath.PosixGPath.write_bytes)
  unlink = as_os_error()(gpath.PosixGPath.unlink)
  rmtree = as_os_error()(gpath.PosixGPath.rmtree)
  # A rename is not atomic: it copies and deletes each object.
  rename = as_os_error()(gpath.PosixGPath.rename)

  def absolute(self) -> BucketPath:
    return self

  def resolve(self, strict: bool = False) -> BucketPath:
    return self  # etils would prepend the current directory

  def expanduser(self) -> BucketPath:
    return self

  def is_symlink(self) -> bool:
    return False

  def mkdir(self, *args: Any, **kwargs: Any) -> None:
    """Do nothing: objects need no directories."""

  def exists(self) -> bool:
    with self._looked_up():
      return super().exists()

  def is_dir(self) -> bool:
    with self._looked_up():
      return super().is_dir()

  def iterdir(self) -> Iterator[BucketPath]:
    """Yield the entries of a directory; none if it does not exist."""
    try:
      with self._looked_up():
        yield from list(super().iterdir())
    except FileNotFoundError:
      return

  def glob(self, pattern: str) -> Iterator[BucketPath]:
    with self._looked_up():
      yield from list(super().glob(pattern))

  def rglob(self, pattern: str) -> Iterator[BucketPath]:
    """Yield files and directories at any depth whose names match."""
    with self._looked_up():
      visited = list(super().walk())
    for root, folders, names in visited:
      # Some file systems of etils return paths without gs://.
      root = type(self)(PREFIX + str(root).removeprefix(PREFIX))
      yield from (root / n for n in fnmatch.filter(folders + names, pattern))

  @contextlib.contextmanager
  def _looked_up(self) -> Iterator[None]:
    try:
      with as_os_error():
        yield
    except FileNotFoundError:
      raise
    except OSError as error:
      raise ConfigError(
        f"{self} cannot be looked up ({error.strerror or error}). Check the "
        "name and the permissions of the bucket, and your credentials."
      ) from error

  def read_text(self, encoding: str | None = None) -> str:
    return self.read_bytes().decode(encoding or "utf-8")

  def write_text(self, data: str, encoding: str | None = None) -> int:
    return self.write_bytes(data.encode(encoding or "utf-8"))


def is_address(text: Any) -> bool:
  """Return whether a text begins with gs://; `parse` checks the rest."""
  return not isinstance(text, BucketPath) and str(text).startswith(PREFIX)


def is_in(path: Any) -> TypeGuard[BucketPath]:
  return isinstance(path, BucketPath)


def parse(
  text: str, where: str, error: type[Exception] = ConfigError
) -> BucketPath:
  """Parse an address; raise `error` if it is invalid or gcsfs is missing."""
  if not _ADDRESS.fullmatch(text):
    raise error(f"{where} is {brief(text)}: expected gs://BUCKET/DIRECTORY.")
  try:
    import fsspec
    import gcsfs  # noqa: F401 - fsspec opens it by its name
    from google.cloud import storage  # noqa: F401
  except ModuleNotFoundError as missing:
    raise error(
      not_installed(f"{where}, {brief(text)},", missing.name, "gcs")
    ) from missing
  # Make etils use gcsfs even if TensorFlow is installed. The variable also
  # affects the paths that orbax creates.
  os.environ.setdefault("EPATH_USE_TF", "0")
  # A cached listing would lack objects that orbax writes with its own client.
  fsspec.config.conf.setdefault("gcs", {}).setdefault(
    "use_listings_cache", False
  )
  return BucketPath(text)


def require_writable(path: BucketPath) -> None:
  """Raise `OSError` unless an object can be written and deleted."""
  probe = path / f".written-{uuid.uuid4().hex[:16]}"
  probe.write_bytes(b"")
  probe.unlink()


def upload(file: Path, path: BucketPath) -> None:
  with as_os_error(), file.open("rb") as source, path.open("wb") as target:
    shutil.copyfileobj(source, target, 2**20)


@contextlib.contextmanager
def fetched(path: BucketPath) -> Iterator[Path]:
  """Yield a local, temporary copy of a file, or of the files in a directory."""
  with tempfile.TemporaryDirectory(prefix="memory-vit-") as folder:
    place, files = Path(folder) / path.name, [path]
    if path.is_dir():
      place.mkdir()
      files = [file for file in path.iterdir() if not file.is_dir()]
    for file in files:
      local = place if file == path else place / file.name
      with as_os_error(), file.open("rb") as source, local.open("wb") as target:
        shutil.copyfileobj(source, target, 2**20)
    yield place


@contextlib.contextmanager
def open_sized(path: BucketPath) -> Iterator[tuple[IO[bytes], int]]:
  with as_os_error(), path.open("rb") as file:
    yield file, path.stat().length


@contextlib.contextmanager
def replacing(path: BucketPath) -> Iterator[Path]:
  """Yield a path for a new local file, which is then uploaded to `path`."""
  with tempfile.TemporaryDirectory(prefix="memory-vit-") as folder:
    part = Path(folder) / path.name
    yield part
    upload(part, path)


@contextlib.contextmanager
def replacing_directory(
  path: BucketPath, foreign_file: Callable[[Path], str | None]
) -> Iterator[Path]:
  """Yield a path for a new local directory, which then replaces `path`."""
  with tempfile.TemporaryDirectory(prefix="memory-vit-") as folder:
    new = Path(folder) / path.name
    yield new
    if foreign := foreign_file(path):
      raise TrainingError(
        f"{path} holds unknown files ({brief(foreign)}), and is left as it is."
      )
    remove_directory(path)
    files = (file for file in new.rglob("*") if file.is_file())
    for name in sorted((f.relative_to(new) for f in files), key=_order):
      upload(new / name, path / name.as_posix())


def _order(name: Path) -> tuple[bool, str]:
  return len(name.parts) == 1, name.as_posix()


def remove_directory(path: BucketPath) -> None:
  """Delete a directory, first the file that marks the directory as complete."""
  if files := [p for p in path.iterdir() if not p.is_dir()]:
    max(files).unlink(missing_ok=True)
  path.rmtree(missing_ok=True)
