"""Turn new memory away from the token that reads it.

New memory is not neutral. A LayerNorm makes cells of N(0, 0.02^2) as large as
any token, and where an image has few tokens they take most of the attention of
a task's token before anything is learned. What it then misses of the image
costs accuracy, and with few images training does not win it back. A quiet start
leaves cells as random as they were, and lets each point away from the queries
of its layer.
"""

# As text, `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.backbone import Backbone
from memory_vit.model.encoder import Context
from memory_vit.model.products import Dense
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.model.trees import AnyArray, Tree
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import sharding
from memory_vit.tasks.compose import TasksLike, require_fit, task_tuple
from memory_vit.tasks.program import encode


def quiet_memory(
  backbone: Backbone,
  task: Task,
  images: Float[ArrayLike, "b side side 3"],
  *,
  parents: TasksLike = (),
) -> Task:
  """Return a task whose memory takes little of its token's attention.

  Each cell moves by its own length against what raises its score with the mean
  query of its layer, over the heads.

  Args:
    backbone: of the task.
    task: a new task of a masked regime with memory.
    images: a batch of the task, in [-1, 1].
    parents: the tasks that it reads, and all that those read.

  Raises:
    TaskError: for a task of another regime or backbone, or without its parents.
    DataError: for images that the backbone does not take.
  """
  require_quiet(task.spec)
  require_backbone(task.spec, backbone.id)
  used = task_tuple(parents)
  require_fit([*used, task])
  _, context = encode(backbone, images)
  return quieted(backbone, task, used, context)


def require_quiet(spec: TaskSpec) -> None:
  """Raise `TaskError` for a task whose memory has no quiet start."""
  kind = spec.learned
  if not (kind.composes and kind.has_memory):
    raise TaskError(
      f"task {spec.name!r} has no quiet start: its regime is {spec.regime!r}, "
      "expected a masked one with memory, such as 'memory_masked'."
    )


def quieted(
  backbone: Backbone, task: Task, parents: Sequence[Task], context: Context
) -> Task:
  """`quiet_memory`, on a batch that the backbone has seen.

  The name of the task does not matter: all of the same shapes share a program.

  Args:
    backbone: of the task.
    task: see `quiet_memory`.
    parents: the same.
    context: from `encode`, of a batch on all devices.
  """
  # Without cells: what they would take is not what they shall be turned from.
  params = {**task.params, "memory": task.params["memory"][:, :0]}
  params.pop("head")
  used = [jax.device_get(p.params) for p in parents]
  specs = tuple(p.spec for p in parents)
  nameless = dataclasses.replace(
    task.spec, name=_other_name(specs), cells=0, num_classes=1, class_names=()
  )
  queries = mean_queries(
    backbone.params,
    [*used, jax.device_get(params)],
    context,
    config=backbone.config,
    specs=(*specs, nameless),
  )
  moved = turned_away(
    backbone.params,
    jax.device_get(task.params["memory"]),
    sharding.to_host(queries),
    config=backbone.config,
    memory_norm=task.spec.memory_norm,
  )
  memory = jnp.asarray(sharding.to_host(moved))
  return dataclasses.replace(task, params={**task.params, "memory": memory})


def _other_name(specs: Sequence[TaskSpec]) -> str:
  """A name that none of these tasks has."""
  taken = {spec.name for spec in specs}
  return next(n for n in map("task-{}".format, range(10**6)) if n not in taken)


@functools.partial(jax.jit, static_argnames=("config", "specs"))
def mean_queries(
  backbone_params: Any,
  tasks: list[Tree],
  context: Context,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> Float32[Array, "l h k"]:
  """The queries of the last task's token in every layer, mean over a batch.

  Args:
    backbone_params: of the backbone.
    tasks: parameters of all tasks that run, heads excepted.
    context: of the batch.
    config: of the backbone.
    specs: of the tasks.
  """
  _, seen = MemoryViT(config).apply(
    {"params": {"backbone": backbone_params}},
    tasks,
    specs,
    context,
    method="task_features",
    capture_intermediates=_is_query,
    mutable=["intermediates"],
  )
  blocks = seen["intermediates"]["backbone"]["Transformer"]
  queries = []
  for i in range(config.depth):
    attention = blocks[f"encoderblock_{i}"]["MultiHeadDotProductAttention_0"]
    (found,) = attention["query"]["__call__"]
    queries.append(found[:, -1].mean(axis=0))
  return jnp.stack(queries)


def _is_query(module: Any, method: str) -> bool:
  """Which outputs flax shall hand out: those of projections to queries."""
  del method
  return isinstance(module, Dense) and module.name == "query"


@functools.partial(jax.jit, static_argnames=("config", "memory_norm"))
def turned_away(
  backbone_params: Any,
  memory: Float[AnyArray, "l m d"],
  queries: Float32[AnyArray, "l h k"],
  *,
  config: ViTConfig,
  memory_norm: bool,
) -> Float32[Array, "l m d"]:
  """Memory, and as much against what raises its scores.

  Args:
    backbone_params: of the backbone.
    memory: as it was drawn.
    queries: of each layer.
    config: of the backbone.
    memory_norm: see `TaskSpec`.
  """
  model, params = MemoryViT(config), {"backbone": backbone_params}

  def score(memory: Float[Array, "l m d"]) -> Float32[Array, ""]:
    cells = apply(
      model, params, memory[:, None], jnp.array([memory_norm]),
      method="keys_values",
    )  # fmt: skip
    keys = jnp.stack([keys[0] for keys, _ in cells]).astype(jnp.float32)
    return jnp.einsum("lhmk,lhk->", keys, queries)

  memory = jnp.asarray(memory)
  raises = jax.grad(score)(memory)
  length = jnp.linalg.norm(raises, axis=-1, keepdims=True)
  own = jnp.linalg.norm(memory, axis=-1, keepdims=True)
  # Where nothing raises a score there is nothing to turn from.
  unit = raises / jnp.where(length > 0, length, 1.0)
  return memory - own * unit
