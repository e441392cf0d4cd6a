"""Fetch and list tasks of the Hugging Face hub.

A repository holds each of its tasks as NAME.safetensors, at its top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from memory_vit.errors import TaskError
from memory_vit.model.task import TaskSpec
from memory_vit.runtime import hub
from memory_vit.runtime.messages import brief
from memory_vit.tasks import array_files, manifest

# The model card of a repository with tasks has this tag.
TAG = "learnable-memory"


def fetch(text: str) -> list[Path]:
  """Fetch the tasks at an address; return links into the cache of the hub."""
  address = hub.parse(text)
  if not address:
    raise TaskError(
      f"{brief(text)} is not the address of a task: expected hf://OWNER/NAME "
      "or hf://OWNER/NAME/TASK, with or without @REVISION."
    )
  pattern = f"{address.task or '*'}{array_files.SUFFIX}"
  directory = hub.fetch(
    address,
    [pattern],
    TaskError,
    f"Or fetch {pattern} of {address.repository} by hand, and give its path.",
  )
  paths = sorted(directory.glob(pattern))
  if not paths:
    raise TaskError(f"{address} has no task: there is no {pattern} in it.")
  return paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedTask:
  """A task on the hub; if it cannot be read, `spec` is None."""

  address: str
  spec: TaskSpec | None
  error: str = ""


def listed(owner: str) -> list[ListedTask]:
  """List the tasks of an owner; only the headers of the files are fetched."""
  if not hub.is_owner(owner):
    raise TaskError(
      f"{brief(owner)} is not a valid owner: expected the name of a user or an "
      "organization, as in hf://OWNER/NAME."
    )
  api = hub.library("the list of an owner's tasks", TaskError).HfApi()
  with hub.asking(f"list the tasks of {owner}", TaskError):
    models = list(api.list_models(author=owner, filter=TAG, full=True))
  return [task for model in models for task in _in_repository(api, model)]


def _in_repository(api: Any, model: Any) -> Iterator[ListedTask]:
  for name in sorted(file.rfilename for file in model.siblings or ()):
    path = PurePosixPath(name)
    if path.suffix != array_files.SUFFIX or len(path.parts) > 1:
      continue
    address = f"{hub.PREFIX}{model.id}/{path.stem}"
    try:
      with hub.asking(f"read {address}", TaskError):
        header = api.parse_safetensors_file_metadata(
          model.id, name, revision=model.sha
        )
      text = (header.metadata or {}).get(array_files.KEY)
      if text is None:
        continue  # the file is not a task, but for example a model
      spec = manifest.parse(text, address).spec
      yield ListedTask(address=address, spec=spec)
    except TaskError as error:
      yield ListedTask(address=address, spec=None, error=str(error))
