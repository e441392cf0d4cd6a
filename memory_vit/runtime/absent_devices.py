"""Descriptions of TPUs and GPUs that are not there, for their compilers.

A program is compiled for a device of a topology as for one at hand: only
running it needs the device.
"""

import dataclasses
import importlib.metadata
import os
import re
from pathlib import Path

import jax
from jax.experimental import topologies

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of chip.

  Attributes:
    platform: "tpu" or "gpu", see `ViTConfig.platform`.
    memory: bytes that programs may take, as the compiler of TPUs states them;
      of a GPU three quarters, which JAX reserves.
    gigahertz: the clock of a TPU: its peak rate of bfloat16 products divided by
      those that its matrix units begin in a cycle. None if cycles are not
      estimated.
    options: `compiler_options` without the device.
  """

  platform: str
  memory: int
  gigahertz: float | None = None
  options: dict[str, bool | int | str] = dataclasses.field(default_factory=dict)


# https://cloud.google.com/tpu/docs: 197 and 918 TFLOP/s, in four units of
# 128 x 128 and of 256 x 256.
CHIPS = {
  "v5e": Chip("tpu", int(15.75 * 2**30), 1.5),
  "v6e": Chip("tpu", int(31.25 * 2**30), 1.75),
  # Without the device no kernel can be timed, and Triton's products find no
  # tiles.
  "h100": Chip(
    "gpu",
    84_978_434_048 * 3 // 4,
    options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
  ),
}  # fmt: skip
# Packages, and the extras of jax that bring those that fit it.
_COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax-cuda12-plugin", "cuda12")}
_TOPOLOGY = re.compile(r"(v\w+):(1|\d+x\d+(?:x\d+)?)")


def chip_of(topology: str) -> Chip:
  """The kind of chip of a topology; raises `ConfigError` if it is unknown."""
  name = topology.partition(":")[0]
  if name not in CHIPS:
    raise ConfigError(
      f"topology is {brief(topology)}, expected one of "
      f"{', '.join(CHIPS)}; a TPU with its shape, such as v5e:4x4, or v5e:1."
    )
  return CHIPS[name]


def compiler(topology: str) -> str:
  """The package that compiles for a topology, and its version.

  Raises:
    ConfigError: for an unknown topology, or if it is not installed.
  """
  package, extra = _COMPILERS[chip_of(topology).platform]
  try:
    return f"{package} {importlib.metadata.version(package)}"
  except importlib.metadata.PackageNotFoundError as error:
    raise ConfigError(
      f"{package}, whose compiler is needed, is not installed. Expected: "
      f"pip install 'jax[{extra}]=={jax.__version__}'"
    ) from error


def devices(topology: str) -> list[jax.Device]:
  """The devices of a topology, for a mesh.

  Called before anything is compiled: it turns off JAX's cache of programs.

  Args:
    topology: "v5e:4x4", by jax's names; "v5e:1" is one chip; "h100" one GPU.

  Raises:
    ConfigError: for an unknown topology, or if its compiler is not installed.
  """
  compiler(topology)
  if chip_of(topology).platform == "gpu":
    return _gpu(topology)
  found = _TOPOLOGY.fullmatch(topology)
  if not found:
    raise ConfigError(
      f"topology is {brief(topology)}, expected a shape, such as v5e:4x4, or "
      "v5e:1 for one chip."
    )
  # Without the first two libtpu prints that it finds no TPU; without the third
  # one process at a time may load it.
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  name, shape = found.groups()
  is_one = shape in ("1", "1x1")  # of the smallest host, which has four
  asked = f"{name}:2x2" if is_one else topology
  try:
    described = _described(asked, "tpu")
  except jax.errors.JaxRuntimeError as error:
    raise ConfigError(
      f"topology is {brief(topology)}, which libtpu refuses: {error}"
    ) from error
  return described[:1] if is_one else described


def _gpu(name: str) -> list[jax.Device]:
  jax.devices()  # finds the plugin
  text = (Path(__file__).parent / f"{name}.txt").read_text()
  return _described("", "cuda", target_config=text, topology="1x1x1")[:1]


def _described(name: str, platform: str, **options: str) -> list[jax.Device]:
  # JAX would keep a program for an absent device, and fail to read it again.
  jax.config.update("jax_enable_compilation_cache", False)
  return list(topologies.get_topology_desc(name, platform, **options).devices)
