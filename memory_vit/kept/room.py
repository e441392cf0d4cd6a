"""Room for what is kept: how much there is, said before the work begins."""

import shutil
from pathlib import Path

import jax
import psutil

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief


def free_bytes(where: str, folder: Path) -> tuple[int, str]:
  """Bytes that this process may fill, and what has them.

  Args:
    where: a value of `config.keep.where`.
    folder: on whose disk rows are kept.
  """
  if where == "disk":
    there = next(
      path for path in (folder, *folder.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(there).free
    return free, f"the disk of {brief(str(folder))}"
  stats = [device.memory_stats() for device in jax.local_devices()]
  if where == "device" and all(s and "bytes_limit" in s for s in stats):
    least = min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)
    return least * len(stats), f"the memory of {len(stats)} devices"
  return psutil.virtual_memory().available, "the memory of this machine"


def require_room(what: str, needed: int, where: str, folder: Path) -> None:
  """Refuse what does not fit.

  Args:
    what: is kept, "contexts of training".
    needed: bytes that this process is going to fill.
    where: a value of `config.keep.where`.
    folder: on whose disk rows are kept.

  Raises:
    ConfigError: where there is less room.
  """
  free, place = free_bytes(where, folder)
  if needed <= free:
    return
  elsewhere = {"device": "'host' or 'disk'", "host": "'disk'"}.get(where)
  other = f"config.keep.where {elsewhere}" if elsewhere else "config.keep.dir"
  raise ConfigError(
    f"config.keep.where is {where!r}: the {what} take {needed:,} bytes "
    f"({needed / 2**30:.2f} GiB), and {place} has {free:,} free "
    f"({free / 2**30:.2f} GiB). Expected fewer: config.keep.dtype 'bfloat16' "
    f"(half), fewer config.keep.views; or another {other}."
  )
