"""The versions that made an output, for its metadata."""

import jax
import pyarrow as pa

from memory_vit.version import __version__


def versions() -> dict[str, str]:
  """{library: its version}."""
  return {
    "memory_vit": __version__,
    "jax": jax.__version__,
    "pyarrow": pa.__version__,
    "device": jax.devices()[0].device_kind,
  }
