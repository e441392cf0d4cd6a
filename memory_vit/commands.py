"""What the commands share."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from memory_vit import compose, manifest, records
from memory_vit.backbone import Backbone
from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.escaping import escaped
from memory_vit.interrupt import Interrupted
from memory_vit.pretrained import load_backbone
from memory_vit.tasks import Task, require_backbone

# Of a message: names in it are foreign.
_MOST_SAID = 2_000


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
    text: lines; names that strangers chose have been `escaped` before they
      became a part of one, since line breaks are printed as they are.
    file: stdout by default.
  """
  file = file or sys.stdout
  encoding = getattr(file, "encoding", None) or "utf-8"
  text = "\n".join(map(escaped, text.split("\n")))
  encoded = text.encode(encoding, "backslashreplace")
  print(encoded.decode(encoding), file=file, flush=True)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """The flags of a command, for `app.run`.

  Raises:
    ConfigError: for what absl, or the configuration, does not know.
  """
  from absl import flags  # Not all commands have such flags.

  try:
    return flags.FLAGS(argv)
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
    show(records.shortened(f"error: {error}", _MOST_SAID), sys.stderr)
    return 2
  except Interrupted as stopped:
    show(f"{stopped} The same command goes on.", sys.stderr)
    return stopped.status
  except BrokenPipeError:
    # The interpreter flushes stdout once more, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
