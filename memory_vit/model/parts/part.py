"""A part of the parameters of a task, and what it does in a pass."""

# As text: jax, which annotations name, is imported lazily.
from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epy
from jaxtyping import Float, Float32

from memory_vit.errors import TaskError

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
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
  summary: int  # n, its `ViTConfig.summary_tokens`


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialValues:
  """How the parameters of a new task begin.

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


class View(abc.ABC):
  """What a part adds to attention over a layer's keys and values."""

  @abc.abstractmethod
  def scores(
    self, query: Float[jax.Array, "b h t k"], dtype: str
  ) -> Float32[jax.Array, "b h t s"]:
    """What is added to the scores of tokens of the backbone."""

  @abc.abstractmethod
  def values(
    self, weights: Float32[jax.Array, "b h t s"], dtype: str
  ) -> Float32[jax.Array, "b h t k"]:
    """What is added to the mean of their values."""


class InPass:
  """A part of stacked tasks in one pass; this one changes nothing."""

  def views(
    self,
    layer: int,
    keys: Float[jax.Array, "b h s k"],
    values: Float[jax.Array, "b h s k"],
  ) -> Sequence[View]:
    """What is added to attention in a layer, which are passed in order."""
    return ()

  def normed(
    self, i: int, c: Float[jax.Array, "b t d"], z: Float[jax.Array, "b t d"]
  ) -> Float[jax.Array, "b t d"]:
    """Change `z`, which LayerNorm i of the 2 l + 1 makes of the tokens `c`."""
    return z

  def read_out(
    self,
    states: Sequence[Float[jax.Array, "b t d"]],
    features: Float32[jax.Array, "b t d"],
  ) -> Float32[jax.Array, "b t d"]:
    """Change the features for the heads, given the tokens after each block."""
    return features


class Part(abc.ABC):
  """Base class of parts.

  A pass runs all tasks of a set as one stack, with room for tasks that come
  later. `room` is what a part needs in it: its greatest size, or just True.

  Attributes:
    name: in `Task.params`, and in a list of parts.
    listed: whether a list of parts, "cls+memory+side", may name it.
    in_every: whether every masked task has it, if only of size 0.
    sized: whether `room` is a size; other parts can be reserved by name.
    fields: of `TaskSpec`, which only tasks with this part may set.
    lengths: {length of `Axes`: the array whose first axis has it}.
    column: the features of a frozen backbone that it turns into those of its
      head; "" if it does not.
    axis: of the tasks in stacked arrays.
  """

  name: str
  listed = False
  in_every = False
  sized = False
  fields: tuple[str, ...] = ()
  lengths: Mapping[str, str] = {}
  column = ""
  axis = 1

  def size(self, spec: TaskSpec) -> Any:
    """What shapes depend on beside the backbone."""
    return None

  @abc.abstractmethod
  def shapes(self, size: Any, axes: Axes) -> Any:
    """Shapes of the parameters of one task, as a tree of tuples."""

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    """Parameters of a new task, of `shapes`, structs of float32."""
    return zeros(shapes)

  def on_backbone(
    self, params: Any, backbone: Backbone, start: InitialValues
  ) -> Any:
    """Initial parameters on a backbone, given those that `init` made."""
    return params

  def problem(self, spec: TaskSpec) -> str:
    """What is wrong with the fields of a task that has this part."""
    return ""

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    """Lines on the part of a task for people, each a title and a text."""
    return []

  def norm(self, params: Any) -> Float[jax.Array, ...]:
    """Norm () of the parameters, or one per layer (l,)."""
    return optax.tree.norm(params)

  def features(self, params: Any, column: Any) -> Float32[jax.Array, "b d"]:
    """Features for a head, made of those of `column`."""
    raise NotImplementedError(f"{self.name} has no column")

  def cost(self, options: Any) -> tuple[int, ...]:
    """What a task with these options adds to a pass; greater is more."""
    return ()

  def room(self, specs: Sequence[TaskSpec]) -> Any:
    """The room in which the parts of these tasks fit exactly."""
    return True

  def grown(self, room: Any, needed: Any) -> Any:
    """Rounded up, a room for both; `room` is None if there was none."""
    return needed or room

  def stack(
    self,
    params: Mapping[int, Any],
    slots: int,
    room: Any,
    axes: Axes,
    xp: ModuleType,
  ) -> Any:
    """Stack {slot: parameters}; zeros in other slots, and up to `room`."""
    shapes = self.shapes(room, axes)
    empty = jax.tree.map(lambda shape: _zeros(shape, xp), shapes, is_leaf=_leaf)

    def padded(tree: Any) -> Any:
      return jax.tree.map(
        lambda shape, a: _pad(a, shape, xp), shapes, tree, is_leaf=_leaf
      )

    each = [padded(params[i]) if i in params else empty for i in range(slots)]
    return jax.tree.map(lambda *arrays: xp.stack(arrays, self.axis), *each)

  def ready(
    self, stacked: Any, mask: TaskMask, keys_values: Callable[..., Any]
  ) -> Any:
    """What a pass takes, given the backbone's keys and values of memory."""
    return stacked

  def in_pass(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> InPass:
    """Begin a pass; `angles` are those of the backbone's tokens."""
    return InPass()


def zeros(shapes: Any) -> Any:
  # Of numpy: jnp.zeros compiles a program for every shape.
  return jax.tree.map(
    lambda one: jnp.asarray(np.zeros(one.shape, np.float32)), shapes
  )


def round_up_to(count: int, unit: int) -> int:
  return -(-count // unit) * unit


def round_up(count: int) -> int:
  """1, 2, 4, 8, then multiples of 8: never more than 7 are unused."""
  return 1 << (count - 1).bit_length() if count <= 8 else round_up_to(count, 8)


def _leaf(node: Any) -> bool:
  return isinstance(node, tuple)


def _zeros(shape: tuple[int, ...], xp: ModuleType) -> Any:
  return xp.zeros(shape, np.float32)


def _pad(a: Any, shape: tuple[int, ...], xp: ModuleType) -> Any:
  """Add zeros at the end of every axis, up to `shape`."""
  if a.shape == shape:
    return a
  return xp.pad(
    a, [(0, n - old) for old, n in zip(a.shape, shape, strict=True)]
  )
