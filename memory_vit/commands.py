"""What the commands share."""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from memory_vit import compose, manifest
from memory_vit.backbone import Backbone
from memory_vit.config import Config
from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.interrupt import Interrupted
from memory_vit.pretrained import load_backbone
from memory_vit.tasks import Task, require_backbone

TRUST_HELP = (
  "Run the code that the files of a data set name: classes of features that "
  "are not those of TFDS, and TFDS names with a namespace."
)
# Class names come from files, and a terminal obeys these. Lines are ours.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def load_model(
  backbone: str, tasks: Sequence[str], dtype: str
) -> tuple[Backbone, tuple[Task, ...]]:
  """Loads a backbone as its tasks want it, and the tasks.

  Args:
    backbone: as `load_backbone`.
    tasks: directories of tasks, or that hold some.
    dtype: of the computation.

  Raises:
    MemoryVitError: for what cannot be read, or does not fit together.
  """
  found = [path for given in tasks for path in compose.task_directories(given)]
  first, *others = [manifest.read(path).spec for path in found]
  for other in others:  # before the one that they do not share is loaded
    require_backbone(other, first.backbone, first.name)
  wanted = first.backbone
  loaded = load_backbone(
    backbone, image_size=wanted.image_size, dtype=dtype, gelu=wanted.gelu
  )
  return loaded, compose.load_tasks(found, loaded)


def show(text: str, file: TextIO | None = None) -> None:
  """Prints at once; what the terminal cannot encode, or obeys, is escaped.

  Args:
    text: may hold any class names, and file names that are not UTF-8.
    file: stdout by default.
  """
  file = file or sys.stdout
  encoding = getattr(file, "encoding", None) or "utf-8"
  text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
  encoded = text.encode(encoding, "backslashreplace")
  print(encoded.decode(encoding), file=file, flush=True)


def leave_current_directory() -> None:
  """Takes the current directory off `sys.path`, where `python -m` has put it.

  Beside downloads and files of others no module may be found by its name. This
  package finds its own through its `__path__`. What PYTHONPATH names stays.
  """
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  runs_this_package = spec and spec.name.startswith("memory_vit.")
  if not runs_this_package or sys.flags.safe_path:
    return
  if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]


def define_trust_flag() -> Callable[[Config], Config]:
  """Declares --trust_data_code; returns what puts it into a configuration."""
  from absl import flags  # Not all commands have such flags.

  flags.disclaim_key_flags()  # --help of the command shows it
  given = flags.DEFINE_bool("trust_data_code", False, TRUST_HELP)
  return lambda config: dataclasses.replace(
    config, trust_data_code=given.value or config.trust_data_code
  )


def parse_flags(argv: Sequence[str]) -> list[str]:
  """The flags of a command, for `app.run`.

  A configuration file is executed here, and may import others beside it; from
  then on the current directory is off `sys.path`.

  Raises:
    ConfigError: for what absl, or the configuration, does not know.
  """
  from absl import flags  # Not all commands have such flags.

  try:
    left = flags.FLAGS(argv)
    leave_current_directory()
    return left
  # Of an option that is not there the configuration raises an AttributeError.
  except (flags.Error, AttributeError) as error:
    problem = " ".join(str(error).split())
    raise ConfigError(f"the command line: {problem}") from error


def run_command(command: Callable[[], int]) -> int:
  """Runs the body of a command.

  Args:
    command: returns an exit status, or exits with one.

  Returns:
    The exit status: 2 after a `MemoryVitError`, whose message is on stderr; 0
    where stdout was closed before the end, as by `| head`; that of
    `Interrupted`.
  """
  try:
    return command()
  except MemoryVitError as error:
    show(f"error: {error}", sys.stderr)
    return 2
  except Interrupted as stopped:
    show(f"{stopped} The same command goes on.", sys.stderr)
    return stopped.status
  except BrokenPipeError:
    # The interpreter flushes stdout once more, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
