"""The plan of a bulk run: images, shards and model.

It is written before the first image is read, and a resumed run must have the
same plan. The output directory has

  part-00000-of-00010.parquet  shards; each is complete or missing
  _plan/plan.json              the plan
  _plan/inputs.parquet         the files of the input

Readers of Parquet ignore names that start with an underscore.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from memory_vit.bulk.input_files import InputFiles
from memory_vit.bulk.readers import Columns
from memory_vit.errors import ConfigError
from memory_vit.model import trees
from memory_vit.runtime import files, parquet, paths
from memory_vit.runtime.messages import brief, first_line, listed

# Version of the format of plans. A plan of another version is not resumed.
FORMAT = 2
FOLDER = "_plan"
_PLAN, _INPUTS = "plan.json", "inputs.parquet"


@dataclasses.dataclass(frozen=True)
class Plan:
  """The images of a bulk run, their shards, and the model."""

  inventory: InputFiles
  columns: Columns
  shard_images: int
  batch_size: int  # affects the last bits of the outputs
  # Further facts that determine the rows, as JSON values: the backbone, the
  # tasks, the preprocessing, and the options of the output.
  model: Mapping[str, Any]

  @property
  def shards(self) -> int:
    return -(-self.inventory.images // self.shard_images)

  def numbers(self, shard: int) -> range:
    """Return the numbers of the images in a shard."""
    first = shard * self.shard_images
    return range(first, min(first + self.shard_images, self.inventory.images))

  def name(self, shard: int) -> str:
    """Return the file name of a shard."""
    return parquet.shard_name(shard, self.shards)

  @functools.cached_property
  def facts(self) -> dict[str, Any]:
    """Everything that determines the output, as JSON values."""
    return as_json({
      "format": FORMAT,
      "input": {
        "sha256": self.inventory.digest,
        "files": self.inventory.files.num_rows,
        "images": self.inventory.images,
        "columns": dataclasses.asdict(self.columns),
      },
      "shard_images": self.shard_images,
      "batch_size": self.batch_size,
      "model": dict(self.model),
    })  # fmt: skip

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of `facts`, stored in the metadata of every shard."""
    text = json.dumps(self.facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return values as JSON reads them back: tuples as lists, keys as text."""
  return json.loads(json.dumps(values))


def require_own(folder: Path) -> None:
  """Make the output directory; raise if it holds files, but no plan."""
  # Look for the plan after the other files. In the opposite order, another run
  # could write its plan and a shard between our two looks, and we would raise.
  if _holds_others(folder) and not (folder / FOLDER / _PLAN).exists():
    raise ConfigError(
      f"--output {brief(str(folder))} exists, but is not the output of a bulk "
      "run: expected a new or empty directory, or an output to resume."
    )
  paths.make_directory(folder / FOLDER, "--output")


def settle(plan: Plan, folder: Path) -> None:
  """Write a plan; raise if a different plan exists. The caller holds a lock."""
  file, inputs = folder / FOLDER / _PLAN, folder / FOLDER / _INPUTS
  if file.exists():
    _require_equal(plan, file)
    return
  with files.writing(inputs), files.replacing(inputs) as part:
    pq.write_table(plan.inventory.files, part)
  # Write plan.json last, because its presence means that the plan is complete.
  with files.writing(file), files.replacing(file) as part:
    part.write_text(json.dumps(plan.facts, indent=1) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> Plan:
  """Read the plan that `settle` wrote in another process."""
  facts = _read(folder / FOLDER / _PLAN)
  return Plan(
    inventory=InputFiles(pq.read_table(folder / FOLDER / _INPUTS)),
    columns=Columns(**facts["input"]["columns"]),
    shard_images=facts["shard_images"],
    batch_size=facts["batch_size"],
    model=facts["model"],
  )


def _read(file: Path) -> dict[str, Any]:
  try:
    facts = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
      raise ValueError("expected a JSON object")
    return facts
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{file} cannot be read as the plan of a bulk run: {first_line(error)}. "
      "Give another --output, or restore the file."
    ) from error


def _holds_others(folder: Path) -> bool:
  """Return whether a path is a file, or has entries other than `FOLDER`."""
  if not folder.is_dir():
    return folder.exists()
  return any(path.name != FOLDER for path in folder.iterdir())


def _require_equal(plan: Plan, file: Path) -> None:
  stored_facts = _read(file)
  if stored_facts == plan.facts:
    return
  stored, new = trees.flatten(stored_facts), trees.flatten(plan.facts)
  problems = [
    f"{key} is {brief(new.get(key))}, but in its plan {brief(stored.get(key))}"
    for key in sorted(stored.keys() | new.keys())
    if stored.get(key, "missing") != new.get(key, "missing")
  ]
  raise ConfigError(
    f"--output {brief(str(file.parent.parent))} holds another run: "
    f"{listed(problems)}. To resume that run, give its inputs, tasks and "
    "options; otherwise give another --output."
  )
