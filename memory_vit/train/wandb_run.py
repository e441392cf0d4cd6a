"""Weights & Biases: a run that gets the metrics of all trials.

All trials of a sweep are one run, with keys that begin with the name of a
trial: one process trains them side by side, and hundreds of runs would be
hundreds of connections.
"""

import contextlib
import errno
import functools
import importlib.util
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.config import Config, to_dict
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime import files, messages, processes
from memory_vit.runtime.messages import brief, escaped, shortened
from memory_vit.runtime.preemption import PREEMPTED, Interrupted
from memory_vit.train.metric_writers import Guard, Images, Scalars
from memory_vit.train.sweep import Trial

with epy.lazy_imports():  # of an extra, and slow
  import wandb

logger = logging.getLogger(__name__)

# In the working directory: the id by which a run resumes in W&B.
FILE = "wandb.json"
# Characters of a name that W&B accepts.
_LONGEST_NAME = 128
# Time for the network at the end of a run. A preempted process has 30 seconds
# on many clusters, of which the last steps and saving may take 10.
_FINISH_SECONDS = 10.0
# Up to the last "@" before a path, as passwords may contain "@"; up to the last
# one at all if ":" is followed by no port, but by a password that contains "/".
_USER = re.compile(
  r"([a-z][a-z0-9+.-]*://)"
  r"(?:[^/?#\s]*@|[^/?#\s:@]*:(?!\d+(?:[/?#\s]|$))(?:(?!://)\S)*@)",
  re.IGNORECASE,
)
# Outside of http "?" and "#" occur in names and patterns of files, few of which
# have a "=" soon after.
_QUERY = re.compile(
  r"(https?://[^?#\s]*)[?#]\S*"
  r"|([a-z][a-z0-9+.-]*://\S*?)\?[^/?#\s]*=\S*",
  re.IGNORECASE,
)


def require_installed(config: Config) -> None:
  """Raise `ConfigError` if W&B is configured but not installed."""
  project = config.wandb.project
  if project and importlib.util.find_spec("wandb") is None:
    raise ConfigError(
      f"config.wandb.project is {brief(project)}, but wandb is not installed: "
      f"leave the project out, or {messages.installation('wandb')}"
    )


