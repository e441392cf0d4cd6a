"""Tasks in slots: sizes are rounded up, so that programs compile rarely."""

import dataclasses
import functools

import jax

from memory_vit.model import trees
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.task import TaskSpec
from memory_vit.runtime.messages import name_list


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["specs", "places"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Slots:
  """A set of tasks that is ready for a backbone; see `inference.fill_slots`.

  It is a tree of arrays for JAX, as `Task` is: the others are static.

  Attributes:
    specs: of the tasks.
    places: the slot of each, ascending; the other slots are empty.
    arrays: see `SlotArrays`.
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
