"""A run of Weights & Biases that gets what TensorBoard gets.

All trials of a sweep are one run, whose keys begin with the name of a trial:
they are trained side by side by one process, and hundreds of runs would be as
many connections. What was varied stands in the run's configuration. The runs of
a study follow one another, and each is a run of its own.
"""

import contextlib
import errno
import functools
import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epy

from memory_vit.config import Config, to_dict
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime import files, processes
from memory_vit.runtime.messages import brief, escaped, first_line
from memory_vit.runtime.preemption import PREEMPTED, Interrupted
from memory_vit.train.sweep import Trial

with epy.lazy_imports():  # of an extra, and slow
  import wandb

logger = logging.getLogger(__name__)

# In the working directory: by what a run that goes on finds its own.
FILE = "wandb.json"
# Characters of a name that W&B takes.
_LONGEST_NAME = 128
# How long the end of a run waits for the network. W&B is told at the beginning,
# when nobody knows whether the run will be preempted: many clusters give it 30
# seconds then, of which the steps in flight and a save may take 10.
_FINISH_SECONDS = 10.0
# Of a full disk, and of a full quota.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# W&B's own; "run" and "dryrun" are old names of "online" and "offline".
_MODES = ("online", "offline", "shared", "disabled", "run", "dryrun")
_WITH_LOGIN = ("online", "shared", "run")
# Up to the last "@" before a path, as passwords may hold others; up to the last
# one at all where what follows ":" is no port, but a password that holds "/".
_USER = re.compile(
  r"([a-z][a-z0-9+.-]*://)"
  r"(?:[^/?#\s]*@|[^/?#\s:@]*:(?!\d+(?:[/?#\s]|$))(?:(?!://)\S)*@)",
  re.IGNORECASE,
)
# Elsewhere than in http "?" and "#" stand in names and patterns of files, of
# which few have a "=" soon after.
_QUERY = re.compile(
  r"(https?://[^?#\s]*)[?#]\S*"
  r"|([a-z][a-z0-9+.-]*://\S*?)\?[^/?#\s]*=\S*",
  re.IGNORECASE,
)

Scalars = Mapping[str, Mapping[str, float]]
Images = Mapping[str, Mapping[str, np.ndarray]]


def require_installed(config: Config) -> None:
  """Raise `ConfigError` where W&B is asked for and is not there."""
  project = config.wandb.project
  if project and importlib.util.find_spec("wandb") is None:
    raise ConfigError(
      f"config.wandb.project is {brief(project)}, and wandb is not installed: "
      "pip install 'memory_vit[wandb]', or leave the project out."
    )


def require_login(config: Config) -> None:
  """Refuse what W&B would refuse, before the first of many runs.

  All processes must call.

  Raises:
    ConfigError: where W&B is asked for and is not there, or WANDB_MODE is none
      of its modes.
    TrainingError: where it needs a login, and there is none.
  """
  require_installed(config)
  if config.wandb.project:
    processes.on_process_0(lambda: _log_in(config))


def _log_in(config: Config) -> None:
  mode = _mode(config)
  # Where nothing says a mode, W&B looks whether `wandb offline` was called.
  if mode is not None and mode not in _WITH_LOGIN:
    return
  try:
    wandb.login(verify=False)
  except Exception as error:
    raise _cannot_begin(error) from error


def _mode(config: Config) -> str | None:
  """The mode that `wandb.init` is given; None where its own settings count.

  Raises:
    ConfigError: where WANDB_MODE is none of W&B's modes. W&B refuses that also
      where the configuration names a mode.
  """
  found = os.environ.get("WANDB_MODE")
  if found is not None and found not in _MODES:
    raise ConfigError(
      f"WANDB_MODE is {brief(found)} in the environment: expected one of "
      f"{', '.join(_MODES)}. Set one of them, or unset WANDB_MODE."
    )
  return config.wandb.mode or found


