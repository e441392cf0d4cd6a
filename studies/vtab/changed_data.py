"""Changes in the data of what is finished: refused, with what differs."""

import logging
from collections.abc import Mapping
from pathlib import Path

from memory_vit.data import data_files, datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import ConfigError, DataError
from memory_vit.runtime import processes

logger = logging.getLogger(__name__)

# {split: {"by": kind, "sha256": of its table}}, as `DataRecord.digests`.
Digests = Mapping[str, Mapping[str, str]]


def require_same(
  refs: Mapping[str, SplitRef], known: Digests, directory: Path
) -> None:
  """Refuse data that have changed since they were used; all must call.

  Data that are not there any more are named in the log: what is finished does
  not need them.

  Args:
    refs: of the splits.
    known: of some of them.
    directory: of what is finished, with the tables in inventory/.

  Raises:
    ConfigError: with the files that differ.
  """
  problem = processes.on_process_0(lambda: _problem(refs, known, directory))
  if problem:
    raise ConfigError(problem)


def _problem(
  refs: Mapping[str, SplitRef], known: Digests, directory: Path
) -> str:
  """Say how data have changed; "" where they have not."""
  for role, ref in refs.items():
    if role not in known:  # it diverged
      continue
    try:
      found = datasets.take_inventory(ref)
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      continue
    by, sha256 = known[role]["by"], known[role]["sha256"]
    if data_files.digest(found.table(by)) != sha256:
      record = DataRecord(
        directory=directory / "inventory", by=by, inventories={role: found}
      )
      lines = record.difference(role, known[role])
      return (
        f"the data are not those of the finished run {directory}. Put those "
        "back, or give another --workdir.\n  " + "\n  ".join(lines)
      )
  return ""
