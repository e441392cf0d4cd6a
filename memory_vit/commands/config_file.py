"""Run the Python file of a configuration, and report errors in one line."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from etils import epy

from memory_vit.errors import ConfigError
from memory_vit.runtime import messages, paths

with epy.lazy_imports():  # needed only if a command has a configuration
  import ml_collections

# memory_vit/configs is a folder in the wheel and a symbolic link in a checkout.
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# Maximum number of characters of a quoted name or error message.
_MOST_SHOWN = 400


def names() -> list[str]:
  """Return the names of the configurations of the package."""
  stems = (path.stem for path in _CONFIGS.glob("[!_]*.py"))
  return sorted(set(stems) - {"base"})


class ConfigFile(flags.ArgumentParser["ml_collections.ConfigDict"]):
  """Parser of --config, which runs a Python file."""

  def parse(self, argument: str) -> ml_collections.ConfigDict:
    """Return the configuration of FILE.py[:ARGUMENT] or NAME[:ARGUMENT]."""
    name, *arguments = argument.split(":", 1)
    path = paths.local(name, "--config")
    if not path.is_file() and name in names():
      path = _CONFIGS / f"{name}.py"
    if not path.is_file():
      raise ConfigError(
        f"--config is {messages.brief(name)}: there is no such file. Expected "
        f"a Python file, FILE.py, or one of these: {', '.join(names())}."
      )
    try:
      config = _run(path, arguments)
    except Exception as error:  # code in the file may raise anything
      raise ConfigError(
        f"--config={one_line(name)}, {_place(error, path)}: "
        f"{type(error).__name__}: {one_line(str(error))}{_advice(error)}"
      ) from error
    if not isinstance(config, ml_collections.ConfigDict):
      raise ConfigError(
        f"--config={one_line(name)}: get_config() returned "
        f"{messages.brief(config)}, expected a ConfigDict, for example from "
        "get_config() of memory_vit.configs.base, with changed options."
      )
    return config.lock()

  def flag_type(self) -> str:
    """Return the name of this type for messages of absl."""
    return "configuration file"


def _run(path: Path, arguments: Sequence[str]) -> Any:
  """Run a configuration file; return the result of its `get_config`.

  The file may import modules from its own folder.
  """
  loader = importlib.machinery.SourceFileLoader("config_file", str(path))
  spec = importlib.util.spec_from_loader(loader.name, loader)
  module = importlib.util.module_from_spec(typing.cast(Any, spec))
  with _beside(path):
    loader.exec_module(module)
    return module.get_config(*arguments)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
  """Put the folder of `path` first on `sys.path` during a `with` block.

  Change nothing under `python -P`, which keeps script folders off `sys.path`.
  """
  if sys.flags.safe_path:
    yield
    return
  folder = str(path.resolve().parent)
  sys.path.insert(0, folder)
  try:
    yield
  finally:
    # Code in the file may already have removed `folder` from `sys.path`.
    with contextlib.suppress(ValueError):
      sys.path.remove(folder)


def _advice(error: Exception) -> str:
  if isinstance(error, ModuleNotFoundError) and error.name == "configs":
    return "; write: from memory_vit.configs import base"
  return ""


def _place(error: Exception, path: Path) -> str:
  """Return the place of an error in file `path` as text, such as "line 3"."""
  if isinstance(error, SyntaxError) and error.lineno:
    where = "" if error.filename == str(path) else f"{error.filename}, "
    return f"{where}line {error.lineno}"
  lines = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename == str(path)
  ]
  return f"line {lines[-1]}" if lines else "get_config"


one_line = functools.partial(messages.one_line, most=_MOST_SHOWN)
