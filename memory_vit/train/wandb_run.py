"""Send the metrics of all trials of a run to Weights & Biases (W&B).

All trials of a sweep are one W&B run, with keys that begin with the name of the
trial: one process trains them side by side, and hundreds of W&B runs would need
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

with epy.lazy_imports():  # wandb is optional, and slow to import
  import wandb

logger = logging.getLogger(__name__)

# File in the working directory that holds the id of the run in W&B.
FILE = "wandb.json"
# Maximum number of characters that W&B accepts in a name.
_LONGEST_NAME = 128
# Maximum time for sending data at the end of a run. Many clusters give a
# preempted process 30 seconds, of which the last steps and saving may take 10.
_FINISH_SECONDS = 10.0
# User and password of a URL. There are two cases. If an "@" comes before the
# first "/", match up to the last "@" before that "/". Otherwise, the password
# may contain "/": after "user:", match up to the last "@" of the URL. Match
# nothing if the text after the ":" is a port, as in "http://host:80/a@b".
_USER = re.compile(
  r"([a-z][a-z0-9+.-]*://)"
  r"(?:[^/?#\s]*@|[^/?#\s:@]*:(?!\d+(?:[/?#\s]|$))(?:(?!://)\S)*@)",
  re.IGNORECASE,
)
# Query or fragment of an http URL, or query of a URL of another scheme, such as
# gs://. Outside http, file names may contain "?" and "#", so a "?" begins a
# query only if a "=" comes before the next "/", "?" or "#".
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
  """A W&B run: all processes call its methods, and process 0 writes.

  Once backbone and data are open, the caller sets `config` to its final value.
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
    """Begin or resume the run in W&B, and write its configuration.

    Later calls only write the configuration. All processes must call.
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
    """Do nothing, because W&B sends data by itself."""

  def close(self) -> None:
    """Do nothing: `finish` ends the run, with the command's exit status."""

  def summarize(self, values: Mapping[str, Any]) -> None:
    """Set summary values of the whole run, except values that are None."""
    known = {key: value for key, value in values.items() if value is not None}
    self._attempt(lambda: self._run.summary.update(known))

  def finish(self, status: int) -> None:
    """End the run, if it has begun, with the exit status of the command.

    Unsent data stays on the disk.
    """
    if status == PREEMPTED:  # W&B must not report a failure
      self._attempt(lambda: self._run.mark_preempting())
    run, self._run = self._run, None
    if run is None:
      return
    try:
      # End the run even after a failure: W&B cannot resume a run that is open.
      run.finish(exit_code=status)
    except TimeoutError:
      logger.warning(
        "Weights & Biases did not receive all data within %.0f s; to send the "
        "rest: wandb sync %s",
        _FINISH_SECONDS,
        escaped(str(self._workdir / "wandb" / f"*run-*-{run.id}*")),
      )  # fmt: skip
    except Exception as error:
      _show_incomplete(run.id, error)
    if self._outbox:
      try:
        self._outbox.close()
      except Exception as error:  # network errors, full disks
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
        # By default, W&B would reuse or finish a run that the caller has open.
        reinit="create_new",
        dir=self._outbox.local,
        settings=wandb.Settings(
          # Keep W&B from capturing all output, including progress bars.
          console="off",
          silent=True,
          # Do not send the command line: its URLs may contain passwords.
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
    # Plot over a metric "step": W&B's own step may only rise, but each pass of
    # a sweep begins at step 1.
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
  """Yield the W&B run of a working directory; None if W&B is not configured.

  A resumed run resumes in W&B only once `WandbRun.begin` is called, after its
  saved state was accepted: a refused start leaves W&B unchanged. Another W&B
  run that the caller has open stays open. All processes must call.
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
    "Weights & Biases did not receive all data of run %s (%s)",
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
  """Return the run's id in W&B; the first call makes and saves an id."""
  file = workdir / FILE
  if file.exists():
    return str(files.read_object(file, "id")["id"])
  run_id = secrets.token_hex(8)
  files.write_json(file, {"id": run_id})
  return run_id


def without_secrets(value: Any) -> Any:
  """Remove passwords and keys from the URLs in configuration values."""
  if isinstance(value, Mapping):
    return {key: without_secrets(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [without_secrets(item) for item in value]
  if not isinstance(value, str):
    return value
  return _QUERY.sub(r"\1\2", _USER.sub(r"\1", value))