class WandbRun:
  """A run of W&B, of all processes; process 0 writes it.

  `config` is replaced once backbone and data have settled it.
  """

  def __init__(
    self, config: Config, workdir: Path, trials: Sequence[Trial]
  ) -> None:
    """Prepare a run; nothing is opened before `begin`."""
    self.config = config
    self._workdir, self._trials = workdir.absolute(), trials
    self._outbox: files.Outbox | None = None
    self._name = str(workdir)[-_LONGEST_NAME:]
    self._prefixes = {t.name: f"{t.name}/" if t.varied else "" for t in trials}
    self._run: Any = None
    self._has_begun = False
    self.guard = Guard("Weights & Biases")

  def begin(self) -> None:
    """Begin or resume in W&B, and write the configuration of the run.

    A further call writes the configuration again. All processes must call.
    """
    if not self._has_begun:
      processes.on_process_0(self._open)
      self._has_begun = True
    values = {
      **without_secrets(to_dict(self.config)),
      "trials": {t.name: dict(t.varied) for t in self._trials if t.varied},
    }
    self._attempt(
      lambda: self._run.config.update(values, allow_val_change=True)
    )

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    if self._run:
      self._run.log({**self._keyed(scalars), "step": step})

  def write_images(self, step: int, images: Images) -> None:
    if self._run:
      keyed = {k: wandb.Image(v) for k, v in self._keyed(images).items()}
      self._run.log({**keyed, "step": step})

  def flush(self) -> None:
    """W&B sends by itself."""

  def close(self) -> None:
    """`finish` ends the run, with the exit status of the command."""

  def summarize(self, values: Mapping[str, Any]) -> None:
    """Set values of the whole run; None is left out."""
    known = {key: value for key, value in values.items() if value is not None}
    self._attempt(lambda: self._run.summary.update(known))

  def finish(self, status: int) -> None:
    """End the run, if it has begun, with the exit status of the command.

    Unsent data stays on the disk.
    """
    if status == PREEMPTED:  # otherwise W&B reports a failure
      self._attempt(lambda: self._run.mark_preempting())
    run, self._run = self._run, None
    if run is None:
      return
    try:
      # Also after a failure: W&B refuses an id that is in use.
      run.finish(exit_code=status)
    except TimeoutError:
      logger.warning(
        "Weights & Biases did not take all within %.0f s; the rest is kept: "
        "wandb sync %s",
        _FINISH_SECONDS,
        escaped(str(self._workdir / "wandb" / f"*run-*-{run.id}*")),
      )  # fmt: skip
    except Exception as error:
      _show_incomplete(run.id, error)
    if self._outbox:
      try:
        self._outbox.close()
      except Exception as error:  # of the network, of a full disk
        _show_incomplete(run.id, error)

  def _open(self) -> None:
    settings = self.config.wandb
    run_id = _id_of(self._workdir)
    mode: Any = settings.mode or None
    self._outbox = files.Outbox(self._workdir)
    try:
      run = wandb.init(
        project=settings.project,
        entity=settings.entity or None,
        name=settings.name or self._name,
        group=settings.group or None,
        mode=mode,
        id=run_id,
        resume="allow",
        # Otherwise it would reuse, and end, a run that the caller has open.
        reinit="create_new",
        dir=self._outbox.local,
        settings=wandb.Settings(
          # Otherwise it captures all output, progress bars too.
          console="off",
          silent=True,
          # The command line may contain passwords, in URLs.
          x_disable_meta=True,
          disable_git=True,
          save_code=False,
          x_save_requirements=False,
          finish_timeout=_FINISH_SECONDS,
          finish_timeout_raises=True,
        ),
      )
    except Exception as error:  # errors of W&B and of the network
      raise _cannot_begin(error) from error
    self._run = run
    # W&B's own steps only rise; passes of a sweep begin at 1 again.
    self._attempt(functools.partial(run.define_metric, "step"))
    self._attempt(functools.partial(run.define_metric, "*", step_metric="step"))
    place = self._workdir / "wandb" if run.offline else run.url
    logger.info("Weights & Biases: run %s, %s", run.id, place)

  def _keyed(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
      f"{self._prefixes[name]}{key}": value
      for name, own_values in values.items()
      for key, value in own_values.items()
    }

  def _attempt(self, action: Callable[[], Any]) -> None:
    if self._run is not None:
      self.guard.attempt(action)


@contextlib.contextmanager
def opened(
  config: Config, workdir: Path, trials: Sequence[Trial], resumes: bool = False
) -> Iterator[WandbRun | None]:
  """Open the run of a working directory; None if W&B is not configured.

  A resumed run resumes in W&B only after its saved state is accepted, by
  `WandbRun.begin`: a refused start leaves W&B unchanged. A run that the caller
  has open stays open. All processes must call.
  """
  if not config.wandb.project:
    yield None
    return
  run = WandbRun(config, workdir, trials)
  if not resumes:
    run.begin()
  status = 1
  try:
    yield run
    status = 0
  except Interrupted as error:
    status = error.status
    raise
  finally:
    run.finish(status)


def _show_incomplete(run_id: str, error: Exception) -> None:
  logger.warning(
    "what Weights & Biases has of run %s is not complete (%s)",
    run_id, messages.named(error),
  )  # fmt: skip


def _cannot_begin(error: Exception) -> TrainingError:
  reason = shortened(" ".join(str(error).split()))
  expected = (
    "expected a login (`wandb login`, or WANDB_API_KEY), config.wandb.mode "
    "'offline', or no config.wandb.project."
  )
  if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
    expected = "make room, and give the same command again."
  return TrainingError(
    f"Weights & Biases cannot begin ({type(error).__name__}: {reason}): "
    f"{expected}"
  )


def _id_of(workdir: Path) -> str:
  """The id of the run in W&B, saved in the working directory."""
  file = workdir / FILE
  if file.exists():
    return str(files.read_object(file, "id")["id"])
  made = secrets.token_hex(8)
  files.write_json(file, {"id": made})
  return made


def without_secrets(value: Any) -> Any:
  """Configuration values, with passwords and keys removed from URLs."""
  if isinstance(value, Mapping):
    return {key: without_secrets(one) for key, one in value.items()}
  if isinstance(value, list | tuple):
    return [without_secrets(one) for one in value]
  if not isinstance(value, str):
    return value
  return _QUERY.sub(r"\1\2", _USER.sub(r"\1", value))
