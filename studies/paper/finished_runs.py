"""Runs that are trained once: finished ones are read, others are finished."""

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import Config, to_dict
from memory_vit.errors import ConfigError, DivergedError, TrainingError
from memory_vit.run_result import RunResult, read_result
from memory_vit.runtime import files, schema
from memory_vit.runtime.preemption import StopSignal
from memory_vit.train import resume, run
from studies.paper.trials import DIVERGED

logger = logging.getLogger(__name__)


def finish(
  config: Config, directory: Path, fingerprint: str, stop: StopSignal | None
) -> RunResult:
  """Train a run, or go on with it; a finished one is only read.

  A run all of whose trials diverge is finished as well: that is a result, is
  kept in `lost.json`, and has no tasks. Saved states of a finished run go.

  Args:
    config: of the run.
    directory: of the run.
    fingerprint: of the backbone that `config` names.
    stop: see `run.train_and_evaluate`.

  Raises:
    ConfigError: where another configuration has finished the run there.
    TrainingError: where its result is gone at once.
  """
  if ending := ending_of(directory):
    if lines := _differences(config, fingerprint, directory, ending):
      raise ConfigError(
        f"the run in {directory} was finished with another configuration. Give "
        "that one, or another --workdir.\n  " + "\n  ".join(lines)
      )
    return ending
  logger.info("run %s", directory)
  began = time.perf_counter()
  try:
    run.train_and_evaluate(config, directory, stop)
  except DivergedError as error:
    logger.warning("%s", error)
    diverged = {
      "backbone": {"fingerprint": fingerprint},
      "message": str(error),
      "wall_seconds": round(time.perf_counter() - began, 2),
    }
    files.write_json(directory / DIVERGED, diverged)
  remove_checkpoints(directory)
  ending = ending_of(directory)
  if ending is None:  # somebody else removed it
    raise TrainingError(
      f"{directory} does not hold the result of its run any more. Give the "
      "same command again."
    )
  return ending


def find(config: Config, directory: Path, fingerprint: str) -> RunResult | None:
  """Read a run of this configuration; None where it is not finished."""
  ending = ending_of(directory)
  if not ending or _differences(config, fingerprint, directory, ending):
    return None
  return ending


def ending_of(directory: Path) -> RunResult | None:
  """Read how a run ended, on all processes; None of an unfinished one."""
  return read_result(directory, DIVERGED) or read_result(directory)


def remove_checkpoints(directory: Path) -> None:
  """Remove the saved states of a finished run.

  With its two states, each with the best so far, a run of the regime `full`
  holds a backbone many times over; its result and its exported task stay.
  """
  states = directory / "checkpoints"
  if jax.process_index() == 0 and states.exists():
    shutil.rmtree(states)


def _differences(
  config: Config, fingerprint: str, directory: Path, ending: RunResult
) -> list[str]:
  """List the options that matter and differ from those of a finished run."""
  made_by = files.read_object(directory / "config.json")
  # An option that is newer than the run was as it now is by default.
  defaults = resume.what_matters(to_dict(Config()))
  found, now = (
    {
      **defaults,
      **resume.what_matters(values),
      **_epochs(values),
      "backbone": mark,
    }
    for values, mark in (
      (made_by, ending.backbone.fingerprint),
      (to_dict(config), fingerprint),
    )
  )
  return schema.differences(found, now)


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
  """Length in epochs, where it is given so, in place of steps.

  How many steps these are the run itself finds out, in its own data.
  """
  epochs = values.get("epochs")  # earlier versions had no such option
  return {"config.total_steps": f"{epochs} epochs"} if epochs else {}
