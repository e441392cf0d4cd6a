"""Make new tasks."""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax

from memory_vit.errors import TaskError
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.model.backbone import (
  Backbone,
  require_float32,
  require_key,
  trunk,
)
from memory_vit.model.parts import InitialValues
from memory_vit.model.parts.side import NO_SIDE
from memory_vit.model.regimes import get_regime
from memory_vit.model.task import EvalPreprocessing, Task, TaskSpec
from memory_vit.model.task_params import init_task_params
from memory_vit.runtime import schema
from memory_vit.tasks.compose import task_tuple


def init_task(
  key: jax.Array,
  backbone: Backbone,
  *,
  name: str,
  num_classes: int,
  kind: TaskKind = CLASSES,
  cells: int | None = None,
  regime: str = "memory_masked",
  bottleneck: int = 0,
  side_width: int = 16,
  side_mixing: str = "conv",
  attends_to: str | Task | Iterable[str | Task] | Mapping[str, Task] = (),
  memory_norm: bool = True,
  memory_std: float = 0.02,
  cls_init: str = "pretrained",
  class_names: Sequence[str] = (),
  preprocessing: EvalPreprocessing | None = None,
) -> Task:
  """Make a new, untrained task; its head is all zeros.

  Args:
    key: JAX key for the random initialization, such as `jax.random.key(0)`.
    backbone: the backbone that the task is for.
    name: see `TaskSpec`.
    num_classes: c, the number of outputs of the head.
    kind: what the outputs mean: one of c classes, c labels, or c values.
    cells: m, memory cells per layer; by default 5, or 0 in a regime without
      memory.
    regime: what will be trained, see `get_regime`.
    bottleneck: width of adapters, or of the values of a probe; 0 in a regime
      with neither.
    side_width: r, the width of the side stream, in a regime with one.
    side_mixing: how the side stream mixes patches, see `TaskSpec`.
    attends_to: the earlier tasks that the new task attends to, one or several.
      The digest of a given `Task` is stored, so that a different task with the
      same name is refused later.
    memory_norm: see `TaskSpec`.
    memory_std: memory is initialized from N(0, memory_std^2).
    cls_init: "pretrained" copies the backbone's class token, or its substitute
      in a backbone without one; "normal" draws from N(0, 0.02^2).
    class_names: c names of classes, labels or values; or empty.
    preprocessing: preprocessing of images; by default as for the tasks in
      `attends_to`, else as the source of the backbone states, else resizing to
      a square.

  Raises:
    TaskError: if an argument is invalid.
    MemoryVitError: if `key` is not a JAX PRNG key.
  """
  require_key(key)
  start = InitialValues(memory_std=memory_std, cls_init=cls_init)
  size = backbone.config.image_size
  learned = get_regime(regime)
  if cells is None:
    cells = 5 if "cells" in learned.fields else 0
  num_classes, cells, bottleneck, side_width = (
    schema.whole_number(key, value, least, TaskError)
    for key, value, least in (
      ("num_classes", num_classes, 1), ("cells", cells, 0),
      ("bottleneck", bottleneck, 0), ("side_width", side_width, 0),
    )
  )  # fmt: skip
  if "side_width" not in learned.fields:  # the regime has no side stream
    side_width, side_mixing = NO_SIDE
  parents = _parents(name, attends_to)
  spec = TaskSpec(
    name=name,
    num_classes=num_classes,
    kind=kind,
    cells=cells,
    regime=regime,
    bottleneck=bottleneck,
    side_width=side_width,
    side_mixing=side_mixing,
    attends_to=tuple(parent.name for parent in parents),
    parent_digests=tuple(parent.digest for parent in parents),
    memory_norm=memory_norm,
    class_names=tuple(class_names),
    backbone=backbone.id,
    preprocessing=(
      preprocessing
      or next((p.preprocessing for p in parents if p.preprocessing), None)
      or backbone.preprocessing
      or EvalPreprocessing(image_size=size)
    ),
  )
  params = init_task_params(backbone.config, spec, start, key)
  for part in learned.parts:
    params[part.name] = part.on_backbone(params[part.name], backbone, start)
  if learned.holds_backbone:
    require_float32(backbone)
    params["backbone"] = trunk(backbone.params)
  return Task(spec, params)


@dataclasses.dataclass(frozen=True)
class _Parent:
  """A task that the new task attends to.

  Digest and preprocessing are unknown if the caller gave only a name.
  """

  name: str
  digest: str = ""
  preprocessing: EvalPreprocessing | None = None


def _parents(
  name: str,
  attends_to: str | Task | Iterable[str | Task] | Mapping[str, Task],
) -> list[_Parent]:
  if isinstance(attends_to, str):
    attends_to = [attends_to]
  elif isinstance(attends_to, Task | Mapping):
    attends_to = task_tuple(attends_to)
  elif not isinstance(attends_to, Iterable):
    raise TaskError(
      f"task {name!r}: attends_to is of type {type(attends_to).__name__}, "
      "expected a Task, the name of a task (str), or a list of tasks or names."
    )
  parents = []
  for parent in attends_to:
    if isinstance(parent, Task):
      parents.append(
        _Parent(parent.name, parent.digest, parent.spec.preprocessing)
      )
    elif isinstance(parent, str):
      parents.append(_Parent(parent))
    else:
      raise TaskError(
        f"task {name!r}: attends_to has an entry of type "
        f"{type(parent).__name__}, expected a Task or the name of a task (str)."
      )
  return parents