class WandbRun:
  """A run of W&B, of all processes; the first one writes it.

  It is given up, with a warning, once it cannot be written.
  """

  def __init__(self, workdir: Path, trials: Sequence[Trial]) -> None:
    """Prepare a run; W&B hears of it in `begin`.

    Args:
      workdir: of the run.
      trials: that it trains.
    """
    self._workdir, self._trials = workdir.absolute(), trials
    self._name = str(workdir)[-_LONGEST_NAME:]
    self._prefixes = {t.name: f"{t.name}/" if t.varied else "" for t in trials}
    self._run: Any = None
    self._has_begun = self._failed = False

  def begin(self, config: Config) -> None:
    """Begin in W&B, or go on, and say how the run is configured.

    A further call says it anew: backbone and data settle some of it. All
    processes must call.

    Raises:
      TrainingError: where it cannot be begun.
    """
    if not self._has_begun:
      processes.on_process_0(lambda: self._open(config))
      self._has_begun = True
    values = {
      **without_secrets(to_dict(config)),
      "trials": {t.name: dict(t.varied) for t in self._trials if t.varied},
    }
    self._try(lambda: self._run.config.update(values, allow_val_change=True))

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    """Write {name: {key: value}} of a step."""
    self._log(step, self._keyed(scalars))

  def write_images(self, step: int, images: Images) -> None:
    """Write {name: {key: uint8 (height, width, 3)}} of a step."""
    keyed = self._keyed(images)
    self._try(
      lambda: self._run.log(
        {**{k: wandb.Image(v) for k, v in keyed.items()}, "step": step}
      )
    )

  def summarize(self, values: Mapping[str, Any]) -> None:
    """Set values that stand for the whole run; None is left out."""
    known = {key: value for key, value in values.items() if value is not None}
    self._try(lambda: self._run.summary.update(known))

  def close(self, status: int) -> None:
    """End the run, if it has begun, with the exit status of the command.

    What could not be sent in time stays on the disk.
    """
    if status == PREEMPTED:  # else W&B would take the status for a failure
      self._try(lambda: self._run.mark_preempting())
    run, self._run = self._run, None
    if run is None:
      return
    try:
      # Also where it failed: W&B refuses an id that is in use.
      run.finish(exit_code=status)
    except TimeoutError:
      logger.warning(
        "Weights & Biases did not take all within %.0f s; the rest is kept: "
        "wandb sync %s",
        _FINISH_SECONDS,
        escaped(str(self._workdir / "wandb" / f"*run-*-{run.id}*")),
      )  # fmt: skip
    except Exception as error:
      self._give_up(error)
    if self._failed:
      logger.warning("what Weights & Biases has of run %s is not complete",
                     run.id)  # fmt: skip

  def _open(self, config: Config) -> None:
    """Open the run, by one process."""
    settings, run_id = config.wandb, _id_of(config, self._workdir)
    mode: Any = _mode(config)
    try:
      run = wandb.init(
        project=settings.project,
        entity=settings.entity or None,
        name=settings.name or self._name,
        group=settings.group or None,
        mode=mode,
        id=run_id,
        resume="allow",
        # Else it would be the one that the caller has open, and end that.
        reinit="create_new",
        dir=self._workdir,
        settings=wandb.Settings(
          # It would catch what is printed, bars too; and say much of its own.
          console="off",
          silent=True,
          # The command line may hold passwords, as addresses do.
          x_disable_meta=True,
          disable_git=True,
          save_code=False,
          x_save_requirements=False,
          finish_timeout=_FINISH_SECONDS,
          finish_timeout_raises=True,
        ),
      )
    except Exception as error:  # W&B has several, and the network others
      raise _cannot_begin(error) from error
    self._run = run
    # W&B's own steps only rise; passes of a sweep begin at 1 again.
    self._try(functools.partial(run.define_metric, "step"))
    self._try(functools.partial(run.define_metric, "*", step_metric="step"))
    where = self._workdir / "wandb" if run.offline else run.url
    if run.disabled:
      where = "disabled by WANDB_MODE or `wandb disabled`"
    logger.info("Weights & Biases: run %s, %s", run.id, where)

  def _keyed(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All values of all names, under one key each."""
    return {
      f"{self._prefixes[name]}{key}": value
      for name, own_values in values.items()
      for key, value in own_values.items()
    }

  def _log(self, step: int, values: Mapping[str, Any]) -> None:
    self._try(lambda: self._run.log({**values, "step": step}))

  def _try(self, action: Callable[[], Any]) -> None:
    if self._run is None or self._failed:
      return
    try:
      action()
    except Exception as error:  # of the network, of a full disk, of W&B
      self._give_up(error)

  def _give_up(self, error: Exception) -> None:
    if not self._failed:
      logger.warning(
        "Weights & Biases cannot be written, training goes on without (%s: %s)",
        type(error).__name__, first_line(error),
      )  # fmt: skip
    self._failed = True


@contextlib.contextmanager
def opened(
  config: Config,
  workdir: Path,
  trials: Sequence[Trial],
  goes_on: bool = False,
) -> Iterator[WandbRun | None]:
  """Open the run of a working directory; None where none is asked for.

  One that goes on in the same directory goes on in W&B as well, once it calls
  `WandbRun.begin`: a start that is refused before leaves what W&B has as it
  was. One that the caller has open stays as it is. All processes must call.

  Args:
    config: of the run.
    workdir: of the run.
    trials: that it trains.
    goes_on: whether an earlier process has saved or finished it.

  Raises:
    TrainingError: where it cannot be begun: nothing is computed yet.
  """
  if not config.wandb.project:
    yield None
    return
  run = WandbRun(workdir, trials)
  if not goes_on:
    run.begin(config)
  status = 1
  try:
    yield run
    status = 0
  except Interrupted as error:
    status = error.status
    raise
  finally:
    run.close(status)


def _cannot_begin(error: Exception) -> TrainingError:
  """Say what W&B lacks, or where there is no room."""
  expected = (
    "expected a login (`wandb login`, or WANDB_API_KEY), config.wandb.mode "
    "'offline', or no config.wandb.project."
  )
  if getattr(error, "errno", None) in _NO_ROOM:
    expected = "make room, and give the same command again."
  return TrainingError(
    f"Weights & Biases cannot begin ({type(error).__name__}: "
    f"{first_line(error)}): {expected}"
  )


def _id_of(config: Config, workdir: Path) -> str:
  """The id of the run in W&B: the one before, or a new one that is noted."""
  file = workdir / FILE
  place = {"project": config.wandb.project, "entity": config.wandb.entity}
  if file.exists():
    found = files.read_object(file, "id", "project", "entity")
    if place == {key: found[key] for key in place}:
      return str(found["id"])
  made = secrets.token_hex(8)
  files.write_json(file, {"id": made, **place})
  return made


def without_secrets(value: Any) -> Any:
  """Values of a configuration without passwords and keys in addresses."""
  if isinstance(value, Mapping):
    return {key: without_secrets(one) for key, one in value.items()}
  if isinstance(value, list | tuple):
    return [without_secrets(one) for one in value]
  if not isinstance(value, str):
    return value
  return _QUERY.sub(r"\1\2", _USER.sub(r"\1", value))
