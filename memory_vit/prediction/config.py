"""Configuration of a predictor: strings and numbers, which can be pickled."""

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

# Maximum batch size. No device has memory for a ViT and a larger batch.
_MOST_IMAGES = 2**16
_MOST = 2**20
_SOURCE = Text("a file, a directory, an address or a short name", most=4_000)
_TASK = Text("the path of a task", most=4_000)
_ROOM = Number(0, _MOST, "reserved; grows if a task needs more")
_SOME_ROOM = dataclasses.replace(_ROOM, least=1)
# Optional parts of a task, such as "norms", that have no size: a slot either
# has room for such a part, or has none.
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

  Slots grow if a task needs larger ones; growing compiles programs again.

  Attributes:
    backbone: any source that `load_backbone` takes.
    tasks: paths of tasks (directories or single files), or of directories that
      hold tasks; () to begin without tasks.
    dtype: compute dtype, "float32" or "bfloat16"; or "auto", the faster one on
      this machine.
    batch_sizes: numbers of images per pass, ascending; programs are compiled
      for each of them.
    slots: minimum number of slots for tasks with a token. If there are heads,
      the same minimum holds for the slots of heads.
    cells: minimum number of memory cells per layer in a slot.
    classes: minimum number of outputs (classes, labels or values) in a slot.
    parents: minimum number of tasks that a slot can attend to.
    parts: optional parts that slots have room for, such as "norms". Side
      streams cannot be reserved.
    memory_mib: memory for images and their decoding, in MiB.
    features: whether to compile the programs of features in the warm-up, and to
      include features in predictions as columns.
    image_size: side in pixels of the images that the backbone gets; 0 for the
      image size of the tasks or, without tasks, of the backbone.
    top: maximum number of most probable classes in predictions as columns.

  Raises:
    ConfigError: for a value that its option does not accept.
  """

  # Use `field` in place of `option`, so that type checkers see no default.
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
    Number(0, _MOST, "pixels; 0: the size of the tasks, or the backbone's"),
    "side of the model's images; set it if tasks of another size come later",
  )

  def __post_init__(self) -> None:
    options.require(self)
