"""The regimes that the paper compares: what is trained, how attention runs.

frozen      the backbone as it is; a head on its features
plain       attention as in any ViT, with the class token of the task
memory      every token attends to the memory of each layer, which is dropped
            after attention (Figure 2, left, of the paper)
propagated  memory joins the tokens at the input and stays among them
additive    as propagated, and every layer adds its own memory to it
masked      Table 1: the backbone never sees the task; the original outputs
            stay, and tasks can share a pass

`norms_masked` is not the paper's: in place of memory the task's own token has
LayerNorms of its own, which no other token passes.
"""

import dataclasses

from memory_vit.errors import ConfigError

# What a regime may train: the parts of the parameters of a task.
PARTS = ("head", "cls", "memory", "norms", "adapters", "backbone")


@dataclasses.dataclass(frozen=True)
class Regime:
  """One way to learn a task.

  Attributes:
    trained: of `PARTS`.
    attention: as at the top of this file.
  """

  trained: tuple[str, ...]
  attention: str

  @property
  def composes(self) -> bool:
    """Whether its tasks can be put together, beside the original outputs."""
    return self.attention == "masked"

  @property
  def shares_pass(self) -> bool:
    """Whether variants can be learned side by side: none changes the others.

    Beside the masked ones that is a head on features, which takes the place of
    the original one and thus composes with nothing.
    """
    return self.attention in ("masked", "frozen")


REGIMES = {
  "full": Regime(("backbone", "head"), "plain"),
  "head": Regime(("head",), "frozen"),
  "head_cls": Regime(("head", "cls"), "plain"),
  "memory": Regime(("head", "cls", "memory"), "memory"),
  "memory_masked": Regime(("head", "cls", "memory"), "masked"),
  "cls_masked": Regime(("head", "cls"), "masked"),
  "norms_masked": Regime(("head", "cls", "norms"), "masked"),
  "memory_propagated": Regime(("head", "cls", "memory"), "propagated"),
  "memory_additive": Regime(("head", "cls", "memory"), "additive"),
  "adapter": Regime(("head", "cls", "adapters"), "plain"),
  "adapter_memory": Regime(("head", "cls", "adapters", "memory"), "memory"),
}


def has_memory(name: str) -> bool:
  """Whether the regime of this name learns memory cells."""
  return "memory" in REGIMES[name].trained


def regime(name: str) -> Regime:
  """The regime of this name.

  Raises:
    ConfigError: for another name.
  """
  if name not in REGIMES:
    raise ConfigError(
      f"regime is {name!r}, expected one of {', '.join(REGIMES)}."
    )
  return REGIMES[name]
