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
_STOPPED = 130  # exit status after Ctrl-C
# Log level 2 hides TensorFlow's build notes and its warnings (several for
# each skipped image), but not its errors. Turning oneDNN off hides a message
# about oneDNN, and does not change preprocessed images, as a test checks.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
# Settings that save time. Without the first setting, JAX spends a fifth of the
# tracing time on source locations. Without the second setting, TensorFlow also
# imports Keras, which is not used here and takes two fifths of the import time.
_QUICK = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0", "TF_USE_LEGACY_KERAS": "1"}
# Thresholds of `gc`: garbage is collected rarely, because importing and tracing
# create many objects, and almost all objects stay in use. This saves a tenth of
# the time of a prediction.
_COLLECTED = (50_000, 20, 20)
# Modules of the extra `train` of pyproject.toml.
TRAIN_MODULES = frozenset({
  "array_record", "clu", "google_crc32c", "importlib_resources", "matplotlib",
  "ml_collections", "optax", "psutil", "sklearn", "tensorboard", "tensorflow",
  "tensorflow_datasets",
})  # fmt: skip
# Modules of the extra `serve`, and modules that they depend on.
SERVE_MODULES = frozenset({
  "fastapi", "h11", "multipart", "prometheus_client", "pydantic",
  "python_multipart", "starlette", "uvicorn",
})  # fmt: skip
_EXTRAS: dict[messages.Extra, frozenset[str]] = {
  "train": TRAIN_MODULES,
  "serve": SERVE_MODULES,
}
# Maximum length of an error message, which may quote untrusted names.
_MOST_SAID = 2_000


def show(text: str, file: TextIO | None = None) -> None:
  """Print and flush a text; escape control and unencodable characters."""
  file = file or sys.stdout
  encoding = getattr(file, "encoding", None) or "utf-8"
  text = "\n".join(map(escaped, text.split("\n")))
  encoded = text.encode(encoding, "backslashreplace")
  with progress_bar.above_bars():
    print(encoded.decode(encoding), file=file, flush=True)


def compute_dtype(given: str | None) -> str:
  """Return --dtype, by default float32; for "auto", print the fastest dtype."""
  if given != "auto":
    return given or "float32"
  dtype, reason = dtypes.fastest()
  show(f"--dtype=auto is {dtype}: {reason}", sys.stderr)
  return dtype


def recommend_dtype(given: str | None) -> None:
  """Recommend bfloat16 if it is faster and --dtype was not given."""
  if given is None:
    dtype, reason = dtypes.fastest()
    if dtype != "float32":
      show(f"--dtype={dtype} would be faster: {reason}", sys.stderr)


@functools.cache  # a second call would remove an entry of PYTHONPATH
def _leave_current_directory() -> None:
  """Remove the current directory from `sys.path`, where `python -m` put it.

  Files in that directory, such as downloads, must not be imported. Entries of
  PYTHONPATH stay.
  """
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  runs_this_package = spec and spec.name.startswith("memory_vit.")
  if not runs_this_package or sys.flags.safe_path:
    return
  if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]


def json_file(text: str | None, first: str) -> Path | None:
  """Return the path of --json; raise `ConfigError` if it is not writable.

  An existing file is refused if its first key is not `first`, because this
  command did not write it.
  """
  if text is None:
    return None
  path = paths.local(text, "--json")
  paths.require_writable(path, "--json")
  expected = f'{{\n  "{first}": '.encode()
  if path.exists():
    with path.open("rb") as file:
      begin = file.read(len(expected))
    if begin not in (expected, b""):
      raise ConfigError(
        f"--json {messages.brief(text)} exists, and this command did not write "
        "it: give another name, or remove it."
      )
  return path


def parsed(parse: Callable[[], _T]) -> _T:
  """Parse a command line; exit the process on errors."""
  outcome: list[_T] = []

  def keep() -> int:
    outcome.append(parse())
    return 0

  status = run_command(keep)
  if not outcome:
    sys.exit(status)
  return outcome[0]


def run_command(command: Callable[[], int]) -> int:
  """Run the body of a command, and return its exit status.

  After a `MemoryVitError`, print its message to stderr and return 2. Return 2
  also if a library of an extra is not installed. Return 0 if stdout was closed
  early, as by `| head`; the status of an `Interrupted`; or 130 after Ctrl-C.
  """
  _open_streams()
  _leave_current_directory()
  for name, value in {**_QUIET, **_QUICK}.items():
    os.environ.setdefault(name, value)
  gc.set_threshold(*_COLLECTED)
  try:
    with warnings.catch_warnings():
      # Hide Pillow's warning about large images, because the limit of this
      # package is higher than Pillow's limit.
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
    # `Interrupted` has a message and a status. A plain KeyboardInterrupt, which
    # Ctrl-C raises by default, has neither.
    message = (
      f"{stopped} Run the same command to resume." if str(stopped) else ""
    )
    show(message or "stopped by Ctrl-C.", sys.stderr)
    return getattr(stopped, "status", _STOPPED)
  except BrokenPipeError:
    # Redirect stdout to the null device: flushing a closed stdout at exit would
    # print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _open_streams() -> None:
  """Open the null device in place of a closed stdin, stdout or stderr.

  Otherwise the next opened files would get descriptors 0 to 2, and a library
  that writes to stderr would write into one of these files.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      # The null device gets the lowest free descriptor, which is `number`.
      os.open(os.devnull, os.O_RDWR)
  if sys.stdout is None:
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
  if sys.stderr is None:
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
