"""A part of the parameters of a task, and what it does in a pass."""

# As text: jax, which annotations name, is imported lazily.
from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epy

from memory_vit.errors import TaskError
from memory_vit.runtime.dtypes import Precision

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt
  import numpy as np
  import optax

if TYPE_CHECKING:
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.masks import TaskMask
  from memory_vit.model.rope import Rotation
  from memory_vit.model.task import TaskSpec
  from memory_vit.model.vit_config import ViTConfig


class Axes(NamedTuple):
  """Lengths of a backbone on which the shapes of parameters depend."""

  width: int  # d
  depth: int  # l
  memory: int  # layers with memory of their own: l, or 1 if it is propagated
  summary: int  # n, its `ViTConfig.summary_tokens`

  @classmethod
  def of(cls, config: ViTConfig) -> Axes:
    """Lengths for masked tasks on a backbone."""
    depth = config.depth
    return cls(config.width, depth, depth, config.summary_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialValues:
  """Initial values of the parameters of a new task.

  Attributes:
    memory_std: memory is drawn from N(0, memory_std^2); the paper's is 0.02.
    cls_init: "pretrained" copies the backbone's class token, or what pools in
      its place; "normal" draws from N(0, 0.02^2).
  """

  memory_std: float = 0.02
  cls_init: str = "pretrained"

  def __post_init__(self) -> None:
    if self.cls_init not in ("pretrained", "normal"):
      raise TaskError(
        f"cls_init is {self.cls_init!r}, expected 'pretrained' or 'normal'."
      )
    if not (math.isfinite(self.memory_std) and self.memory_std > 0):
      raise TaskError(
        f"memory_std is {self.memory_std}, expected a positive number."
      )


class AttentionTerm(abc.ABC):
  """A summand of attention over the keys and values of a layer."""

  @abc.abstractmethod
  def scores(
    self, query: jt.Float[jax.Array, "b h t k"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t s"]:
    """Summand of the scores of the backbone's tokens."""

  @abc.abstractmethod
  def values(
    self, weights: jt.Float32[jax.Array, "b h t s"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t k"]:
    """Summand of the weighted sum of their values."""


class PassHooks:
  """Hooks of a part of stacked tasks in one pass, which do nothing here."""

  def attention_terms(
    self,
    layer: int,
    keys: jt.Float[jax.Array, "b h s k"],
    values: jt.Float[jax.Array, "b h s k"],
  ) -> Sequence[AttentionTerm]:
    """Return what attention of this layer gets in addition.

    It is called once for each layer, in their order, with the keys and values
    of the backbone.
    """
    return ()

  def after_norm(
    self,
    i: int,
    c: jt.Float[jax.Array, "b t d"],
    z: jt.Float[jax.Array, "b t d"],
  ) -> jt.Float[jax.Array, "b t d"]:
    """Change `z`, the output of LayerNorm i for the tokens `c`.

    Layer j has the LayerNorms 2 j and 2 j + 1; the last one is 2 l.
    """
    return z

  def read_out(
    self,
    states: Sequence[jt.Float[jax.Array, "b t d"]],
    features: jt.Float32[jax.Array, "b t d"],
  ) -> jt.Float32[jax.Array, "b t d"]:
    """Change the features for the heads, given the tokens after each block."""
    return features


class Part(abc.ABC):
  """Base class of parts.

  A pass runs all tasks of a set as one stack, with room for tasks that come
  later. `room` is what a part needs in it: its greatest size, or True.

  Attributes:
    name: in `Task.params`, and in a list of parts.
    listed: whether a list of parts, "cls+memory+side", may name it.
    in_every: whether every masked task has it, if only of size 0.
    unit: sizes that are numbers are rounded up to multiples of it in a stack; 0
      for a part whose sizes are no numbers.
    fields: of `TaskSpec`, which tasks without this part leave at their default.
    lengths: {length of `Axes`: the array whose first axis has it}.
    axis: of the tasks in stacked arrays.
  """

  name: str
  listed = False
  in_every = False
  unit = 0
  fields: tuple[str, ...] = ()
  lengths: Mapping[str, str] = {}
  axis = 1

  def size(self, spec: TaskSpec) -> Any:
    """Size on which shapes depend, beside the backbone."""
    return None

  @abc.abstractmethod
  def shapes(self, size: Any, axes: Axes) -> Any:
    """Shapes of the parameters of one task: a tree whose leaves are tuples."""

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    """Parameters of a new task, of `shapes`, structs of float32."""
    return zeros(shapes)

  def on_backbone(
    self, params: Any, backbone: Backbone, start: InitialValues
  ) -> Any:
    """Initial parameters on a backbone, given those that `init` made."""
    return params

  def problem(self, spec: TaskSpec) -> str:
    """Problem with the fields of a task that has this part; "" for none."""
    return ""

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    """Lines of `inspect`: a title and a text each."""
    return []

  def norm(self, params: Any) -> jt.Float[jax.Array, "*l"]:
    """Norm () of the parameters, or one per layer (l,)."""
    return optax.tree.norm(params)

  def cost(self, options: Any) -> tuple[int, ...]:
    """Cost in a pass of a task with these options; greater is more."""
    return ()

  def room(self, specs: Sequence[TaskSpec]) -> Any:
    """The smallest room for the parts of these tasks."""
    return max(map(self.size, specs), default=0) if self.unit else True

  def grown(self, room: Any, needed: Any) -> Any:
    """Round up to a room in which both fit; `room` is None if there is none."""
    if not self.unit:
      return True
    return -(-max(room or 0, needed, 1) // self.unit) * self.unit

  def stack(
    self,
    params: Mapping[int, Any],
    slots: int,
    room: Any,
    axes: Axes,
    xp: ModuleType,
  ) -> Any:
    """Stack {slot: parameters}; zeros in other slots, and up to `room`."""
    none = jax.tree.map(
      lambda shape: xp.zeros(shape, np.float32),
      self.shapes(room, axes),
      is_leaf=lambda node: isinstance(node, tuple),
    )
    each = [
      jax.tree.map(functools.partial(_padded, xp), params.get(i, none), none)
      for i in range(slots)
    ]
    return jax.tree.map(lambda *arrays: xp.stack(arrays, self.axis), *each)

  def ready(
    self, stacked: Any, mask: TaskMask, keys_values: Callable[..., Any]
  ) -> Any:
    """Prepare stacked arrays for passes.

    `keys_values` makes keys and values of memory and `mask.memory_norm`.
    """
    return stacked

  def hooks(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> PassHooks:
    """Begin a pass; `angles` are those of the backbone's tokens."""
    return PassHooks()


def zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda one: jnp.zeros(one.shape), shapes)


def normal(
  key: jax.Array, shape: Sequence[int], std: float
) -> jt.Float32[jax.Array, "*shape"]:
  """Draw from N(0, std^2), with the same bits in every program."""
  # Without a barrier XLA multiplies std with a constant of jax's formula first.
  return jax.lax.optimization_barrier(jax.random.normal(key, shape)) * std


def too_small(spec: TaskSpec, field: str, least: int) -> str:
  """The problem of a field below `least`; "" if it is not."""
  value = getattr(spec, field)
  return (
    "" if value >= least else f"{field} is {value}, expected at least {least}"
  )


def round_up(count: int) -> int:
  """1, 2, 4, 8, then multiples of 8: never more than 7 are unused."""
  return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _padded(xp: ModuleType, a: Any, like: Any) -> Any:
  """Add zeros at the end of every axis, up to the shape of `like`."""
  if a.shape == like.shape:
    return a
  return xp.pad(
    a, [(0, n - old) for old, n in zip(a.shape, like.shape, strict=True)]
  )
