"""Results of the trials of a study, read from its finished runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from studies.paper.runs import PaperRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyTrial:
  """A task that a `PaperRun` learned; without results if it diverged."""

  run: str
  regime: str
  data: str
  seed: int
  reads: bool  # whether it attends to another task
  learning_rate: float
  cells: int  # 0 in a regime without memory
  validation: float | None = None  # accuracy
  test: float | None = None  # accuracy; None also if not tested
  parameters: int | None = None  # trained ones, including the head
  task: str | None = None  # directory of the exported task
  examples: int | None = None  # of the test split
  name: str | None = None  # of the trial in its run


# {name of a finished run: its trials}.
Trials = Mapping[str, Sequence[StudyTrial]]


def trials_of(
  planned: PaperRun, ending: mv.RunResult, directory: Path
) -> list[StudyTrial]:
  """Results of all trials of a finished run, also of diverged ones."""
  if not ending.tasks:
    return diverged_trials(planned)
  # What was best before a trial diverged is no result of its learning rate.
  lost = ending.sweep.lost if ending.sweep else {}
  entries = {
    (result.learning_rate, result.cells): result
    for result in ending.tasks
    if result.name not in lost
  }
  if (
    not {*entries} <= {*planned.trials}
    or len(entries) + len(lost) != len(planned.trials)
  ):  # fmt: skip
    raise mv.MemoryVitError(
      f"{directory / 'result.json'} holds the trials {sorted(entries)} and "
      f"lost {sorted(lost)}: expected (learning rate, cells) "
      f"{planned.trials}. Move the run away to make it again."
    )
  trials = diverged_trials(planned)
  for i, trial in enumerate(trials):
    if result := entries.get((trial.learning_rate, trial.cells)):
      trials[i] = dataclasses.replace(
        trial,
        validation=result.val.accuracy,
        test=result.test.accuracy,
        parameters=result.trainable_params,
        task=str(directory / result.exported) if result.exported else None,
        examples=result.test.examples,
        name=result.name,
      )
  return trials


def diverged_trials(planned: PaperRun) -> list[StudyTrial]:
  """Trials without results, of a run that diverged or has no parent."""
  return [
    StudyTrial(
      run=planned.name,
      regime=planned.regime,
      data=planned.data,
      seed=planned.seed,
      reads=planned.reads is not None,
      learning_rate=rate,
      cells=cells,
    )
    for rate, cells in planned.trials
  ]
