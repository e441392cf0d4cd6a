"""Tasks in slots: sizes are rounded up, so that programs compile rarely."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax

from memory_vit.model import trees
from memory_vit.model.regimes import SideKind
from memory_vit.model.stacking import SlotArrays, round_up_to
from memory_vit.model.task import TaskSpec
from memory_vit.runtime.messages import name_list


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["specs", "places"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Slots:
  """A set of tasks in slots, ready to run on a backbone; see `fill_slots`.

  It is a tree of arrays for JAX, as `Task` is: the rest is static.

  Attributes:
    specs: of the tasks.
    places: the slot of each, ascending; the other slots are empty.
    arrays: parameters, with the keys and values of memory.
  """

  specs: tuple[TaskSpec, ...]
  places: tuple[int, ...]
  arrays: SlotArrays

  def __repr__(self) -> str:
    if not self.specs:
      return "Slots(0 tasks)"
    values = trees.count(self.arrays)
    names = [spec.name for spec in self.specs]
    backbone = self.specs[0].backbone
    return (
      f"Slots({len(names)} tasks: {name_list(names)}; {values:,} values, on "
      f"{backbone.variant} at {backbone.image_size} px, fingerprint "
      f"{backbone.fingerprint[:12]})"
    )


@dataclasses.dataclass(frozen=True)
class SlotSizes:
  """Sizes of slots, for which programs are compiled."""

  slots: int = 0
  # Of the longest memory.
  cells: int = 0
  # Of the widest head.
  classes: int = 0
  # Tasks that one task attends to.
  parents: int = 0
  # Whether tasks may have LayerNorms of their own, and read all layers.
  norms: bool = False
  layers: bool = False
  # Kinds of side streams, and the number of each.
  side: tuple[tuple[SideKind, int], ...] = ()

  def holding(self, specs: Sequence[TaskSpec]) -> "SlotSizes":
    """The same sizes, or larger ones in which these tasks fit, rounded up."""
    specs = [spec for spec in specs if spec.learned.composes]
    parents = max((len(spec.attends_to) for spec in specs), default=0)
    parents = max(self.parents, parents)
    parts = {part for spec in specs for part in spec.learned.trained}
    cells = max(self.cells, 1, *(spec.cells for spec in specs))
    classes = max(self.classes, 1, *(spec.num_classes for spec in specs))
    return SlotSizes(
      slots=round_up(max(self.slots, len(specs), 1)),
      cells=round_up_to(cells, 8),
      classes=round_up_to(classes, 128),
      parents=round_up(parents) if parents else 0,
      norms=self.norms or "norms" in parts,
      layers=self.layers or "layers" in parts,
      side=_with_streams(self.side, specs),
    )


def _with_streams(
  sizes: Iterable[tuple[SideKind, int]], specs: Sequence[TaskSpec]
) -> tuple[tuple[SideKind, int], ...]:
  """Counts of side streams in which those of tasks fit, rounded up as slots."""
  counts = collections.Counter(s.side for s in specs if s.learned.has_side)
  most = dict(sizes)
  for kind, count in counts.items():
    most[kind] = max(most.get(kind, 0), round_up(count))
  return tuple(sorted(most.items()))


def round_up(count: int) -> int:
  """1, 2, 4, 8, then multiples of 8: never more than 7 are unused."""
  return 1 << (count - 1).bit_length() if count <= 8 else round_up_to(count, 8)
