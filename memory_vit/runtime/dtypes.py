"""Compute dtypes, and the choice of the faster one on this machine."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from etils import epy

with epy.lazy_imports():  # parsing a command line does not need JAX
  import jax

CHOICES = ("float32", "bfloat16", "auto")
# CPU flags for bfloat16 instructions. With them, a ViT-B/32 in batches of 16 is
# 3.5 times ("amx_bf16") or 1.9 times ("avx512_bf16") as fast as in float32.
_CPU_FLAGS = ("amx_bf16", "avx512_bf16")
CPUINFO = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Precision:
  """The dtype of the operands of matrix products, and the target platform.

  Attributes:
    dtype: "float32" or "bfloat16".
    platform: "cpu", "gpu" or "tpu", for which a program is traced; "" means the
      platform of JAX's first device.
  """

  dtype: str
  platform: str = ""

  @property
  def on_cpu(self) -> bool:
    return self._target == "cpu"

  @property
  def on_tpu(self) -> bool:
    return self._target == "tpu"

  @property
  def _target(self) -> str:
    return self.platform or jax.default_backend()


def resolve(dtype: str) -> str:
  """Replace "auto" by the faster compute dtype, and log the reason."""
  if dtype != "auto":
    return dtype
  chosen, reason = fastest()
  logger.info("dtype auto is %s: %s", chosen, reason)
  return chosen


def fastest() -> tuple[str, str]:
  """Return the faster compute dtype on JAX's first device, and the reason."""
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == "tpu":
    return "bfloat16", f"{kind} has bfloat16 matrix units"
  if device.platform == "gpu":
    capability = str(getattr(device, "compute_capability", ""))
    major = re.match(r"(\d+)\.", capability)
    fast = major is not None and int(major[1]) >= 8
    return (
      "bfloat16" if fast else "float32",
      f"{kind} has compute capability {capability or 'unknown'}; bfloat16 is "
      "faster from 8.0 on",
    )
  if not cpu_runs_bfloat16():
    return "float32", f"jax {jax.__version__} has no fast bfloat16 for CPUs"
  flags = _cpu_flags()
  for flag in _CPU_FLAGS:
    if flag in flags:
      return "bfloat16", f"the CPU has {flag}"
  return "float32", f"the CPU has none of {', '.join(_CPU_FLAGS)}"


def cpu_runs_bfloat16() -> bool:
  """Return whether XLA on CPUs multiplies bfloat16 and accumulates float32."""
  return jax.__version_info__ >= (0, 10)


def _cpu_flags() -> frozenset[str]:
  if not CPUINFO.exists():
    return frozenset()
  match = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
  return frozenset(match[1].split() if match else ())
