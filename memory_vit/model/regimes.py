"""Regimes: what of a task is trained, and how its attention runs.

frozen      the backbone unchanged; a head on its features, or a probe of them
plain       attention as in any ViT, with the class token of the task
memory      every token attends to the memory of each layer, which is dropped
            after attention (Figure 2, left, of the paper)
propagated  memory joins the tokens at the input and stays among them
additive    as propagated, and every layer adds its own memory to it
masked      Table 1: the backbone never attends to the task; the original
            outputs stay, and tasks can share a pass

Not the paper's are three parts of masked tasks, alone or beside memory, and the
probe of a frozen backbone:

norms   the task's token has LayerNorms of its own
layers  the token after each block, standardized and times a vector of that
        layer, is added to the output of the last LayerNorm. Kin: Head2Toe (Evci
        et al. 2022), VQT (Tu et al. 2023), SynQT (2024)
side    a narrow stream over the patches, see `side`
probe   attention over all layers, see `pooling.probe_features`

A regime is a preset of `REGIMES`, or a list of parts of a masked one,
"cls+memory+side".
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from memory_vit.errors import ConfigError

# Parts of the parameters of a task.
PARTS = (
  "head", "cls", "memory", "norms", "layers", "side", "probe", "adapters",
  "backbone",
)  # fmt: skip
# Parts of a masked task that a regime may list, in this order.
MASKED_PARTS = ("cls", "memory", "norms", "layers", "side")
# Learned queries of a probe, each for an equal share of the features.
PROBE_QUERIES = 8
# How a side stream mixes patches: see `side`.
SIDE_MIXING = ("conv", "none")


class SideKind(NamedTuple):
  """Width and mixing of a side stream: those of one kind share a product."""

  width: int
  mixing: str


NO_SIDE = SideKind(0, "")


@dataclasses.dataclass(frozen=True)
class Regime:
  """One way to learn a task: what is trained, and how attention runs.

  Attributes:
    trained: of `PARTS`.
    attention: "frozen", "plain", "memory", "propagated", "additive" or
      "masked": see `memory_vit.model.regimes`.
  """

  trained: tuple[str, ...]
  attention: str

  @property
  def composes(self) -> bool:
    """Whether its tasks share a pass with others and the original outputs."""
    return self.attention == "masked"

  @property
  def on_features(self) -> bool:
    """Whether its tasks are heads on features of the frozen backbone."""
    return self.attention == "frozen"

  @property
  def shares_pass(self) -> bool:
    """Whether a sweep can train several of its tasks in one pass."""
    return self.composes or self.on_features

  @property
  def has_memory(self) -> bool:
    """Whether its tasks learn memory cells."""
    return "memory" in self.trained

  @property
  def has_probe(self) -> bool:
    """Whether its tasks attend to all layers of the frozen backbone."""
    return "probe" in self.trained

  @property
  def has_side(self) -> bool:
    """Whether its tasks have a side stream."""
    return "side" in self.trained

  @property
  def has_bottleneck(self) -> bool:
    """Whether its tasks have a bottleneck: adapters, or a probe."""
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
    side: SideKind,
  ) -> dict[str, Any]:
    """Shapes of the parameters of a task, without the backbone it may hold.

    Args:
      width: d, of the backbone.
      depth: l, of the backbone.
      summary: n, its `ViTConfig.summary_tokens`.
      classes: c.
      cells: m.
      bottleneck: r.
      side: of the side stream, if there is one.

    Returns:
      A tree of tuples, with the parts as in `PARTS`.
    """
    adapter = {
      "down": {
        "kernel": (depth, width, bottleneck),
        "bias": (depth, bottleneck),
      },
      "up": {"kernel": (depth, bottleneck, width), "bias": (depth, width)},
    }
    # Two LayerNorms in every block, and the last one.
    norms = (2 * depth + 1, width)
    # The order matters: random numbers of a part depend on those before it.
    # Tuples, without jax: help texts do not wait for it.
    shapes = {
      "head": {"kernel": (width, classes), "bias": (classes,)},
      "cls": (width,),
      "memory": (self.memory_layers(depth), cells, width),
      "norms": {"scale": norms, "bias": norms},
      "layers": (depth, width),
      "side": side_shapes(width, depth, side),
      "probe": {
        "query": (PROBE_QUERIES, width),
        "bias": (PROBE_QUERIES, summary),
        "scale": (summary, width),
        "down": (summary, width, bottleneck),
        "up": (summary, bottleneck, width),
      },
      "adapters": {"attention": adapter, "mlp": adapter},
    }
    # Masked tasks without memory have memory of 0 cells.
    parts = {*self.trained, *(["memory"] if self.composes else [])}
    return {part: shapes[part] for part in shapes if part in parts}


def side_shapes(width: int, depth: int, kind: SideKind) -> dict[str, Any]:
  """Shapes of the parameters of a side stream, as a tree of tuples."""
  r = kind.width
  read = {
    "down": {"kernel": (depth, 2 * width, r), "bias": (depth, r)},
    "up": {"keys": (depth, r, width), "values": (depth, r, width)},
  }
  if kind.mixing == "none":
    return read
  norm = {"scale": (depth, r), "bias": (depth, r)}
  return {
    **read,
    "conv_norm": norm,
    "conv": (depth, 3, 3, r),
    "mlp_norm": norm,
    "mlp": {
      "Dense_0": {"kernel": (depth, r, 2 * r), "bias": (depth, 2 * r)},
      "Dense_1": {"kernel": (depth, 2 * r, r), "bias": (depth, r)},
    },
  }


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
  parts = name.split("+")
  known = [part for part in MASKED_PARTS if part in parts]
  if not set(parts) <= {*MASKED_PARTS}:
    return (
      f"expected one of {', '.join(REGIMES)}, or some of "
      f"{', '.join(MASKED_PARTS)}, such as 'cls+memory+side'"
    )
  if "cls" not in parts:
    return "expected 'cls' among its parts: a masked task has its own token"
  if parts != known:
    return f"expected it to be written {'+'.join(known)!r}"
  preset = [n for n, kind in REGIMES.items() if kind == _listed(name)]
  return f"expected it to be called {preset[0]!r}" if preset else ""
