"""Directories with SHA-256 digests of their files.

  arrays/     the files
  state.json  other saved values, the digests of all files, and its own digest

Digests reveal damage, not manipulation: whoever changes a file can update them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.errors import TrainingError
from memory_vit.runtime import files

ARRAYS, _SEAL = "arrays", "state.json"


def seal(path: Path, saved: Mapping[str, Any]) -> None:
  """Save JSON values and the digests of the files of arrays; sync to disk."""
  files.sync_tree(path / ARRAYS)
  saved = {**saved, "files": _file_digests(path)}
  (path / _SEAL).write_text(_sealed(saved), encoding="utf-8")
  files.sync(path / _SEAL)
  files.sync(path)


def is_sealed(path: Path) -> bool:
  """Return whether a directory is complete; see `files.is_finished`."""
  return files.is_finished(path, _SEAL)


def read(path: Path) -> dict[str, Any]:
  """Return the saved values; raise `TrainingError` if they are damaged."""
  file = path / _SEAL
  try:
    text = file.read_text(encoding="utf-8")
    saved = json.loads(text)["saved"]
    whole = text == _sealed(saved)
  except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
    raise TrainingError(
      f"{path} is damaged: {_SEAL} cannot be read: {error!r}."
    ) from error
  if not whole:
    raise TrainingError(
      f"{path} is damaged: {_SEAL} does not match its saved SHA-256."
    )
  return saved


def require_whole(path: Path) -> None:
  """Raise `TrainingError` if a file is missing or does not match its digest."""
  saved = read(path)["files"]
  try:
    digests = _file_digests(path)
  except OSError as error:
    raise TrainingError(f"{path} is damaged: {error}.") from error
  damaged = [name for name in saved if digests.get(name) != saved[name]]
  if damaged:
    raise TrainingError(
      f"{path} is damaged: {damaged} do not match their saved SHA-256."
    )


def file_digest(file: Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()


def _file_digests(path: Path) -> dict[str, str]:
  paths = (file for file in (path / ARRAYS).rglob("*") if not file.is_dir())
  digests = {f.relative_to(path).as_posix(): file_digest(f) for f in paths}
  return dict(sorted(digests.items()))


def _sealed(saved: Mapping[str, Any]) -> str:
  text = json.dumps(saved, indent=1)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return f'{{"sha256": "{digest}",\n"saved": {text}}}\n'
