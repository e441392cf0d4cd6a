"""Options of `train --dry_run` for devices that this machine lacks."""

import dataclasses

from memory_vit.errors import ConfigError
from memory_vit.runtime import options
from memory_vit.runtime.options import Number, Text, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsentDevices:
  """Devices that this machine lacks, for which a dry run compiles."""

  topology: str = option(
    "",
    Text("TPUs, such as v5e:4x4", ".*"),
    "With --dry_run: plan for absent TPUs, such as v5e:4x4, or v5e:1 for one "
    "chip. Data, weights and --workdir are not needed; the compiler, libtpu, "
    "estimates memory, the largest batch and seconds.",
  )
  gpu: str = option(
    "",
    Text("a GPU, such as h100", ".*"),
    "The same for one GPU, h100, by jax's CUDA plugin; no seconds are given.",
  )
  classes: int = option(
    0,
    Number(0, 2**20, "outputs of the task"),
    "With --topology or --gpu: outputs of the task; 0 means as in the data.",
  )
  examples: int = option(
    0,
    Number(0, 2**40, "examples of the training split"),
    "The same if config.epochs is set or rows are cached on the device: number "
    "of training examples; 0 means as in the data, which TFDS has prepared.",
  )

  def __post_init__(self) -> None:
    options.require(self, "--")
    if self.topology and self.gpu:
      raise ConfigError(
        "--topology and --gpu are both given: expected only one of them."
      )

  @property
  def device(self) -> str:
    """Name of the topology or GPU; "" for the devices of this machine."""
    return self.topology or self.gpu

  def require_dry_run(self, dry_run: bool) -> None:
    """Require --dry_run and a device (topology or GPU) if an option is set."""
    for name, value in vars(self).items():
      if value and not (dry_run and self.device):
        raise ConfigError(
          f"--{name} applies only to plans for absent devices: expected "
          "--dry_run together with --topology or --gpu."
        )
