"""Exceptions of this package, for bad input.

The commands print these exceptions without a traceback and exit with status 2.
Any other exception is a bug, and keeps its traceback.
"""


class MemoryVitError(ValueError):
  """Bad input; the message says what is wrong, what is expected, what to do."""


class BackboneError(MemoryVitError):
  """A backbone file cannot be used."""


class TaskError(MemoryVitError):
  """A task, or a set of tasks, cannot be used."""


class UnknownTask(TaskError):  # noqa: N818 reads well after `except`
  """No task has the requested name; `known` holds the names of all tasks."""

  # `known` has a default, because unpickling passes only the message.
  def __init__(self, message: str, known: tuple[str, ...] = ()) -> None:
    super().__init__(message)
    self.known = known


class DataError(MemoryVitError):
  """A data set cannot be used."""


class BrokenDataError(DataError):
  """Files, images or labels of a data set are broken."""


class ConfigError(MemoryVitError):
  """A configuration cannot be used."""


class ExportError(MemoryVitError):
  """A model cannot be exported, or its export returns different outputs."""


class TrainingError(MemoryVitError):
  """Training cannot continue, for example after a loss that is not finite."""


class DivergedError(TrainingError):
  """All trials of a pack diverged; `lost` is {name: step of detection}."""

  def __init__(self, message: str, lost: dict[str, int]) -> None:
    super().__init__(message)
    self.lost = lost
