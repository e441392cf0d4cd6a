"""What a predictor is built from: strings and numbers, which can be pickled."""

import dataclasses

from memory_vit.model.parts import PARTS
from memory_vit.runtime import dtypes, options
from memory_vit.runtime.options import (
  Choice,
  Items,
  Number,
  Switch,
  Text,
  option,
)

# No device holds a larger batch beside a Vision Transformer.
_MOST_IMAGES = 2**16
_MOST = 2**20
_SOURCE = Text("a file, a directory, an address or a short name", most=4_000)
_TASK = Text("the path of a task", most=4_000)
_ROOM = Number(0, _MOST, "reserved; grows if a task needs more")
_SOME_ROOM = dataclasses.replace(_ROOM, least=1)
# Parts that can be reserved by name: all of them have one size.
_PARTS = tuple(
  name for name, part in PARTS.items()
  if part.listed and not part.in_every and part.room(()) is True
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _BatchSizes:
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
  """The backbone and tasks that a predictor loads, and its fixed shapes.

  Sizes of slots grow if a task needs more; growing compiles again.

  Attributes:
    backbone: any source that `load_backbone` takes.
    tasks: directories or single files of tasks, or directories of tasks; ()
      begins without tasks.
    dtype: compute dtype, "float32" or "bfloat16"; or "auto", the faster one on
      this machine.
    batch_sizes: numbers of images per pass, ascending; each is compiled.
    slots: number of tasks, at least; heads have as many slots again.
    cells: memory cells per layer, at least.
    classes: outputs of a task (classes, labels or values), at least.
    parents: tasks that one task attends to, at least.
    parts: those that tasks may have besides, such as "norms". Side streams
      cannot be reserved.
    memory_mib: memory for images and their decoding, in MiB.
    features: whether the programs of features are compiled at the warm-up, and
      a dictionary of columns gets features.
    image_size: side in pixels at which the backbone runs; 0 is that of the
      tasks, or without tasks the backbone's own.
    top: classes of a task of classes in a dictionary of columns, the most
      probable first.

  Raises:
    ConfigError: for a value that its rule refuses.
  """

  # A `field`, so that type checkers see no default.
  backbone: str = dataclasses.field(metadata=option(None, _SOURCE).metadata)
  tasks: tuple[str, ...] = option((), Items(_TASK, _MOST))
  dtype: str = option("float32", Choice(dtypes.CHOICES))
  batch_sizes: tuple[int, ...] = option((1, 8, 32), _BatchSizes())
  slots: int = option(8, _SOME_ROOM, "number of tasks to reserve room for")
  cells: int = option(8, _ROOM, "memory cells per layer to reserve room for")
  classes: int = option(
    128,
    _SOME_ROOM,
    "outputs of a task (classes, labels or values) to reserve room for",
  )
  parents: int = option(0, _ROOM)
  parts: tuple[str, ...] = option((), Items(Choice(_PARTS), len(_PARTS)))
  memory_mib: int = option(
    2048, Number(1, _MOST, "MiB"), "MiB for decoding images"
  )
  features: bool = option(False, Switch())
  top: int = option(5, Number(1, _MOST, "classes"))
  image_size: int = option(
    0,
    Number(0, _MOST, "pixels; 0: that of the tasks, or of the backbone"),
    "side of the model's images; give it if tasks of another size come later",
  )

  def __post_init__(self) -> None:
    options.require(self)
