"""A part of the parameters of a task, and its computation in a pass."""

# Annotations stay strings, because they name jax, which is imported lazily.
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
  """Lengths of a backbone that determine the shapes of task parameters."""

  width: int  # d, the number of features of a token
  depth: int  # l, the number of blocks
  memory: int  # number of layers with memory: l, or 1 if memory is propagated
  summary: int  # n, `ViTConfig.summary_tokens`

  @classmethod
  def of(cls, config: ViTConfig) -> Axes:
    """Return the lengths for masked tasks on a backbone."""
    depth = config.depth
    return cls(config.width, depth, depth, config.summary_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialValues:
  """Initial values of the parameters of a new task.

  Attributes:
    memory_std: standard deviation of initial memory; 0.02 in the paper.
    cls_init: "pretrained" takes the backbone's class token or its substitute,
      see `first_class_token`; "normal" draws from N(0, 0.02^2).
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
        f"memory_std is {self.memory_std}, expected a finite, positive number."
      )


class AttentionTerm(abc.ABC):
  """A term that a part adds to the attention of task tokens in a layer."""

  @abc.abstractmethod
  def scores(
    self, query: jt.Float[jax.Array, "b h t k"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t s"]:
    """Return the term added to the scores of the backbone's tokens."""

  @abc.abstractmethod
  def values(
    self, weights: jt.Float32[jax.Array, "b h t s"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t k"]:
    """Return the term added to the weighted sum of the backbone's values."""


class PassHooks:
  """Hooks of a part in a pass of stacked tasks; by default they do nothing."""

  def attention_terms(
    self,
    layer: int,
    keys: jt.Float[jax.Array, "b h s k"],
    values: jt.Float[jax.Array, "b h s k"],
  ) -> Sequence[AttentionTerm]:
    """Return the terms that are added to attention in this layer.

    The method is called once per layer, in order, with the keys and values of
    the backbone.
    """
    return ()

  def after_norm(
    self,
    i: int,
    c: jt.Float[jax.Array, "b t d"],
    z: jt.Float[jax.Array, "b t d"],
  ) -> jt.Float[jax.Array, "b t d"]:
    """Change `z`, the output of LayerNorm i for the tokens `c`.

    Block j has the LayerNorms 2 j and 2 j + 1; the last LayerNorm is 2 l.
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

  A pass runs all tasks as one stack, which has room for tasks that are added
  later. `room` is a part's size in the stack, or True if the part has no size.

  Attributes:
    name: key in `Task.params`, and name in lists of parts.
    listed: whether lists of parts, such as "cls+memory+side", may name it.
    in_every: whether every masked task has the part, possibly with size 0.
    unit: in a stack, sizes are rounded up to multiples of `unit`; 0 if the size
      is not a number.
    fields: fields of `TaskSpec` that the part uses.
    lengths: {field of `Axes`: array whose first axis has this length}.
    axis: the axis of tasks in stacked arrays.
  """

  name: str
  listed = False
  in_every = False
  unit = 0
  fields: tuple[str, ...] = ()
  lengths: Mapping[str, str] = {}
  axis = 1

  def size(self, spec: TaskSpec) -> Any:
    """Return the part's size, which determines shapes together with `Axes`."""
    return None

  @abc.abstractmethod
  def shapes(self, size: Any, axes: Axes) -> Any:
    """Return the shapes of one task's parameters, as a tree of tuples."""

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    """Return initial parameters; `shapes` are `jax.ShapeDtypeStruct`."""
    return zeros(shapes)

  def on_backbone(
    self, params: Any, backbone: Backbone, start: InitialValues
  ) -> Any:
    """Return initial parameters for `backbone`; `params` are from `init`."""
    return params

  def problem(self, spec: TaskSpec) -> str:
    """Return an error text if the fields of a task are wrong for this part."""
    return ""

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    """Return (title, text) pairs, which the command `inspect` prints."""
    return []

  def norm(self, params: Any) -> jt.Float[jax.Array, "*l"]:
    """Return the norm of the parameters, or one norm per layer."""
    return optax.tree.norm(params)

  def cost(self, options: Any) -> tuple[int, ...]:
    """Return a sort key: the part's cost in a pass, given options of a task."""
    return ()

  def room(self, specs: Sequence[TaskSpec]) -> Any:
    """Return the smallest room in which this part of the tasks fits."""
    return max(map(self.size, specs), default=0) if self.unit else True

  def grown(self, room: Any, needed: Any) -> Any:
    """Round up a room that fits `needed` and `room`, which may be None."""
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
    """Stack {slot: parameters}; unused slots and unused room are zero."""
    none = jax.tree.map(
      lambda shape: xp.zeros(shape, np.float32),
      self.shapes(room, axes),
      is_leaf=lambda node: isinstance(node, tuple),
    )
    padded = [
      jax.tree.map(functools.partial(_padded, xp), params.get(i, none), none)
      for i in range(slots)
    ]
    return jax.tree.map(lambda *arrays: xp.stack(arrays, self.axis), *padded)

  def ready(
    self, stacked: Any, mask: TaskMask, keys_values: Callable[..., Any]
  ) -> Any:
    """Prepare stacked arrays for passes.

    `keys_values` computes keys and values from memory and `mask.memory_norm`.
    """
    return stacked

  def hooks(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> PassHooks:
    """Return hooks for a pass; `angles` is the rotation of backbone tokens."""
    return PassHooks()


def zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda struct: jnp.zeros(struct.shape), shapes)


def normal(
  key: jax.Array, shape: Sequence[int], std: float
) -> jt.Float32[jax.Array, "*shape"]:
  """Draw from N(0, std^2), bitwise identically in every program."""
  # Without the barrier, XLA could multiply `std` by a constant of
  # `jax.random.normal` first, which would round differently.
  return jax.lax.optimization_barrier(jax.random.normal(key, shape)) * std


def too_small(spec: TaskSpec, field: str, least: int) -> str:
  """Return an error text if a field is below `least`, otherwise ""."""
  value = getattr(spec, field)
  return (
    "" if value >= least else f"{field} is {value}, expected at least {least}"
  )


def round_up(count: int) -> int:
  """Round up to 1, 2, 4, 8 or a multiple of 8, which adds at most 7."""
  return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _padded(xp: ModuleType, a: Any, like: Any) -> Any:
  """Return `a`, with zeros appended to every axis up to `like.shape`."""
  if a.shape == like.shape:
    return a
  return xp.pad(
    a, [(0, n - old) for old, n in zip(a.shape, like.shape, strict=True)]
  )
