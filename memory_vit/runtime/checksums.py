"""A directory whose files are known by their SHA-256, which lie in it.

  state.json  what else is saved, the digests of all files, and its own
  arrays/     the files

What is noticed is damage, not malice: whoever can write there can seal again.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.errors import TrainingError

ARRAYS, _SEAL = "arrays", "state.json"


def seal(path: Path, saved: Mapping[str, Any]) -> None:
  """Seals what lies in `path`; then all of it survives a power cut.

  Args:
    path: a directory with the files in `arrays/`.
    saved: what else to save, which JSON can hold; without a key "files".
  """
  saved = {**saved, "files": _file_digests(path, sync_too=True)}
  (path / _SEAL).write_text(_sealed(saved), encoding="utf-8")
  sync(path / _SEAL)
  sync(path)


def read(path: Path) -> dict[str, Any]:
  """What was saved, every byte of which is verified.

  Raises:
    TrainingError: where `state.json` is not what was written.
  """
  file = path / _SEAL
  try:
    text = file.read_text(encoding="utf-8")
    rest = json.loads(text)["saved"]
    whole = text == _sealed(rest)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise TrainingError(f"{path} is damaged: {_SEAL}: {error!r}.") from error
  if not whole:
    raise TrainingError(
      f"{path} is damaged: {_SEAL} is not what was written (SHA-256)."
    )
  return rest


def require_whole(path: Path) -> None:
  """Raises `TrainingError` unless all files are what was written."""
  saved = read(path)["files"]
  try:
    found = _file_digests(path)
  except OSError as error:
    raise TrainingError(f"{path} is damaged: {error}.") from error
  damaged = [name for name in saved if found.get(name) != saved[name]]
  if damaged:
    raise TrainingError(
      f"{path} is damaged: {damaged} are not what was written (SHA-256)."
    )


def sync(path: Path) -> None:
  """Waits until a file, or the names in a directory, survive a power cut."""
  opened = os.open(path, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def _file_digests(path: Path, sync_too: bool = False) -> dict[str, str]:
  """{file of the arrays: SHA-256}; where asked, once all is on the disk."""
  digests = {}
  for folder, _, names in os.walk(path / ARRAYS):
    for name in names:
      file = Path(folder) / name
      with file.open("rb") as opened:
        if sync_too:
          os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
      digests[file.relative_to(path).as_posix()] = digest
    if sync_too:
      sync(Path(folder))
  return dict(sorted(digests.items()))


def _sealed(rest: Mapping[str, Any]) -> str:
  """The text of `state.json`: what is saved, and its digest."""
  saved = json.dumps(rest, indent=1)
  digest = hashlib.sha256(saved.encode()).hexdigest()
  return f'{{"sha256": "{digest}",\n"saved": {saved}}}\n'
