"""Options of `train --dry_run` for devices that are not here."""

import dataclasses

from memory_vit.errors import ConfigError
from memory_vit.runtime import options
from memory_vit.runtime.options import Number, Text, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsentDevices:
  """Devices that are not here, for which a dry run compiles."""

  topology: str = option(
    "",
    Text("TPUs, such as v5e:4x4", ".*"),
    "With --dry_run: TPUs that need not be here, as v5e:4x4, or v5e:1 for one "
    "chip. Neither data, weights nor --workdir are needed; memory, the largest "
    "batch and seconds are estimated by the compiler, libtpu.",
  )
  gpu: str = option(
    "",
    Text("a GPU, such as h100", ".*"),
    "The same for one GPU, h100, by jax's CUDA plugin; without seconds.",
  )
  classes: int = option(
    0,
    Number(0, 2**20, "outputs of the task"),
    "With --topology or --gpu: outputs of the task; 0 asks the data set.",
  )
  examples: int = option(
    0,
    Number(0, 2**40, "examples of the training split"),
    "Likewise, where config.epochs is set or rows are cached on the device: "
    "training examples; 0 asks the data set, which TFDS must have prepared.",
  )

  def __post_init__(self) -> None:
    options.require(self, "--")
    if self.topology and self.gpu:
      raise ConfigError("--topology and --gpu are given, expected one of them.")

  @property
  def device(self) -> str:
    """The topology or the GPU; "" for the devices at hand."""
    return self.topology or self.gpu

  def require_dry_run(self, dry_run: bool) -> None:
    """Refuse options that a run at hand would not read."""
    for name, value in vars(self).items():
      if value and not (dry_run and self.device):
        raise ConfigError(
          f"--{name} is for a plan without a device: expected --dry_run and "
          "--topology or --gpu beside it."
        )
