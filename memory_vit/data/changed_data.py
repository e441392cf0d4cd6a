"""What has changed in the data of a run that has finished."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import DataError
from memory_vit.runtime import processes

logger = logging.getLogger(__name__)

# {split: {"by": kind, "sha256": of its table}}, as `RunResult.data`.
Digests = Mapping[str, Mapping[str, str]]
_INVENTORY = "inventory"


def record_data(
  config: Config, directory: Path, roles: Sequence[str]
) -> dict[str, dict[str, str]]:
  """Write which files there are, as a run does; all processes must call.

  Args:
    config: that names the data.
    directory: in whose inventory/ their tables are written.
    roles: "train", "validation" or "test".

  Returns:
    {role: digest}, for `data_differences`.
  """
  readers = {role: datasets.open_split(config, role) for role in roles}
  record = DataRecord(
    directory=directory / _INVENTORY,
    by=config.data.digest,
    inventories={role: r.source.inventory for role, r in readers.items()},
  )
  record.keep()
  return record.digests


def data_differences(
  config: Config, directory: Path, digests: Digests
) -> list[str]:
  """How data differ from those of a finished run; all processes must call.

  Data that are not there any more are named in the log: whether they have
  changed cannot be known.

  Args:
    config: that names the data.
    directory: of the run.
    digests: of the data then, `RunResult.data`, or from `record_data`.

  Returns:
    Lines; none where nothing differs.
  """
  return processes.on_process_0(
    lambda: _differences(config, directory, digests)
  )


def _differences(
  config: Config, directory: Path, digests: Digests
) -> list[str]:
  refs, lines = configured_splits(config), []
  for role in ("train", "validation", "test"):
    if role not in digests or role not in refs:
      continue
    try:
      found = datasets.take_inventory(refs[role])
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      continue
    record = DataRecord(
      directory=directory / _INVENTORY,
      by=digests[role]["by"],
      inventories={role: found},
    )
    first, *more = record.difference(role, digests[role]) or [""]
    lines += [f"{role}: {first}", *more] if first else []
  return lines
