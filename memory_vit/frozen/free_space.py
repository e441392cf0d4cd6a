"""Room for cached rows: how much there is, said before the work begins."""

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
  """Where a process stores rows.

  Attributes:
    name: "the disk of /data/kept".
    key: is the same for all processes that fill it together.
    free: bytes.
  """

  name: str
  key: str
  free: int


def place_of(where: str, folder: Path) -> Place:
  """Where this process stores rows; see `require_free_space`."""
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
  """Refuse what does not fit; all processes must call.

  What several processes of a host store on one file system, or in its memory,
  has to fit there together.

  Args:
    what: is stored, "contexts of training".
    needed: bytes that this process is going to fill.
    where: a value of `config.keep.where`.
    folder: on whose disk they are stored.

  Raises:
    ConfigError: on every process, where one of them has less room.
  """
  own_place = place_of(where, folder)
  asked = processes.gather(
    [own_place.key, needed, own_place.free, own_place.name]
  )
  places = dict.fromkeys(key for key, *_ in asked)
  # The own one first, so that each process speaks of that if it can.
  for key in sorted(places, key=lambda key: key != own_place.key):
    same = [i for i, (other, *_) in enumerate(asked) if other == key]
    total = sum(asked[i][1] for i in same)
    # Others may write there meanwhile: not all have seen the same.
    free, name = min((asked[i][2], asked[i][3]) for i in same)
    if total <= free:
      continue
    if len(asked) > 1:
      noun = "process" if len(same) == 1 else "processes"
      name += f" (of {noun} {', '.join(map(str, same))})"
    others = {"device": "config.keep.where 'host' or 'disk'",
              "host": "config.keep.where 'disk'"}  # fmt: skip
    raise ConfigError(
      f"config.keep.where is {where!r}: the {what} take {total:,} bytes "
      f"({total / 2**30:.2f} GiB), and {name} has {free:,} free "
      f"({free / 2**30:.2f} GiB). Expected fewer: config.keep.dtype 'bfloat16' "
      "(half), fewer config.keep.views; or another "
      f"{others.get(where, 'config.keep.dir')}."
    )
