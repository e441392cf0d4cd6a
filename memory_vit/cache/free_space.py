"""Check that cached rows fit into memory or onto the disk, before computing."""

import dataclasses
import shutil
import socket
from pathlib import Path

import jax
import psutil

from memory_vit.errors import ConfigError
from memory_vit.runtime import processes
from memory_vit.runtime.messages import brief


@dataclasses.dataclass(frozen=True)
class Place:
  """The disk or memory in which a process stores rows."""

  name: str  # name in errors, for example "the disk of /data/cache"
  key: str  # equal for processes that share this disk or memory
  free: int  # free space, in bytes


def place_of(where: str, folder: Path) -> Place:
  host = socket.gethostname()
  if where == "disk":
    existing = next(
      path for path in (folder, *folder.absolute().parents) if path.exists()
    )
    name = f"the disk of {brief(str(folder))}"
    free = shutil.disk_usage(existing).free
    return Place(name, f"disk {existing.stat().st_dev} of {host}", free)
  stats = [device.memory_stats() for device in jax.local_devices()]
  if where == "device" and all(s and "bytes_limit" in s for s in stats):
    least = min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)
    name = f"the memory of {len(stats)} devices"
    # Each process has its own devices, so each process gets its own key.
    return Place(name, f"process {jax.process_index()}", least * len(stats))
  free = psutil.virtual_memory().available
  return Place("the memory of this machine", f"memory of {host}", free)


def require_free_space(
  what: str, needed: int, where: str, folder: Path
) -> None:
  """Raise `ConfigError` on all processes if any process lacks space.

  All processes must call this. The rows of processes that share a disk, or host
  memory, must fit together. `what` is the name of the rows in errors; `needed`
  is the number of bytes that this process will store.
  """
  own_place = place_of(where, folder)
  reports = processes.gather(
    [own_place.key, needed, own_place.free, own_place.name]
  )
  places = dict.fromkeys(key for key, *_ in reports)
  # Check this process's place first: if several places are full, each process
  # then names its own place in its error.
  for key in sorted(places, key=lambda key: key != own_place.key):
    same = [i for i, (place, *_) in enumerate(reports) if place == key]
    total = sum(reports[i][1] for i in same)
    # Processes that share a place may report different free space, because
    # other programs fill the place meanwhile: use the minimum.
    free, name = min((reports[i][2], reports[i][3]) for i in same)
    if total <= free:
      continue
    if len(reports) > 1:
      noun = "process" if len(same) == 1 else "processes"
      name += f" (of {noun} {', '.join(map(str, same))})"
    options = {"device": "config.cache.where 'host' or 'disk'",
               "host": "config.cache.where 'disk'"}  # fmt: skip
    raise ConfigError(
      f"config.cache.where is {where!r}: the {what} take {total:,} bytes "
      f"({total / 2**30:.2f} GiB), but {name} has {free:,} bytes free "
      f"({free / 2**30:.2f} GiB). Set config.cache.dtype 'bfloat16' (half the "
      "size), fewer config.cache.crops, or "
      f"{options.get(where, 'another config.cache.dir')}."
    )
