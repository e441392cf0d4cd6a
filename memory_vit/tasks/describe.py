"""Describe a saved task without its backbone."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.errors import TaskError
from memory_vit.model.task import TaskSpec
from memory_vit.tasks import manifest, store
from memory_vit.tasks.array_files import StoredArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReport:
  """The description of a saved task.

  Attributes:
    path: its directory.
    spec: what it is.
    parameters: the number of values.
    arrays: name -> its entry in `task.json`.
    damage: what is wrong with the arrays; "" where they were verified.
    provenance: as saved.
  """

  path: str
  spec: TaskSpec
  parameters: int
  arrays: Mapping[str, StoredArray]
  damage: str
  provenance: Mapping[str, Any]


def inspect_task(path: str | os.PathLike[str]) -> TaskReport:
  """Describe a saved task without its backbone.

  Raises:
    TaskError: where its `task.json` cannot be read. Damaged arrays are no
      error: the report says so.
  """
  path = Path(path)
  found = manifest.read(path)
  damage = ""
  try:
    store.read_arrays(path, found)
  except TaskError as error:
    damage = str(error)
  return TaskReport(
    path=str(path),
    spec=found.spec,
    parameters=sum(array.size for array in found.arrays.values()),
    arrays=found.arrays,
    damage=damage,
    provenance=found.provenance,
  )
