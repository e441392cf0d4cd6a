"""XLA compilation: a cache on disk, and less optimization of one-off programs.

A cached program is bitwise identical to a newly compiled one, and several
processes may use the cache at once. JAX never replaces a cache file: if a
killed process leaves a truncated file, JAX compiles its program every time,
with a warning, until somebody deletes the file.
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

# Environment variable for the cache folder; `backbones.download` reads it, too.
_ROOT = "MEMORY_VIT_CACHE"
_SWITCH = "MEMORY_VIT_COMPILE_CACHE"
# Options of JAX. By default, JAX caches only programs that take at least one
# second to compile, but many of our programs take less and are worth caching.
_DIRECTORY = "jax_compilation_cache_dir"
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
_WORTHWHILE = 0.03
# Size at which the cache is pruned. A program of a ViT-B/16 takes a few MB.
MAX_BYTES = 2**30
# Optimization level of LLVM, which generates XLA's code for CPUs.
_OPTION = "xla_backend_optimization_level"


def enable_cache() -> None:
  """Cache compiled programs on disk, or do nothing if that is impossible.

  The functions that create a backbone call this, so that commands and the
  Python API share one cache. `MEMORY_VIT_COMPILE_CACHE=off` turns the cache
  off. A cache directory that the user has set in JAX is kept.
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
  except (OSError, RuntimeError):  # RuntimeError: no home directory
    return
  if not os.access(folder, os.W_OK):
    return
  jax.config.update(_DIRECTORY, str(folder))
  if _THRESHOLD.upper() not in os.environ:
    jax.config.update(_THRESHOLD, _WORTHWHILE)


def _machine() -> str:
  """Return a digest of the CPU model, used as the name of a cache folder.

  Programs are compiled for one CPU model, but JAX's cache keys do not include
  the model, and different machines may share a home directory.
  """
  features = platform.machine()
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    kinds = ("flags", "Features", "model name")
    lines = sorted({line for line in file if line.startswith(kinds)})
    features += "".join(lines)
  return hashlib.sha256(features.encode()).hexdigest()[:16]


def _prune(folder: Path) -> None:
  """If a cache exceeds `MAX_BYTES`, shrink the cache to half of `MAX_BYTES`."""
  entries = []
  for path in folder.glob("*/*"):
    with contextlib.suppress(FileNotFoundError):  # deleted by another process
      entries.append((path.stat(), path))
  total = sum(stat.st_size for stat, _ in entries)
  if total <= MAX_BYTES:
    return
  for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
    path.unlink(missing_ok=True)
    total -= stat.st_size
    if total <= MAX_BYTES // 2:
      return


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Unnamed:
  """A wrapper that keeps the dictionary keys of a result out of a program.

  JAX writes the keys of a result into the compiled program, and thus into its
  cache key: without the wrapper, a program that returns `{"pets": loss}` would
  be compiled again for a task of another name.
  """

  tree: Any

  def tree_flatten(self) -> tuple[list[Any], Any]:
    return jax.tree.flatten(self.tree)

  @classmethod
  def tree_unflatten(cls, structure: Any, leaves: Iterable[Any]) -> Self:
    return cls(jax.tree.unflatten(structure, leaves))


def options() -> dict[str, Any] | None:
  """Return `compiler_options` of `jax.jit` for a program that runs once."""
  if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
    return None
  # In all comparisons, level 1 took half the time of level 3 to compile, and
  # the results were bitwise identical.
  return {_OPTION: 1}
