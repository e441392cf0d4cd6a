"""The regimes that the paper compares: what is trained, how attention runs.

frozen      the backbone as it is; a head on its features, or a probe of them
plain       attention as in any ViT, with the class token of the task
memory      every token attends to the memory of each layer, which is dropped
            after attention (Figure 2, left, of the paper)
propagated  memory joins the tokens at the input and stays among them
additive    as propagated, and every layer adds its own memory to it
masked      Table 1: the backbone never sees the task; the original outputs
            stay, and tasks can share a pass

Not the paper's are two parts of masked tasks, alone or beside memory. With
`norms` the task's own token has LayerNorms of its own, which no other token
passes. With `layers` its head reads the token out of all layers: the token
after each block, normalised and times a vector of that layer, is added to what
the last LayerNorm puts out. What the head reads of one layer alone, others read
of all: Head2Toe (Evci et al. 2022) selects among the features of a frozen
backbone, VQT (Tu et al. 2023) and SynQT (2024) concatenate or sum queries
that are learned in every layer. `probe` reads all layers of the backbone as it
is, by attention over their class token and mean patch; see `probe`.
"""

import dataclasses
from typing import Any

from memory_vit.errors import ConfigError

# What a regime may train: the parts of the parameters of a task.
PARTS = (
  "head", "cls", "memory", "norms", "layers", "probe", "adapters", "backbone",
)  # fmt: skip
# Learned queries of a probe; each decides for an equal share of the features.
PROBE_QUERIES = 8


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
  def on_features(self) -> bool:
    """Whether its tasks are heads on what the frozen backbone puts out."""
    return self.attention == "frozen"

  @property
  def shares_pass(self) -> bool:
    """Whether a sweep can train several of its tasks in one pass.

    Beside the masked ones that is a head on features, which takes the place of
    the original one and thus composes with nothing.
    """
    return self.composes or self.on_features

  @property
  def has_memory(self) -> bool:
    """Whether its tasks learn memory cells."""
    return "memory" in self.trained

  @property
  def has_probe(self) -> bool:
    """Whether its tasks read all layers of the frozen backbone."""
    return "probe" in self.trained

  @property
  def has_bottleneck(self) -> bool:
    """Whether its tasks learn adapters, or what else has a bottleneck."""
    return "adapters" in self.trained or self.has_probe

  @property
  def holds_backbone(self) -> bool:
    """Whether each of its tasks holds a backbone of its own."""
    return "backbone" in self.trained

  def memory_layers(self, depth: int) -> int:
    """Layers with memory of their own, in a backbone of `depth` layers."""
    return 1 if self.attention == "propagated" else depth

  def expected_shapes(
    self,
    *,
    width: int,
    depth: int,
    summary: int,
    classes: int,
    cells: int,
    bottleneck: int,
  ) -> dict[str, Any]:
    """Shapes of the parameters of a task, without the backbone it may hold.

    Args:
      width: d, of the backbone.
      depth: l, of the backbone.
      summary: n, its `ViTConfig.summary_tokens`.
      classes: c.
      cells: m.
      bottleneck: r.

    Returns:
      A tree of tuples, with the parts as in `PARTS`. Not of jax's: whoever asks
      for the names of all regimes does not wait for jax.
    """
    adapter = {
      "down": {
        "kernel": (depth, width, bottleneck),
        "bias": (depth, bottleneck),
      },
      "up": {"kernel": (depth, bottleneck, width), "bias": (depth, width)},
    }
    # Of each LayerNorm: two in every block, and the last one.
    norms = (2 * depth + 1, width)
    # In this order: the random numbers of a part depend on how many come first.
    shapes = {
      "head": {"kernel": (width, classes), "bias": (classes,)},
      "cls": (width,),
      "memory": (self.memory_layers(depth), cells, width),
      "norms": {"scale": norms, "bias": norms},
      "layers": (depth, width),
      "probe": {
        "query": (PROBE_QUERIES, width),
        "bias": (PROBE_QUERIES, summary),
        "scale": (summary, width),
        "down": (summary, width, bottleneck),
        "up": (summary, bottleneck, width),
      },
      "adapters": {"attention": adapter, "mlp": adapter},
    }
    # Masked tasks that learn no memory have memory of no cells.
    parts = {*self.trained, *(["memory"] if self.composes else [])}
    return {part: shapes[part] for part in shapes if part in parts}


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
  "norms_memory_masked": Regime(("head", "cls", "memory", "norms"), "masked"),
  "norms_layers_memory_masked": Regime(
    ("head", "cls", "memory", "norms", "layers"), "masked"
  ),
  "memory_propagated": Regime(("head", "cls", "memory"), "propagated"),
  "memory_additive": Regime(("head", "cls", "memory"), "additive"),
  "adapter": Regime(("head", "cls", "adapters"), "plain"),
  "adapter_memory": Regime(("head", "cls", "adapters", "memory"), "memory"),
}


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
