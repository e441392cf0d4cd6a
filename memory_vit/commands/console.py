"""Output, exit status and errors of a command."""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.runtime import dtypes, messages, paths, progress_bar
from memory_vit.runtime.messages import escaped

_T = TypeVar("_T")
# Exit status after Ctrl-C.
_STOPPED = 130
# Level 2 hides TensorFlow's notes on its build and its warnings, of which it
# writes several for each image that is skipped, but no errors. oneDNN is off to
# hide its note: it does not change our images (tested).
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
# Source locations of operations take a fifth of the time of tracing, and Keras,
# which nothing here uses, two fifths of that of importing TensorFlow.
_QUICK = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0", "TF_USE_LEGACY_KERAS": "1"}
# Rare garbage collection: importing and tracing make many objects, almost all
# in use. It saves a tenth of the time of a prediction.
_COLLECTED = (50_000, 20, 20)
# Modules of the extra `train` of pyproject.toml.
TRAIN_MODULES = frozenset({
  "array_record", "clu", "google_crc32c", "importlib_resources", "matplotlib",
  "ml_collections", "optax", "psutil", "sklearn", "tensorboard", "tensorflow",
  "tensorflow_datasets",
})  # fmt: skip
# Modules of the extra `serve`, and those that they need.
SERVE_MODULES = frozenset({
  "fastapi", "h11", "multipart", "prometheus_client", "pydantic",
  "python_multipart", "starlette", "uvicorn",
})  # fmt: skip
_EXTRAS: dict[messages.Extra, frozenset[str]] = {
  "train": TRAIN_MODULES,
  "serve": SERVE_MODULES,
}
# Characters of an error message, which may quote untrusted names.
_MOST_SAID = 2_000


def show(text: str, file: TextIO | None = None) -> None:
  """Print at once.

  Control characters, and those that the terminal cannot encode, are escaped.
  """
  file = file or sys.stdout
  encoding = getattr(file, "encoding", None) or "utf-8"
  text = "\n".join(map(escaped, text.split("\n")))
  encoded = text.encode(encoding, "backslashreplace")
  with progress_bar.above_bars():
    print(encoded.decode(encoding), file=file, flush=True)


def compute_dtype(given: str | None) -> str:
  """Resolve --dtype, None by default; "auto" prints the chosen dtype."""
  if given != "auto":
    return given or "float32"
  found, reason = dtypes.fastest()
  show(f"--dtype=auto is {found}: {reason}", sys.stderr)
  return found


def recommend_dtype(given: str | None) -> None:
  """Print that bfloat16 is faster, if it is and no --dtype was given."""
  if given is None:
    found, reason = dtypes.fastest()
    if found != "float32":
      show(f"--dtype={found} would be faster: {reason}", sys.stderr)


@functools.cache  # a second call would take what PYTHONPATH names
def _leave_current_directory() -> None:
  """Take the current directory off `sys.path`, where `python -m` put it.

  Files there, such as downloads, must not be imported; PYTHONPATH stays.
  """
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  runs_this_package = spec and spec.name.startswith("memory_vit.")
  if not runs_this_package or sys.flags.safe_path:
    return
  if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]


def json_file(text: str | None, first: str) -> Path | None:
  """The path of --json; `ConfigError` if it is not writable.

  A file whose first key is not `first` belongs to something else and is
  refused.
  """
  if text is None:
    return None
  path = paths.local(text, "--json")
  paths.require_writable(path, "--json")
  own = f'{{\n  "{first}": '.encode()
  if path.exists():
    with path.open("rb") as file:
      begin = file.read(len(own))
    if begin not in (own, b""):
      raise ConfigError(
        f"--json {messages.brief(text)} exists, and this command did not write "
        "it: give another name, or remove it."
      )
  return path


def parsed(parse: Callable[[], _T]) -> _T:
  """Parse a command line; exit the process on errors."""
  found: list[_T] = []

  def keep() -> int:
    found.append(parse())
    return 0

  status = run_command(keep)
  if not found:
    sys.exit(status)
  return found[0]


def run_command(command: Callable[[], int]) -> int:
  """Run the body of a command, and return its exit status.

  The status is 2 after a `MemoryVitError`, whose message is printed to stderr,
  and if a library of an extra is not installed; 0 if stdout was closed early,
  as by `| head`; that of `Interrupted`, or 130 after Ctrl-C.
  """
  _open_streams()
  _leave_current_directory()
  for name, value in {**_QUIET, **_QUICK}.items():
    os.environ.setdefault(name, value)
  gc.set_threshold(*_COLLECTED)
  try:
    with warnings.catch_warnings():
      # Large images are refused as such; Pillow warns from a lower limit on.
      warnings.filterwarnings("ignore", "Image size .* exceeds limit")
      return command()
  except MemoryVitError as error:
    show(messages.shortened(f"error: {error}", _MOST_SAID), sys.stderr)
    return 2
  except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    extra = next((e for e in _EXTRAS if missing in _EXTRAS[e]), None)
    if extra is None:
      raise
    reason = messages.not_installed("this command", missing, extra)
    show(f"error: {reason}", sys.stderr)
    return 2
  except KeyboardInterrupt as stopped:
    # `Interrupted` has a status and a message.
    message = (
      f"{stopped} Run the same command to resume." if str(stopped) else ""
    )
    show(message or "stopped by Ctrl-C.", sys.stderr)
    return getattr(stopped, "status", _STOPPED)
  except BrokenPipeError:
    # The interpreter flushes stdout once more, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _open_streams() -> None:
  """Open those of stdin, stdout and stderr that are closed, to nowhere.

  Otherwise the next files get their numbers, and libraries write stderr to
  them.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
  if sys.stdout is None:
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
  if sys.stderr is None:
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
