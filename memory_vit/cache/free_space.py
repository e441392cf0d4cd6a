"""Free memory or disk space for cached rows, compared before computing."""

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
  """Where a process stores rows."""

  name: str  # "the disk of /data/cache"
  key: str  # the same for all processes that share the place
  free: int  # bytes


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
    # No other process uses the devices of this one.
    return Place(name, f"process {jax.process_index()}", least * len(stats))
  free = psutil.virtual_memory().available
  return Place("the memory of this machine", f"memory of {host}", free)


def require_free_space(
  what: str, needed: int, where: str, folder: Path
) -> None:
  """Raise `ConfigError` on all processes if one lacks space; all must call.

  Processes of a host that share a file system or its memory add up. `what`
  names the rows, `needed` is the bytes that this process will fill.
  """
  own_place = place_of(where, folder)
  asked = processes.gather(
    [own_place.key, needed, own_place.free, own_place.name]
  )
  places = dict.fromkeys(key for key, *_ in asked)
  # The own place first: each process reports that one if it is too small.
  for key in sorted(places, key=lambda key: key != own_place.key):
    same = [i for i, (other, *_) in enumerate(asked) if other == key]
    total = sum(asked[i][1] for i in same)
    # Other programs write there meanwhile: processes saw different numbers.
    free, name = min((asked[i][2], asked[i][3]) for i in same)
    if total <= free:
      continue
    if len(asked) > 1:
      noun = "process" if len(same) == 1 else "processes"
      name += f" (of {noun} {', '.join(map(str, same))})"
    others = {"device": "config.cache.where 'host' or 'disk'",
              "host": "config.cache.where 'disk'"}  # fmt: skip
    raise ConfigError(
      f"config.cache.where is {where!r}: the {what} take {total:,} bytes "
      f"({total / 2**30:.2f} GiB), and {name} has {free:,} free "
      f"({free / 2**30:.2f} GiB). Expected less: config.cache.dtype 'bfloat16' "
      "(half), fewer config.cache.crops; or another "
      f"{others.get(where, 'config.cache.dir')}."
    )
