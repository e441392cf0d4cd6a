"""What a task is, and which tasks may see which (Table 1 of the paper).

Nothing here computes on an accelerator.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from memory_vit import records, trees
from memory_vit.errors import TaskError
from memory_vit.regimes import REGIMES, regime
from memory_vit.variants import MAX_IMAGE_SIZE, MAX_RESIZE

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# The key of the original outputs in the result of a forward pass.
BACKBONE = "backbone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalPreprocessing:
  """How a picture is made ready when it is not for training.

  Attributes:
    image_size: side of the square that the model gets, in pixels.
    crop: "resize" squeezes the whole picture into the square; "central" scales
      its shorter side to `resize` pixels and takes the middle.
    resize: the shorter side before a central crop, in pixels; 0 for "resize".
  """

  image_size: int
  crop: str = "resize"
  resize: int = 0

  def __post_init__(self) -> None:
    if not 1 <= self.image_size <= MAX_IMAGE_SIZE:
      raise TaskError(
        f"evaluation preprocessing: image_size is "
        f"{records.brief(self.image_size)}, expected 1 to {MAX_IMAGE_SIZE} "
        "pixels."
      )
    if self.crop == "resize" and self.resize == 0:
      return
    if self.crop == "central" and self.image_size <= self.resize <= MAX_RESIZE:
      return
    raise TaskError(
      f"evaluation preprocessing: crop {records.brief(self.crop)} with resize "
      f"{records.brief(self.resize)} is not possible: expected 'resize' (with "
      "resize 0), or 'central' with a resize of at least the image size, "
      f"{self.image_size}, and at most {MAX_RESIZE} pixels."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneId:
  """What a backbone must have in common with the one a task was trained on.

  Attributes:
    fingerprint: SHA-256 of its parameters (`trees.fingerprint`).
    variant: its shape, such as "B/32".
    image_size: in pixels.
    gelu: "tanh" or "exact".
  """

  fingerprint: str
  variant: str
  image_size: int
  gelu: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
  """Everything about a task except its arrays.

  Attributes:
    name: lower case letters, digits, "-" and "_"; at most 64.
    num_classes: c, outputs of its head.
    regime: how it was learned, see `regimes`.
    cells: m, memory cells per layer; 0 is a task without memory.
    bottleneck: width of its adapters; 0 where its regime has none.
    attends_to: names of the earlier tasks that it reads (model extension).
      Empty: it ignores all others (concatenation).
    parent_digests: `Task.digest` of each of `attends_to`, as it was when this
      task was trained; "" where that is not known. Empty: none is known.
    memory_norm: whether memory passes the block's first LayerNorm, as in Figure
      2 of the paper. The public re-implementations insert it after.
    class_names: c names, or empty where they are not known.
    backbone: the backbone that it belongs to.
    evaluation: how its pictures are prepared for evaluation.
  """

  name: str
  num_classes: int
  cells: int
  regime: str = "memory_masked"
  bottleneck: int = 0
  attends_to: tuple[str, ...] = ()
  parent_digests: tuple[str, ...] = ()
  memory_norm: bool = True
  # Of thousands of classes they would fill many screens.
  class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  backbone: BackboneId
  evaluation: EvalPreprocessing

  def __post_init__(self) -> None:
    if not NAME_PATTERN.fullmatch(self.name) or self.name == BACKBONE:
      raise TaskError(
        f"task name {self.name!r}: expected 1 to 64 of a-z, 0-9, '_' and '-', "
        f"starting with a letter or digit, and not {BACKBONE!r}."
      )
    for parent in self.attends_to:
      if not NAME_PATTERN.fullmatch(parent):
        raise TaskError(
          f"task {self.name!r} attends to {parent!r}, which is no task name."
        )
    trained = regime(self.regime).trained
    if self.cells and "memory" not in trained:
      raise TaskError(
        f"task {self.name!r} has {self.cells} cells, and its regime "
        f"{self.regime!r} has no memory: expected 0."
      )
    if (self.bottleneck > 0) != ("adapters" in trained):
      raise TaskError(
        f"task {self.name!r}: bottleneck is {self.bottleneck}; expected at "
        "least 1 in a regime with adapters, and 0 in any other."
      )
    if self.num_classes < 1 or self.cells < 0:
      raise TaskError(
        f"task {self.name!r}: num_classes is {self.num_classes} (expected at "
        f"least 1), cells is {self.cells} (expected at least 0)."
      )
    if self.class_names and len(self.class_names) != self.num_classes:
      raise TaskError(
        f"task {self.name!r}: {len(self.class_names)} class names for "
        f"{self.num_classes} classes."
      )
    if self.parent_digests and len(self.parent_digests) != len(self.attends_to):
      raise TaskError(
        f"task {self.name!r}: {len(self.parent_digests)} parent_digests for "
        f"{len(self.attends_to)} tasks that it attends to."
      )
    if self.evaluation.image_size != self.backbone.image_size:
      raise TaskError(
        f"task {self.name!r}: pictures are prepared at "
        f"{self.evaluation.image_size} px, the backbone takes "
        f"{self.backbone.image_size} px."
      )

  @property
  def summary(self) -> str:
    """Name, classes, cells and regime, for people."""
    return (
      f"{self.name!r}, {self.num_classes} classes, {self.cells} cells, "
      f"{self.regime}"
    )


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["params"],
  meta_fields=["spec"],
  # Metrics would be those of other values, and no two tasks share a program.
  drop_fields=["provenance"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Task:
  """A task: what it is, and what it learned.

  It is a tree of arrays for JAX (`jax.jit`, `jax.tree.map`, `jax.device_put`):
  `params` are its leaves, and `spec` is static. What such a function returns is
  another task, without provenance.

  Attributes:
    spec: see `TaskSpec`.
    params: what its regime trains, float32; in `memory_masked` {"cls": (d,),
      "memory": (l, m, d), "head": {"kernel": (d, c), "bias": (c,)}}.
    provenance: the configuration and the metrics of the run that made it;
      empty for a task that was not trained.
  """

  spec: TaskSpec
  params: dict[str, Any]
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    """Short for `spec.name`."""
    return self.spec.name

  def __repr__(self) -> str:
    spec = self.spec
    parts = [spec.summary]
    if spec.attends_to:
      parts.append(f"attends to {listed(spec.attends_to)}")
    parts.append(f"{trees.count(self.params):,} parameters")
    parts.append(
      f"on {spec.backbone.variant} at {spec.backbone.image_size} px, "
      f"fingerprint {spec.backbone.fingerprint[:12]}"
    )
    return f"Task({', '.join(parts)})"

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 over all that its token computes with, its parents included.

    Its own name and those of its parents are not among that.
    """
    spec = self.spec
    parts = (
      spec.regime,
      spec.memory_norm,
      len(spec.attends_to),
      spec.parent_digests,
      trees.fingerprint(self.params),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# What functions take for a set of tasks; the dictionary is {name: task}.
TasksLike = Task | Iterable[Task] | Mapping[str, Task]


def task_tuple(tasks: TasksLike) -> tuple[Task, ...]:
  """One task, or any collection of tasks -> a tuple.

  Args:
    tasks: a task; a sequence or generator of tasks; or {name: task}.

  Raises:
    TaskError: for anything else, or a key that is not the name of its task.
  """
  if isinstance(tasks, Task):
    return (tasks,)
  if isinstance(tasks, str | bytes) or not isinstance(tasks, Iterable):
    raise TaskError(
      f"tasks are of type {type(tasks).__name__}, expected a Task, a sequence "
      "or generator of them, or a dictionary {name: Task}."
    )
  found = tuple(tasks.values() if isinstance(tasks, Mapping) else tasks)
  for i, task in enumerate(found):
    if not isinstance(task, Task):
      raise TaskError(
        f"number {i} of the tasks is of type {type(task).__name__}, expected "
        "a Task, from load_task or init_task."
      )
  if isinstance(tasks, Mapping):
    for key, task in tasks.items():
      if key != task.name:
        raise TaskError(
          f"the dictionary of tasks has {task.name!r} under the key {key!r}: "
          "the keys must be the names of the tasks (rename changes a name)."
        )
  return found


def listed(names: Sequence[str], most: int = 8) -> str:
  """Names in a row, for people; of many, the first ones."""
  shown = ", ".join(names[:most])
  left = len(names) - most
  return f"{shown} and {left} more" if left > 0 else shown


def require_fit(tasks: Sequence[Task]) -> None:
  """Raises `TaskError` unless tasks can share a forward pass.

  They must have one backbone and one evaluation preprocessing, since they look
  at the same pictures; all that they attend to must be there, and as it was.
  That last one cannot be told while JAX traces a function of their values.
  """
  for task in tasks:
    if not regime(task.spec.regime).composes:
      raise TaskError(
        f"task {task.spec.name!r} was learned by {task.spec.regime!r}, which "
        "changes what the backbone computes: it cannot share a pass. Expected "
        f"tasks of {', '.join(n for n, r in REGIMES.items() if r.composes)}."
      )
  for task in tasks[1:]:
    require_backbone(task.spec, tasks[0].spec.backbone, tasks[0].spec.name)
  require_same_pictures([task.spec for task in tasks])
  visibility([task.spec for task in tasks], _directories(tasks))
  by_name = {task.spec.name: task for task in tasks}
  for spec in (task.spec for task in tasks):
    for name, digest in zip(spec.attends_to, spec.parent_digests, strict=False):
      if not digest or trees.is_traced(by_name[name].params):
        continue
      if digest != by_name[name].digest:
        raise TaskError(
          f"task {spec.name!r} was trained beside another task {name!r}: that "
          f"had digest {digest[:16]}, this one has "
          f"{by_name[name].digest[:16]}. Give the one it was trained with."
        )


def require_same_pictures(specs: Sequence[TaskSpec]) -> None:
  """Raises `TaskError` where tasks want pictures prepared differently."""
  for spec in specs[1:]:
    if spec.evaluation != specs[0].evaluation:
      raise TaskError(
        f"tasks {specs[0].name!r} and {spec.name!r} want pictures prepared "
        f"differently: {specs[0].evaluation} and {spec.evaluation}. One pass "
        "has one picture for all."
      )


def require_backbone(
  spec: TaskSpec, found: BackboneId, owner: str = ""
) -> None:
  """Raises `TaskError` where a task was trained on another backbone.

  Args:
    spec: of the task.
    found: the backbone that it shall run on.
    owner: the task that `found` is the backbone of, for the message.
  """
  if spec.backbone == found:
    return
  differences = [
    f"{field} {getattr(found, field)!r}, the task has "
    f"{getattr(spec.backbone, field)!r}"
    for field in ("fingerprint", "variant", "image_size", "gelu")
    if getattr(found, field) != getattr(spec.backbone, field)
  ]
  this = f"That of {owner!r}" if owner else "This one"
  raise TaskError(
    f"task {spec.name!r} belongs to another backbone. {this} has "
    f"{'; '.join(differences)}. Load the backbone that the task was trained on."
  )


def visibility(
  specs: Sequence[TaskSpec], directories: Mapping[str, str] | None = None
) -> np.ndarray:
  """Who reads whom: the lower right part of Table 1 of the paper.

  Args:
    specs: the tasks of one model, in any order.
    directories: {a task: where the run of one that reads it found it}, a hint
      for the message.

  Returns:
    bool (t, t): element (i, j) says that the token of task i attends to the
    token and to the memory of task j. The diagonal is True.

  Raises:
    TaskError: for a name that is there twice, a task that attends to itself or
      to one that is not there, or tasks that attend to each other in a circle.
  """
  names = [spec.name for spec in specs]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise TaskError(f"task names must differ; there twice: {twice}.")
  sees = np.eye(len(names), dtype=bool)
  for i, spec in enumerate(specs):
    for parent in spec.attends_to:
      if parent not in names or parent == spec.name:
        known = (directories or {}).get(parent)
        raise TaskError(
          f"task {spec.name!r} attends to {parent!r}, which is not among the "
          f"other tasks {[n for n in names if n != spec.name]}: give that too "
          "(to a command: one more --task=DIR"
          + (f"; the run of {spec.name!r} read it from " if known else "")
          + (f"{records.brief(known)})." if known else ").")
        )
      sees[i, names.index(parent)] = True
  _refuse_circles(names, sees)
  return sees


def _directories(tasks: Sequence[Task]) -> dict[str, str]:
  """{a task that others read: where their runs found it}, as far as they say.

  Provenance is free text: it may be shown, and is never opened.
  """
  found = {}
  for task in tasks:
    made = task.provenance.get("config")
    options = made.get("task") if isinstance(made, Mapping) else None
    paths = options.get("attends_to") if isinstance(options, Mapping) else None
    if isinstance(paths, list | tuple) and len(paths) == len(
      task.spec.attends_to
    ):
      pairs = zip(task.spec.attends_to, paths, strict=True)
      found |= {name: path for name, path in pairs if isinstance(path, str)}
  return found


def _refuse_circles(names: Sequence[str], sees: np.ndarray) -> None:
  """Takes away tasks that read no remaining one, until none is left."""
  left = list(range(len(names)))
  while left:
    free = [i for i in left if not any(sees[i, j] for j in left if j != i)]
    if not free:
      raise TaskError(
        f"tasks attend to each other in a circle: {[names[i] for i in left]}."
      )
    left = [i for i in left if i not in free]


class View(NamedTuple):
  """Who sees what, as the arrays that the task stream computes with.

  Attributes:
    cells: bool (t, m), the memory cells that a task really has; the others
      pad it to the longest.
    parents: int32 (t, p), indices of the other tasks that a task attends to,
      filled up with its own; p is the greatest number of them, 0 in
      concatenation.
    is_parent: bool (t, p), False where `parents` is filled up.
    memory_norm: bool (t,), whether a task's memory is layer-normed.
  """

  cells: np.ndarray
  parents: np.ndarray
  is_parent: np.ndarray
  memory_norm: np.ndarray


def view_of(
  specs: Sequence[TaskSpec], *, slots: int = 0, cells: int = 0, parents: int = 0
) -> View:
  """Returns the `View` of a set of tasks; raises as `visibility` does.

  Args:
    specs: the tasks.
    slots: t; more than there are tasks leaves slots empty.
    cells: m, at least.
    parents: p, at least.
  """
  others = visibility(specs) & ~np.eye(len(specs), dtype=bool)
  slots = max(slots, len(specs))
  cells = max(cells, *(spec.cells for spec in specs), 0)
  parents = max(parents, int(others.sum(axis=1).max(initial=0)))
  view = View(
    cells=np.zeros((slots, cells), bool),
    # Where there is no parent a task reads itself, masked: no neighbour can
    # enter, not even one that is not a number.
    parents=np.tile(np.arange(slots, dtype=np.int32)[:, None], (1, parents)),
    is_parent=np.zeros((slots, parents), bool),
    memory_norm=np.ones(slots, bool),
  )
  for i, spec in enumerate(specs):
    seen = np.flatnonzero(others[i])
    view.cells[i, : spec.cells] = True
    view.parents[i, : len(seen)] = seen
    view.is_parent[i, : len(seen)] = True
    view.memory_norm[i] = spec.memory_norm
  return view
