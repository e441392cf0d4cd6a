"""XLA compilation: a cache on disk, and fewer passes for rarely run programs.

A cached program is bitwise identical, and several processes may use the cache
at once. JAX never replaces a file: a truncated one, of a process that was
killed, is compiled again with a warning until somebody deletes it.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief

# Also the place of downloads, see `backbones.download`.
_ROOT = "MEMORY_VIT_CACHE"
_SWITCH = "MEMORY_VIT_COMPILE_CACHE"
# Options of JAX. The default of the threshold is a second: many of our programs
# compile faster.
_DIRECTORY = "jax_compilation_cache_dir"
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
_WORTHWHILE = 0.03
# Programs of a B/16 take some MB each.
MAX_BYTES = 2**30
# Of LLVM.
_OPTION = "xla_backend_optimization_level"


def enable_cache() -> None:
  """Cache the programs of this process, silently none if that is impossible.

  Called where a backbone is made, which every program of ours needs: so
  commands and Python share one cache. `MEMORY_VIT_COMPILE_CACHE=off` turns it
  off, and a cache that the user has chosen in JAX is left as it is.
  """
  switch = os.environ.get(_SWITCH, "on")
  if switch not in ("on", "off"):
    raise ConfigError(f"{_SWITCH} is {brief(switch)}, expected 'on' or 'off'.")
  if switch == "off" or getattr(jax.config, _DIRECTORY) is not None:
    return
  try:
    root = Path(os.environ.get(_ROOT) or "~/.cache/memory_vit").expanduser()
    folder = root / "xla" / _machine()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _prune(root / "xla")
  except (OSError, RuntimeError):  # RuntimeError: there is no home
    return
  if not os.access(folder, os.W_OK):
    return
  jax.config.update(_DIRECTORY, str(folder))
  if _THRESHOLD.upper() not in os.environ:
    jax.config.update(_THRESHOLD, _WORTHWHILE)


def _machine() -> str:
  """The kind of CPU, whose instructions compiled programs hold.

  Machines of several kinds may share a home, and JAX's keys do not tell them
  apart.
  """
  features = platform.machine()
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    kinds = ("flags", "Features", "model name")
    lines = sorted({line for line in file if line.startswith(kinds)})
    features += "".join(lines)
  return hashlib.sha256(features.encode()).hexdigest()[:16]


def _prune(folder: Path) -> None:
  """Delete the oldest files until the rest takes half of `MAX_BYTES`."""
  found = [(path.stat(), path) for path in folder.glob("*/*")]
  total = sum(stat.st_size for stat, _ in found)
  if total <= MAX_BYTES:
    return
  for stat, path in sorted(found, key=lambda entry: entry[0].st_mtime):
    path.unlink(missing_ok=True)  # another process may prune as well
    total -= stat.st_size
    if total <= MAX_BYTES // 2:
      return


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Unnamed:
  """A result of a program, whose names are not part of the program.

  JAX writes the path of each result into a program, and so into the key of its
  cache: `{"pets": loss}` would be compiled again for a task of another name.
  """

  tree: Any

  def tree_flatten(self) -> tuple[list[Any], Any]:
    return jax.tree.flatten(self.tree)

  @classmethod
  def tree_unflatten(cls, structure: Any, leaves: Iterable[Any]) -> Self:
    return cls(jax.tree.unflatten(structure, leaves))


def options() -> dict[str, Any] | None:
  """`compiler_options` of `jax.jit` for a program that runs once."""
  # Level 1 computed the same bits as 3 in all comparisons, and compiles in half
  # of the time.
  if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
    return None
  return {_OPTION: 1}
