"""Regimes: what of a task is trained, and how its attention runs.

frozen      the backbone unchanged; a head on its pooled output, which shares a
            pass as masked tasks do, or a probe of all its layers
plain       attention as in any ViT, with the class token of the task
memory      every token attends to the memory of each layer, which is dropped
            after attention (Figure 2, left, of the paper)
propagated  memory joins the tokens at the input and stays among them
additive    as propagated, and every layer adds its own memory to it
masked      Table 1: the backbone never attends to the task; the original
            outputs stay, and tasks can share a pass

A regime is a preset of `REGIMES`, or a list of parts of a masked one,
"cls+memory+side". The paper's parts are class token, memory and head.
"""

import dataclasses
import functools

from memory_vit.errors import ConfigError
from memory_vit.model.parts import PARTS, Part

# What a task may hold that is no `Part`: a backbone of its own.
OWN_BACKBONE = "backbone"


@dataclasses.dataclass(frozen=True)
class Regime:
  """One way to learn a task: what is trained, and how attention runs.

  Attributes:
    trained: names of `PARTS`, or "backbone".
    attention: "frozen", "plain", "memory", "propagated", "additive" or
      "masked": see `memory_vit.model.regimes`.
  """

  trained: tuple[str, ...]
  attention: str

  @property
  def composes(self) -> bool:
    """Whether its tasks share a pass with others and the original outputs."""
    return self.has_token or self.on_pooled

  @property
  def has_token(self) -> bool:
    """Whether its tasks have a class token beside that of the backbone."""
    return self.attention == "masked"

  @property
  def on_features(self) -> bool:
    """Whether its tasks are heads on features of the frozen backbone."""
    return self.attention == "frozen"

  @property
  def on_pooled(self) -> bool:
    """Whether its tasks are heads on the pooled output of the backbone."""
    return self.on_features and self.column == "pooled"

  @property
  def begins_as_head(self) -> bool:
    """Whether features are first those of the backbone, if its class token is.

    Memory disturbs them as much as its initial values do.
    """
    return not self.on_features or self.on_pooled

  @property
  def shares_pass(self) -> bool:
    """Whether a sweep can train several of its tasks in one pass."""
    return self.has_token or self.on_features

  @property
  def parts(self) -> tuple[Part, ...]:
    """The parts of its tasks; some have size 0 if they are not trained."""
    return tuple(
      part
      for name, part in PARTS.items()
      if name in self.trained or (self.has_token and part.in_every)
    )

  @property
  def column(self) -> str:
    """The features of a frozen backbone that its tasks are trained on."""
    return "layers" if self.has("probe") else "pooled"

  @property
  def fields(self) -> tuple[str, ...]:
    """The fields of `TaskSpec` that its tasks use."""
    return tuple(
      field
      for part in self.parts
      for field in part.fields
      if self.has(part.name)
    )

  def has(self, part: str) -> bool:
    """Whether its tasks learn this part, such as "memory"."""
    return part in self.trained

  @property
  def holds_backbone(self) -> bool:
    """Whether each of its tasks holds a backbone of its own."""
    return self.has(OWN_BACKBONE)

  def memory_layers(self, depth: int) -> int:
    """Layers with memory of their own, in a backbone of `depth` layers."""
    return 1 if self.attention == "propagated" else depth


REGIMES = {
  "full": Regime(("backbone", "head"), "plain"),
  "head": Regime(("head",), "frozen"),
  "probe": Regime(("head", "probe"), "frozen"),
  "head_cls": Regime(("head", "cls"), "plain"),
  "memory": Regime(("head", "cls", "memory"), "memory"),
  "memory_masked": Regime(("head", "cls", "memory"), "masked"),
  "cls_masked": Regime(("head", "cls"), "masked"),
  "norms_masked": Regime(("head", "cls", "norms"), "masked"),
  "layers_masked": Regime(("head", "cls", "layers"), "masked"),
  "norms_layers_masked": Regime(("head", "cls", "norms", "layers"), "masked"),
  "side_masked": Regime(("head", "cls", "norms", "layers", "side"), "masked"),
  "memory_propagated": Regime(("head", "cls", "memory"), "propagated"),
  "memory_additive": Regime(("head", "cls", "memory"), "additive"),
  "adapter": Regime(("head", "cls", "adapters"), "plain"),
  "adapter_memory": Regime(("head", "cls", "adapters", "memory"), "memory"),
}


@functools.cache
def get_regime(name: str) -> Regime:
  """Return the regime of this name, or of the parts that it lists.

  Raises:
    ConfigError: for another name.
  """
  if name in REGIMES:
    return REGIMES[name]
  if problem := _problem(name):
    raise ConfigError(f"regime is {name!r}, {problem}.")
  return _listed(name)


def is_regime(name: str) -> bool:
  return name in REGIMES or not _problem(name)


def _listed(name: str) -> Regime:
  return Regime(("head", *name.split("+")), "masked")


def _problem(name: str) -> str:
  """What keeps a name from being a list of parts; "" if nothing does."""
  parts, listed = name.split("+"), listed_parts()
  known = [part for part in listed if part in parts]
  if not set(parts) <= {*listed}:
    return (
      f"expected one of {', '.join(REGIMES)}, or some of "
      f"{', '.join(listed)}, such as 'cls+memory+side'"
    )
  if "cls" not in parts:
    return "expected 'cls' among its parts: a masked task has its own token"
  if parts != known:
    return f"expected it to be written {'+'.join(known)!r}"
  preset = [n for n, kind in REGIMES.items() if kind == _listed(name)]
  return f"expected it to be called {preset[0]!r}" if preset else ""


def listed_parts() -> tuple[str, ...]:
  """Parts that the name of a masked regime may list, in this order."""
  return tuple(part.name for part in PARTS.values() if part.listed)
