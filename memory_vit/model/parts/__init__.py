"""Parts of the parameters of a task: shapes, initial values, slots, passes."""

from memory_vit.model.parts.adapters import Adapters
from memory_vit.model.parts.class_token import ClassToken
from memory_vit.model.parts.head import Head
from memory_vit.model.parts.layers import Layers
from memory_vit.model.parts.memory import Memory
from memory_vit.model.parts.norms import Norms
from memory_vit.model.parts.part import Axes, InitialValues, Part, PassHooks
from memory_vit.model.parts.probe import Probe
from memory_vit.model.parts.side import SideStream

# The order matters: the random numbers of a part depend on the parts before it,
# and a pass applies the parts in this order.
PARTS: dict[str, Part] = {
  part.name: part
  for part in (
    Head(), ClassToken(), Memory(), Norms(), Layers(), SideStream(), Probe(),
    Adapters(),
  )
}  # fmt: skip

__all__ = ["PARTS", "Axes", "PassHooks", "InitialValues", "Part"]
