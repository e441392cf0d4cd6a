"""Keep compiled programs between commands, in the user's cache directory.

JAX does it, and is told where by its environment, before it is imported: what
it compiles is kept under a hash of the program, the options and the versions,
and is the same to the bit when it is loaded. Several processes may read and
write at once. JAX does not replace what is there: a file that is not whole, as
of a process that was killed, is compiled anew, with a warning, until somebody
deletes it.
"""

import contextlib
import hashlib
import os
import platform
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief

# Where downloads are kept too, see `backbones.download`.
_ROOT = "MEMORY_VIT_CACHE"
_SWITCH = "MEMORY_VIT_COMPILE_CACHE"
# JAX's own: who has set it has chosen.
_JAX = "JAX_COMPILATION_CACHE_DIR"
# Programs of a B/16 take some MB each.
MAX_BYTES = 2**30


def enable() -> None:
  """Have JAX keep what it compiles, unless the environment says otherwise.

  `MEMORY_VIT_COMPILE_CACHE=off` keeps nothing; `JAX_COMPILATION_CACHE_DIR` is
  another place. Where nothing can be written, nothing is kept.

  Raises:
    ConfigError: for a value of that switch that is neither "on" nor "off".
  """
  switch = os.environ.get(_SWITCH, "on")
  if switch not in ("on", "off"):
    raise ConfigError(f"{_SWITCH} is {brief(switch)}, expected 'on' or 'off'.")
  if switch == "off" or _JAX in os.environ:
    return
  try:
    root = Path(os.environ.get(_ROOT) or "~/.cache/memory_vit").expanduser()
    folder = root / "xla" / _machine()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _prune(root / "xla")
  except (OSError, RuntimeError):  # the latter where there is no home
    return
  if not os.access(folder, os.W_OK):
    return
  os.environ[_JAX] = str(folder)
  # Of a second by default: many programs of a command take less.
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.03")


def _machine() -> str:
  """Name of the kind of processor, as a home may be that of many machines.

  Programs for a CPU hold its instructions, and JAX does not tell two apart.
  """
  features = platform.machine()
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    kinds = ("flags", "Features", "model name")
    lines = sorted({line for line in file if line.startswith(kinds)})
    features += "".join(lines)
  return hashlib.sha256(features.encode()).hexdigest()[:16]


def _prune(folder: Path) -> None:
  """Delete the oldest files, until the others take half of `MAX_BYTES`."""
  found = [(path.stat(), path) for path in folder.glob("*/*")]
  total = sum(stat.st_size for stat, _ in found)
  if total <= MAX_BYTES:
    return
  for stat, path in sorted(found, key=lambda entry: entry[0].st_mtime):
    path.unlink(missing_ok=True)  # another process may prune as well
    total -= stat.st_size
    if total <= MAX_BYTES // 2:
      return
