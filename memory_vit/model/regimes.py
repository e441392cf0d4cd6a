"""Regimes: which parts of a task are trained, and how attention runs.

frozen      the backbone is unchanged; the task is a head on its pooled output,
            which can share a pass like masked tasks, or a probe of all layers
plain       as in any ViT, with the task's class token if the task has one
memory      in each layer, every token attends to the memory of this layer,
            which is dropped after attention (Figure 2, left, of the paper)
propagated  memory is appended to the tokens at the input and stays there
additive    as propagated, and each later layer adds its memory to these tokens
masked      Table 1 of the paper: the backbone never attends to the task, so
            original outputs do not change, and tasks can share a pass

The name of a regime is a key of `REGIMES`, or a list of parts that are trained
in a masked regime, "cls+memory+side". In the paper, the parts of a task are
class token, memory and head.
"""

import dataclasses
import functools

from memory_vit.errors import ConfigError
from memory_vit.model.parts import PARTS, Part

# This name in `Regime.trained` means that the backbone itself is trained.
OWN_BACKBONE = "backbone"


@dataclasses.dataclass(frozen=True)
class Regime:
  """A way to train a task: which parts are trained, and how attention runs.

  Attributes:
    trained: names of `PARTS`, and "backbone" if the backbone is fine-tuned.
    attention: "frozen", "plain", "memory", "propagated", "additive" or
      "masked": see `memory_vit.model.regimes`.
  """

  trained: tuple[str, ...]
  attention: str

  @property
  def composes(self) -> bool:
    """Whether its tasks can share a pass with other tasks and the plain ViT."""
    return self.has_token or self.on_pooled

  @property
  def has_token(self) -> bool:
    """Whether its tasks have class tokens of their own in the task stream."""
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
    """Whether a new task's features are close to the backbone's pooled output.

    Assumes a pretrained class token; random memory changes the features a bit.
    """
    return not self.on_features or self.on_pooled

  @property
  def shares_pass(self) -> bool:
    """Whether a sweep can train several of its tasks in one pass."""
    return self.has_token or self.on_features

  @property
  def parts(self) -> tuple[Part, ...]:
    """The parts of its tasks; untrained parts of masked tasks have size 0."""
    return tuple(
      part
      for name, part in PARTS.items()
      if name in self.trained or (self.has_token and part.in_every)
    )

  @property
  def column(self) -> str:
    """The cached features that its tasks train on: "layers" or "pooled"."""
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
    """Return whether its tasks train this part, such as "memory"."""
    return part in self.trained

  @property
  def holds_backbone(self) -> bool:
    """Whether each of its tasks holds a fine-tuned backbone of its own."""
    return self.has(OWN_BACKBONE)

  def memory_layers(self, depth: int) -> int:
    """Return the number of layers that have memory cells, out of `depth`."""
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
  """Return the regime of a name in `REGIMES`, or of a list of parts.

  Raises:
    ConfigError: if `name` is neither.
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
  """Return why `name` is not a valid list of parts, or "" if it is valid."""
  parts, listed = name.split("+"), listed_parts()
  ordered = [part for part in listed if part in parts]
  if not set(parts) <= {*listed}:
    return (
      f"expected one of {', '.join(REGIMES)}, or some of "
      f"{', '.join(listed)}, joined by '+', such as 'cls+memory+side'"
    )
  if "cls" not in parts:
    return "expected 'cls' in the list: every masked task has a class token"
  if parts != ordered:
    return f"expected each part once, in this order: {'+'.join(ordered)!r}"
  preset = [n for n, kind in REGIMES.items() if kind == _listed(name)]
  return f"expected its short name, {preset[0]!r}" if preset else ""


def listed_parts() -> tuple[str, ...]:
  """Return the parts that a masked regime's name may list, in order."""
  return tuple(part.name for part in PARTS.values() if part.listed)
