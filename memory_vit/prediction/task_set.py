"""An immutable set of tasks in slots; a change makes a new set."""

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
  """Description of a task for users.

  Attributes:
    name: name of the task.
    slot: number of its slot; negative for a head.
    classes: c, the number of its outputs: classes, labels or values.
    kind: meaning of its outputs, see `TaskKind`.
    class_names: c names, or empty if they are not known.
    cells: m, the number of memory cells per layer.
    regime: how the task was trained.
    parents: names of the tasks that it attends to.
    digest: SHA-256 of its parameters, see `Task.digest`.
    fingerprint: fingerprint of its backbone.
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
  """Description of a change of the set of tasks.

  Attributes:
    version: version of the new set.
    names: names of its tasks.
    digest: digest of the new set, see `TaskSet.digest`.
    grew: whether the new set runs other programs. This is so if slots grew, if
      the set got its first or lost its last head (or task with a token), or if
      a task with its own pass was added or removed. A warm predictor compiles
      the programs before the new set answers.
    compiled: number of programs that were compiled.
  """

  version: int
  names: tuple[str, ...]
  digest: str
  grew: bool
  compiled: int


@dataclasses.dataclass(frozen=True, eq=False)  # == of arrays is ambiguous
class TaskSet:
  """The tasks that answer a request.

  A task keeps its slot in the sets that later changes make.

  Attributes:
    version: 1 for the first set, incremented by each change.
    by_slot: {slot: task}, in the order of the slots.
    sizes: sizes of slots for which the programs are compiled.
    program: the tasks, ready to run.
    preprocessing: how images are prepared for all tasks.
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
    """{task name: number of its slot}."""
    return {task.name: slot for slot, task in self.by_slot.items()}

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the preprocessing, and of the names and `digests` of tasks.

    It ignores slots and version. Two servers with equal digests give the same
    answers if they run the same backbone in one dtype on equal devices.
    """
    return _sha256(sorted(self.digests.items()), self.preprocessing)

  @functools.cached_property
  def digests(self) -> dict[str, str]:
    """{task name: SHA-256 of its parameters, class names and kind}."""
    return {task.name: answer_digest(task) for task in self.by_slot.values()}

  def heads(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the entries of `Program.heads` for these tasks."""
    heads = self.program.heads
    return {name: heads[name] for name in names}

  def spec(self, name: str) -> TaskSpec:
    """Return the spec of the named task, or raise `UnknownTask`."""
    self.require((name,))
    return self.by_slot[self.slots[name]].spec

  def kind(self, name: str) -> TaskKind:
    """Return the kind of a task, or `CLASSES` for the original head."""
    return CLASSES if name == BACKBONE else self.spec(name).kind

  def require(self, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names; raise `UnknownTask` if a name is not in the set."""
    return _require_names(names, self.names)

  def describe(self) -> tuple[TaskDescription, ...]:
    """Describe the tasks for users, in the order of their slots."""
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
  """Add a task in the first free slot; raise `TaskError` if it does not fit."""
  if task.name in (present.name for present in by_slot.values()):
    raise TaskError(
      f"there is a task {task.name!r} already: give the new task another name, "
      "or replace the old one."
    )
  return fitting({**by_slot, first_free(task.spec, by_slot): task})


def with_replaced(
  by_slot: Mapping[int, Task], name: str, task: Task
) -> dict[int, Task]:
  """Replace the task of this name by another task, which gets the name.

  The new task gets the same slot, unless only one of the two is a head.
  """
  _require_names((name,), [present.name for present in by_slot.values()])
  slot = next(i for i, old in by_slot.items() if old.name == name)
  readers = [
    child.name for child in by_slot.values() if name in child.spec.attends_to
  ]
  # Compare the digests here. `fitting` compares a parent only with the
  # `parent_digests` of its readers, and a reader may have no `parent_digests`.
  if readers and task.digest != by_slot[slot].digest:
    raise TaskError(
      f"task {name!r} cannot be replaced by a task with other parameters, "
      f"because other tasks attend to it: first remove {name_list(readers)}."
    )
  left = {i: present for i, present in by_slot.items() if i != slot}
  if not suits(slot, task.spec):
    slot = first_free(task.spec, left)
  return fitting({**left, slot: named(task, name)})


def without(by_slot: Mapping[int, Task], name: str) -> dict[int, Task]:
  """Remove a task; raise `TaskError` if other tasks attend to it."""
  _require_names((name,), [present.name for present in by_slot.values()])
  compose.remove(list(by_slot.values()), name)  # raises if tasks attend to it
  return {i: task for i, task in by_slot.items() if task.name != name}


def answer_digest(task: Task) -> str:
  """Return the digest of a task, as in `TaskSet.digests`."""
  kind = dataclasses.astuple(task.spec.kind)
  return _sha256(task.digest, task.spec.class_names, kind)


def _sha256(*parts: object) -> str:
  return hashlib.sha256(repr(parts).encode()).hexdigest()


def named(task: Task, name: str) -> Task:
  spec = dataclasses.replace(task.spec, name=name)
  return dataclasses.replace(task, spec=spec)


def fitting(by_slot: Mapping[int, Task]) -> dict[int, Task]:
  """Sort tasks by slot; raise `TaskError` unless one pass can run them all."""
  for slot, task in by_slot.items():
    if not suits(slot, task.spec):
      raise TaskError(
        f"task {task.name!r} ({task.spec.regime}) is in slot {slot}: expected "
        "-1, -2, ... for the regime 'head', and 0, 1, ... for other regimes."
      )
  by_slot = dict(
    sorted(by_slot.items(), key=lambda item: (item[0] < 0, abs(item[0])))
  )
  compose.require_one_pass(list(by_slot.values()))
  return by_slot


def _require_names(
  names: Iterable[str], known: Sequence[str]
) -> tuple[str, ...]:
  """Return names as a tuple; raise `UnknownTask` if `known` lacks a name."""
  if isinstance(names, str):
    raise TaskError(
      f"tasks is the string {brief(names)}, expected a sequence of names."
    )
  if not isinstance(names, Iterable):
    raise TaskError(
      f"tasks is of type {type(names).__name__}, expected a sequence of names."
    )
  names = tuple(names)  # a generator can be read only once
  for name in names:
    if name not in known:
      raise UnknownTask(
        f"there is no task {brief(name)}; the tasks are: "
        f"{name_list(known, 32) or 'none'}.",
        tuple(known),
      )
  return names
