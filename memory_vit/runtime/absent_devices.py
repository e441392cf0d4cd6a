"""Descriptions of TPUs and GPUs, to compile for them without having one.

JAX can compile a program for a device from a description of the device. Only
running the program needs the device itself.
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
  """A type of TPU or GPU.

  Attributes:
    platform: "tpu" or "gpu", see `ViTConfig.platform`.
    memory: bytes available to programs: for a TPU, the limit that its compiler
      states; for a GPU, the three quarters of its memory that JAX reserves.
    gigahertz: clock rate of a TPU, computed as its peak rate of bfloat16
      multiplications divided by the multiplications that its matrix units start
      per cycle; None if the compiler does not estimate cycles.
    options: `compiler_options` for compiling without the device.
  """

  platform: str
  memory: int
  gigahertz: float | None = None
  options: dict[str, bool | int | str] = dataclasses.field(default_factory=dict)


# The clock rates follow from https://cloud.google.com/tpu/docs: 197 TFLOP/s in
# four matrix units of 128 x 128, and 918 TFLOP/s in four of 256 x 256.
CHIPS = {
  "v5e": Chip("tpu", int(15.75 * 2**30), 1.5),
  "v6e": Chip("tpu", int(31.25 * 2**30), 1.75),
  # `options` turns off two features of XLA that need the device: autotuning,
  # which measures kernels, and matrix products in Triton, whose tile sizes XLA
  # chooses on the device.
  "h100": Chip(
    "gpu",
    84_978_434_048 * 3 // 4,
    options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
  ),
}  # fmt: skip
# {platform: (compiler package, extra of jax that installs it)}.
_COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax-cuda12-plugin", "cuda12")}
_TOPOLOGY = re.compile(r"(v\w+):(1|\d+x\d+(?:x\d+)?)")


def chip_of(topology: str) -> Chip:
  """Return the chip of a topology; raise `ConfigError` if it is unknown."""
  name = topology.partition(":")[0]
  if name not in CHIPS:
    raise ConfigError(
      f"topology is {brief(topology)}, expected one of "
      f"{', '.join(CHIPS)}; a TPU needs a shape, as in v5e:4x4 or v5e:1."
    )
  return CHIPS[name]


def compiler(topology: str) -> str:
  """Return the name and version of the package that compiles for a topology.

  Raises:
    ConfigError: for an unknown topology, or if the package is not installed.
  """
  package, extra = _COMPILERS[chip_of(topology).platform]
  try:
    return f"{package} {importlib.metadata.version(package)}"
  except importlib.metadata.PackageNotFoundError as error:
    raise ConfigError(
      f"{package}, which contains the compiler, is not installed. Install it: "
      f"pip install 'jax[{extra}]=={jax.__version__}'"
    ) from error


def devices(topology: str) -> list[jax.Device]:
  """Return the devices of a topology, for a mesh.

  Call it before anything is compiled: it turns off JAX's compilation cache.

  Args:
    topology: JAX's name, such as "v5e:4x4"; "v5e:1" is one chip, "h100" a GPU.

  Raises:
    ConfigError: for an unknown topology, or if its compiler is not installed.
  """
  compiler(topology)
  if chip_of(topology).platform == "gpu":
    return _gpu(topology)
  match = _TOPOLOGY.fullmatch(topology)
  if not match:
    raise ConfigError(
      f"topology is {brief(topology)}, expected a TPU and its shape, such as "
      "v5e:4x4, or v5e:1 for one chip."
    )
  # Without the first two variables, libtpu prints that it finds no TPU. Without
  # the third, only one process at a time may load libtpu.
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  name, shape = match.groups()
  is_one = shape in ("1", "1x1")
  host = f"{name}:2x2" if is_one else topology  # libtpu's minimum is 2x2
  try:
    described = _described(host, "tpu")
  except jax.errors.JaxRuntimeError as error:
    raise ConfigError(
      f"topology is {brief(topology)}, which libtpu refuses: {error}"
    ) from error
  return described[:1] if is_one else described


def _gpu(name: str) -> list[jax.Device]:
  jax.devices()  # initializes JAX, which loads the CUDA plugin
  text = (Path(__file__).parent / f"{name}.txt").read_text()
  return _described("", "cuda", target_config=text, topology="1x1x1")[:1]


def _described(name: str, platform: str, **options: str) -> list[jax.Device]:
  # JAX would cache a program for an absent device, and then fail to load it.
  jax.config.update("jax_enable_compilation_cache", False)
  return list(topologies.get_topology_desc(name, platform, **options).devices)
