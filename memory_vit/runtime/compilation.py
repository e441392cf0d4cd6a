"""XLA compilation: a cache on disk, and fewer passes for rarely run programs.

JAX reads the place of the cache from the environment when it is imported. A
cached program is bitwise identical, and several processes may use the cache at
once. JAX never replaces a file: a truncated one, of a process that was killed,
is compiled again with a warning until somebody deletes it.
"""

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief

with epy.lazy_imports():  # the cache is set before jax is imported
  import jax

# Where downloads are kept too, see `backbones.download`.
_ROOT = "MEMORY_VIT_CACHE"
_SWITCH = "MEMORY_VIT_COMPILE_CACHE"
# JAX's own: who has set it has chosen.
_JAX = "JAX_COMPILATION_CACHE_DIR"
# Programs of a B/16 take some MB each.
MAX_BYTES = 2**30
# Of LLVM. Arrays are laid out before it: what a program takes in memory is the
# same with any.
_OPTION = "xla_backend_optimization_level"


def enable_cache() -> None:
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


def options(level: int) -> dict[str, Any] | None:
  """Compiler options of `jax.jit` for a program that is not worth the usual 3.

  Args:
    level: 1 computed the same bits as 3 wherever we compared them, in half of
      the time to compile; 0 is for what is compiled and never run.

  Returns:
    None where the compiler is left to itself: on accelerators, which have other
    options, and where XLA_FLAGS are set, as who has set them has chosen.
  """
  if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
    return None
  return {_OPTION: level}
