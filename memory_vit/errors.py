"""Exceptions of this package, for input that is at fault.

The commands print one of these without a traceback and exit with status 2.
Everything else that is raised is a bug, and keeps its traceback.
"""


class MemoryVitError(ValueError):
  """Bad input: the message says what was found, expected, and what to do."""


class BackboneError(MemoryVitError):
  """A backbone file cannot be used."""


class TaskError(MemoryVitError):
  """A task, or a set of tasks, cannot be used."""


class UnknownTask(TaskError):  # noqa: N818 what users catch reads well
  """A name that no task has; `known` are the names that there are."""

  # With a default, so that it can be pickled.
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
  """A model cannot be exported, or its export computes something else."""


class TrainingError(MemoryVitError):
  """Training cannot continue, for example after a loss that is not finite."""


class DivergedError(TrainingError):
  """No trial of a pack is finite; `lost` is {name: the step of noticing}."""

  def __init__(self, message: str, lost: dict[str, int]) -> None:
    super().__init__(message)
    self.lost = lost
