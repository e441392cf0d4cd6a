"""A run of Weights & Biases that gets what TensorBoard gets.

All trials of a sweep are one run, whose keys begin with the name of a trial:
they are trained side by side by one process, and hundreds of runs would be as
many connections. What was varied stands in the run's configuration.
"""

import contextlib
import functools
import importlib.util
import logging
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
from memory_vit.training.sweep import Trial

with epy.lazy_imports():  # of an extra, and slow
  import wandb

logger = logging.getLogger(__name__)

# In the working directory: by what a run that goes on finds its own.
FILE = "wandb.json"
# Characters of a name that W&B takes.
_LONGEST_NAME = 128
# How long the end of a run waits for the network: less than what is left to a
# process that has got SIGTERM, 30 seconds in many clusters.
_FINISH_SECONDS = 20.0

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


class WandbRun:
  """A run of W&B; it is given up, with a warning, once it cannot be written."""

  def __init__(
    self, run: Any, prefixes: Mapping[str, str], folder: Path
  ) -> None:
    """Write to a run.

    Args:
      run: that `wandb.init` has made.
      prefixes: {name: what its keys begin with}.
      folder: where W&B keeps what is not sent yet.
    """
    self._run, self._prefixes, self._folder = run, prefixes, folder
    # W&B's own steps only rise; passes of a sweep begin at 1 again.
    self._try(functools.partial(run.define_metric, "step"))
    self._try(functools.partial(run.define_metric, "*", step_metric="step"))

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
    """Set numbers that stand for the whole run; None is left out."""
    known = {key: value for key, value in values.items() if value is not None}
    self._try(lambda: self._run.summary.update(known))

  def configure(self, config: Config) -> None:
    """Set the configuration anew: backbone and data have settled the rest."""
    values = without_secrets(to_dict(config))
    self._try(lambda: self._run.config.update(values, allow_val_change=True))

  def close(self, status: int) -> None:
    """End the run; `status` is 0 where all went well.

    What could not be sent in time stays on the disk.
    """
    try:
      self._try(lambda: self._finish(status))
    finally:
      self._run = None

  def _finish(self, status: int) -> None:
    try:
      self._run.finish(exit_code=status)
    except TimeoutError:
      logger.warning(
        "Weights & Biases did not take all within %.0f s; the rest is kept: "
        "wandb sync %s",
        _FINISH_SECONDS, escaped(str(self._folder / f"*run-*-{self._run.id}")),
      )  # fmt: skip

  def _keyed(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All values of all names, under one key each."""
    return {
      f"{self._prefixes[name]}{key}": value
      for name, some in values.items()
      for key, value in some.items()
    }

  def _log(self, step: int, values: Mapping[str, Any]) -> None:
    self._try(lambda: self._run.log({**values, "step": step}))

  def _try(self, action: Callable[[], Any]) -> None:
    if self._run is None:
      return
    try:
      action()
    except Exception as error:  # of the network, of a full disk, of W&B
      self._run = None
      logger.warning(
        "Weights & Biases cannot be written, training goes on without (%s: %s)",
        type(error).__name__, first_line(error),
      )  # fmt: skip


@contextlib.contextmanager
def opened(
  config: Config, workdir: Path, trials: Sequence[Trial]
) -> Iterator[WandbRun | None]:
  """Open the run of a working directory, by one process; None without one.

  A run that goes on in the same directory goes on in W&B as well. One that the
  caller has open stays as it is.

  Raises:
    TrainingError: where it cannot be begun: nothing is computed yet.
  """
  made: list[Any] = []
  if config.wandb.project:
    processes.on_process_0(lambda: made.append(_init(config, workdir, trials)))
  if not made:
    yield None
    return
  prefixes = {t.name: f"{t.name}/" if t.varied else "" for t in trials}
  run, status = WandbRun(made[0], prefixes, workdir.absolute() / "wandb"), 1
  try:
    yield run
    status = 0
  finally:
    run.close(status)


def _init(config: Config, workdir: Path, trials: Sequence[Trial]) -> Any:
  settings, directory = config.wandb, workdir.absolute()
  mode: Any = settings.mode
  try:
    run = wandb.init(
      project=settings.project,
      entity=settings.entity or None,
      name=settings.name or str(workdir)[-_LONGEST_NAME:],
      group=settings.group or None,
      mode=mode,
      id=_id_of(config, workdir),
      resume="allow",
      # Else it would be the one that the caller has open, and end that.
      reinit="create_new",
      dir=directory,
      config={
        **without_secrets(to_dict(config)),
        "trials": {t.name: dict(t.varied) for t in trials if t.varied},
      },
      settings=wandb.Settings(
        # It would catch what is printed, bars too; and say much of its own.
        console="off",
        silent=True,
        # The command line may hold passwords, as addresses do.
        x_disable_meta=True,
        disable_git=True,
        save_code=False,
        **_time_limit(),
      ),
    )
  except Exception as error:  # W&B has several, and the network others
    raise TrainingError(
      f"Weights & Biases cannot begin ({type(error).__name__}: "
      f"{first_line(error)}): expected a login (`wandb login`, or "
      "WANDB_API_KEY), config.wandb.mode 'offline', or no config.wandb.project."
    ) from error
  where = run.url if settings.mode == "online" else directory / "wandb"
  logger.info("Weights & Biases: run %s, %s", run.id, where)
  return run


def _time_limit() -> dict[str, Any]:
  """Settings by which the end of a run does not wait for ever."""
  if "finish_timeout" in wandb.Settings.model_fields:
    return {
      "finish_timeout": _FINISH_SECONDS, "finish_timeout_raises": True,
    }  # fmt: skip
  logger.info(
    "Weights & Biases %s waits for the network at the end, however long that "
    "takes; newer ones stop after %.0f s",
    wandb.__version__, _FINISH_SECONDS,
  )  # fmt: skip
  return {}


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
  if not isinstance(value, str) or "://" not in value:
    return value
  scheme, _, rest = value.partition("://")
  place = rest.partition("?")[0].partition("#")[0]
  host, slash, path = place.partition("/")
  return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
