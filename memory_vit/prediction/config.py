"""What a predictor is built from: strings and numbers, which can be pickled."""

import dataclasses

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief

# A batch of more images fits no device with a Vision Transformer beside it.
_MOST_IMAGES = 2**16


@dataclasses.dataclass(frozen=True)
class PredictorConfig:
  """Which backbone and tasks a predictor loads, and the shapes it computes in.

  Attributes:
    backbone: any source that `load_backbone` takes.
    tasks: directories or single files of tasks, or directories of tasks; none
      is a predictor that begins with no task.
    dtype: compute dtype, "float32" or "bfloat16"; or "auto", see
      `dtypes.resolve`.
    batch_sizes: images per pass, ascending; each is compiled.
    slots: room for so many tasks, at least; it grows where more come.
    cells: room for so many memory cells per layer, at least; the same.
    classes: room for so many classes of a task, at least; the same.
    parents: room for so many tasks that one task reads, at least; the same.
    parts: of "norms" and "layers", what tasks may have; the same. Side
      streams cannot be reserved.
    memory_mib: what images and their decoding may take together, in MiB.
    features: whether the programs of features are compiled at the warm-up, and
      a dictionary of columns gets them.
    image_size: side in pixels at which the backbone runs; 0 is that of the
      tasks, or without any the backbone's own.
    top: classes per task in a dictionary of columns, the most probable first.
  """

  backbone: str
  tasks: tuple[str, ...] = ()
  dtype: str = "float32"
  batch_sizes: tuple[int, ...] = (1, 8, 32)
  slots: int = 8
  cells: int = 8
  classes: int = 128
  parents: int = 0
  parts: tuple[str, ...] = ()
  memory_mib: int = 2048
  features: bool = False
  top: int = 5
  image_size: int = 0

  def __post_init__(self) -> None:
    if isinstance(self.tasks, str):
      raise ConfigError(
        f"tasks is the text {brief(self.tasks)}, expected a tuple of paths."
      )
    require_batch_sizes(self.batch_sizes)
    for name, least in (
      ("slots", 1), ("cells", 0), ("classes", 1), ("parents", 0),
      ("memory_mib", 1), ("top", 1), ("image_size", 0),
    ):  # fmt: skip
      value = getattr(self, name)
      if not _is_number(value) or not least <= value <= 2**20:
        raise ConfigError(
          f"{name} is {brief(value)}, expected a number from {least} to "
          f"{2**20:,}."
        )
    if not isinstance(self.features, bool):
      raise ConfigError(
        f"features is {brief(self.features)}, expected True or False."
      )
    if not isinstance(self.parts, tuple | list) or any(
      part not in ("norms", "layers") for part in self.parts
    ):
      raise ConfigError(
        f"parts is {brief(self.parts)}, expected a tuple of 'norms', 'layers'."
      )


def require_batch_sizes(sizes: tuple[int, ...]) -> None:
  """Raise `ConfigError` unless these are numbers that ascend from 1 or more."""
  if (
    not isinstance(sizes, tuple)
    or not sizes
    or not all(_is_number(s) and 1 <= s <= _MOST_IMAGES for s in sizes)
    or list(sizes) != sorted(set(sizes))
  ):
    raise ConfigError(
      f"batch_sizes is {brief(sizes)}, expected a tuple of numbers that ascend,"
      f" from 1 to {_MOST_IMAGES:,}, such as (1, 8, 32)."
    )


def _is_number(value: object) -> bool:
  """Whether this is an int; True and False are none."""
  return isinstance(value, int) and not isinstance(value, bool)
