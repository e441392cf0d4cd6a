"""What a predictor is built from: strings and numbers, which can be pickled."""

import dataclasses

from memory_vit.runtime import dtypes, options
from memory_vit.runtime.options import (
  Choice,
  Items,
  Number,
  Switch,
  Text,
  option,
)

# A batch of more images fits no device with a Vision Transformer beside it.
_MOST_IMAGES = 2**16
_MOST = 2**20
_SOURCE = Text("a file, a directory, an address or a short name", most=4_000)
_TASK = Text("the path of a task", most=4_000)
_ROOM = Number(0, _MOST, "reserved; where more come, it grows")
_SOME_ROOM = dataclasses.replace(_ROOM, least=1)


@dataclasses.dataclass(frozen=True)
class _BatchSizes:
  """Numbers of images that ascend."""

  expected: str = (
    f"a tuple of numbers that ascend, from 1 to {_MOST_IMAGES:,}, such as "
    "(1, 8, 32)"
  )

  def accepts(self, value: tuple[int, ...]) -> bool:
    if not isinstance(value, tuple) or not value:
      return False
    ascends = [*value] == sorted({*value})
    return ascends and value[0] >= 1 and value[-1] <= _MOST_IMAGES


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
    slots: the number of tasks for which programs are compiled, at least; it
      grows when more come, as the next four do.
    cells: memory cells per layer, at least.
    classes: classes of a task, at least.
    parents: tasks that one task reads, at least.
    parts: of "norms" and "layers", those that tasks may have. Side streams
      cannot be reserved.
    memory_mib: what images and their decoding may take together, in MiB.
    features: whether the programs of features are compiled at the warm-up, and
      a dictionary of columns gets them.
    image_size: side in pixels at which the backbone runs; 0 is that of the
      tasks, or without any the backbone's own.
    top: classes per task in a dictionary of columns, the most probable first.

  Raises:
    ConfigError: for a value that its rule refuses.
  """

  # Without a default, as type checkers see it in a `field` alone.
  backbone: str = dataclasses.field(metadata=option(None, _SOURCE).metadata)
  tasks: tuple[str, ...] = option((), Items(_TASK, _MOST))
  dtype: str = option("float32", Choice(dtypes.CHOICES))
  batch_sizes: tuple[int, ...] = option((1, 8, 32), _BatchSizes())
  slots: int = option(8, _SOME_ROOM, "room for so many tasks")
  cells: int = option(8, _ROOM, "room for memory cells per layer")
  classes: int = option(128, _SOME_ROOM, "room for classes of a task")
  parents: int = option(0, _ROOM)
  parts: tuple[str, ...] = option((), Items(Choice(("norms", "layers")), 2))
  memory_mib: int = option(
    2048, Number(1, _MOST, "MiB"), "MiB to decode images in"
  )
  features: bool = option(False, Switch())
  top: int = option(5, Number(1, _MOST, "classes"))
  image_size: int = option(
    0,
    Number(0, _MOST, "pixels; 0: that of the tasks, or of the backbone"),
    "of the model; to be given where tasks of another size come later",
  )

  def __post_init__(self) -> None:
    options.require(self)
