"""A set of tasks in slots, which never changes; a change makes another set."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from memory_vit.errors import TaskError, UnknownTask
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.model.task import BACKBONE, EvalPreprocessing, Task, TaskSpec
from memory_vit.runtime.messages import brief, name_list
from memory_vit.tasks import compose
from memory_vit.tasks.program import Program
from memory_vit.tasks.slots import SlotSizes, first_free, suits


@dataclasses.dataclass(frozen=True)
class TaskDescription:
  """What users are told of a task.

  Attributes:
    name: of the task.
    slot: number of its slot; that of a head is negative.
    classes: c, the number of its outputs: classes, labels or values.
    kind: what they mean, see `TaskKind`.
    class_names: c names, or empty if they are not known.
    cells: m, memory cells per layer.
    regime: how it was trained.
    parents: names of the tasks that it attends to.
    digest: SHA-256 of its parameters, see `Task.digest`.
    fingerprint: of its backbone.
  """

  name: str
  slot: int
  classes: int
  kind: TaskKind
  class_names: tuple[str, ...]
  cells: int
  regime: str
  parents: tuple[str, ...]
  digest: str
  fingerprint: str


@dataclasses.dataclass(frozen=True)
class Change:
  """What a change of the set of tasks did.

  Attributes:
    version: of the new set.
    names: of its tasks.
    digest: of the new set, see `TaskSet.digest`.
    grew: whether the set runs other programs than before: sizes of slots grew;
      the first or the last head, or task with a token, came or went; or a task
      with a pass of its own did. A warm predictor has compiled them before the
      new set answers.
    compiled: number of programs that were compiled.
  """

  version: int
  names: tuple[str, ...]
  digest: str
  grew: bool
  compiled: int


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class TaskSet:
  """The tasks that answer a request, each in a slot that it keeps.

  Attributes:
    version: 1 of the first set, one more with each change.
    by_slot: {slot: task}, in the order of the slots.
    sizes: that programs are compiled for.
    program: the tasks, ready to run.
    preprocessing: how images are prepared.
  """

  version: int
  by_slot: Mapping[int, Task]
  sizes: SlotSizes
  program: Program
  preprocessing: EvalPreprocessing

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the tasks, in the order of their slots."""
    return tuple(task.name for task in self.by_slot.values())

  @property
  def specs(self) -> tuple[TaskSpec, ...]:
    """Specs of the tasks, in the order of their slots."""
    return tuple(task.spec for task in self.by_slot.values())

  @functools.cached_property
  def slots(self) -> dict[str, int]:
    """{name: number of its slot}."""
    return {task.name: slot for slot, task in self.by_slot.items()}

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of preprocessing, and of names, parameters and outputs of tasks.

    Slots and version do not count. Two servers of one digest give the same
    answers if they run one backbone in one dtype on equal devices.
    """
    return _sha256(sorted(self.digests.items()), self.preprocessing)

  @functools.cached_property
  def digests(self) -> dict[str, str]:
    """{name: SHA-256 of a task's parameters and outputs, whatever its name}."""
    return {task.name: answer_digest(task) for task in self.by_slot.values()}

  def heads(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """See `Program.heads`."""
    heads = self.program.heads
    return {name: heads[name] for name in names}

  def spec(self, name: str) -> TaskSpec:
    """The spec of the task of this name, or `UnknownTask`."""
    self.require((name,))
    return self.by_slot[self.slots[name]].spec

  def kind(self, name: str) -> TaskKind:
    """The kind of a task; "backbone", the original outputs, are classes."""
    return CLASSES if name == BACKBONE else self.spec(name).kind

  def require(self, names: Iterable[str]) -> tuple[str, ...]:
    """These names, or `UnknownTask` if one is no task of the set."""
    return _require_names(names, self.names)

  def describe(self) -> tuple[TaskDescription, ...]:
    """What users are told of the tasks, in the order of their slots."""
    return tuple(
      TaskDescription(
        name=task.name,
        slot=slot,
        classes=task.spec.num_classes,
        kind=task.spec.kind,
        class_names=task.spec.class_names,
        cells=task.spec.cells,
        regime=task.spec.regime,
        parents=task.spec.attends_to,
        digest=task.digest,
        fingerprint=task.spec.backbone.fingerprint,
      )
      for slot, task in self.by_slot.items()
    )

  def __repr__(self) -> str:
    names = name_list(self.names) or "none"
    return f"TaskSet(version {self.version}, {len(self.names)} tasks: {names})"


def with_added(by_slot: Mapping[int, Task], task: Task) -> dict[int, Task]:
  """Put a task into the first free slot; `TaskError` if it does not fit."""
  if task.name in (other.name for other in by_slot.values()):
    raise TaskError(
      f"there is a task {task.name!r} already: expected another name, or "
      "replace it."
    )
  return fitting({**by_slot, first_free(task.spec, by_slot): task})


def with_replaced(
  by_slot: Mapping[int, Task], name: str, task: Task
) -> dict[int, Task]:
  """Put a task in the place of another one, under the name of that.

  It gets the same slot, unless only one of them is a head.
  """
  _require_names((name,), [other.name for other in by_slot.values()])
  slot = next(i for i, other in by_slot.items() if other.name == name)
  readers = [
    other.name for other in by_slot.values() if name in other.spec.attends_to
  ]
  # A reader that does not know its parent's digest would not notice.
  if readers and task.digest != by_slot[slot].digest:
    raise TaskError(
      f"task {name!r} cannot be replaced by other values: "
      f"{name_list(readers)} attend to it. Remove them first."
    )
  left = {i: other for i, other in by_slot.items() if i != slot}
  if not suits(slot, task.spec):
    slot = first_free(task.spec, left)
  return fitting({**left, slot: named(task, name)})


def without(by_slot: Mapping[int, Task], name: str) -> dict[int, Task]:
  """Empty a slot; `TaskError` if others attend to the task."""
  _require_names((name,), [other.name for other in by_slot.values()])
  compose.remove(list(by_slot.values()), name)  # raises if others attend to it
  return {i: task for i, task in by_slot.items() if task.name != name}


def answer_digest(task: Task) -> str:
  """See `TaskSet.digests`; `Task.digest` is of the parameters alone."""
  kind = dataclasses.astuple(task.spec.kind)
  return _sha256(task.digest, task.spec.class_names, kind)


def _sha256(*parts: object) -> str:
  return hashlib.sha256(repr(parts).encode()).hexdigest()


def named(task: Task, name: str) -> Task:
  spec = dataclasses.replace(task.spec, name=name)
  return dataclasses.replace(task, spec=spec)


def fitting(by_slot: Mapping[int, Task]) -> dict[int, Task]:
  """Sorted by slot; `TaskError` unless one pass answers all tasks there."""
  for slot, task in by_slot.items():
    if not suits(slot, task.spec):
      raise TaskError(
        f"task {task.name!r} ({task.spec.regime}) is in slot {slot}: expected "
        "-1, -2, ... for tasks of the regime 'head', and 0, 1, ... for others."
      )
  by_slot = dict(
    sorted(by_slot.items(), key=lambda item: (item[0] < 0, abs(item[0])))
  )
  compose.require_one_pass(list(by_slot.values()))
  return by_slot


def _require_names(
  names: Iterable[str], known: Sequence[str]
) -> tuple[str, ...]:
  """These names as a tuple: reading uses up a generator."""
  if isinstance(names, str):
    raise TaskError(
      f"tasks are the text {brief(names)}, expected a sequence of names."
    )
  if not isinstance(names, Iterable):
    raise TaskError(
      f"tasks are of type {type(names).__name__}, expected a sequence of names."
    )
  names = tuple(names)
  for name in names:
    if name not in known:
      raise UnknownTask(
        f"there is no task {brief(name)}: expected one of "
        f"{name_list(known, 32) or 'none, there is no task'}.",
        tuple(known),
      )
  return names
