"""Command lines: flags, options of a configuration, and --help.

Nothing here brings jax or TensorFlow: what is wrong with a command line is said
at once, in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from etils import epy

from memory_vit import config as config_lib
from memory_vit.commands import option_help
from memory_vit.config import Config
from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.runtime import dtypes, messages, options, paths
from memory_vit.runtime.options import Rule

with epy.lazy_imports():  # not all commands have a configuration
  import ml_collections
  from ml_collections import config_flags

# What absl and ml_collections raise, and `ast.literal_eval` within them.
_ERRORS = (flags.Error, AttributeError, LookupError, MemoryError, OSError,
           RecursionError, SyntaxError, TypeError, ValueError)  # fmt: skip
_T = TypeVar("_T")
# How flags of these types are declared.
_DEFINE: Mapping[str, Callable[..., Any]] = {
  "str": flags.DEFINE_string, "bool": flags.DEFINE_bool,
  "int": flags.DEFINE_integer,
}  # fmt: skip
# Characters of one of their messages.
_MOST_SHOWN = 400
# Of the checkout, to which a link leads; a part of the wheel.
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_SEE_HELP = "--help lists all"
TRUST_HELP = (
  "Run the code that the files of a data set name: classes of features that "
  "are not those of TFDS, and TFDS names with a namespace."
)


class Parser(argparse.ArgumentParser):
  """For a command without a configuration: one line says what is wrong."""

  def error(self, message: str) -> typing.NoReturn:
    """Raise `ConfigError`, where argparse would show all that there is."""
    problem = one_line(message).rstrip(".")
    raise ConfigError(f"the command line: {problem}; {_SEE_HELP}.")

  def switch(self, name: str, about: str) -> None:
    """Add an argument without a value."""
    self.add_argument(name, action="store_true", help=about)

  def strings(self, name: str, metavar: str, about: str) -> None:
    """Add an argument that may be given several times, or never."""
    self.add_argument(
      name, action="append", default=[], metavar=metavar, help=about
    )

  def number(self, name: str, rule: Rule, default: float, about: str) -> None:
    """Add a number of the type of its default, which the help names."""
    kind = _number(type(default), rule)
    about += " (default: %(default)s)"
    self.add_argument(name, type=kind, default=default, help=about)

  def option(self, name: str, key: str, about: str) -> None:
    """Add a number with the rule and the default of `config.KEY`."""
    option = config_lib.OPTIONS[key]
    self.number(name, option.rule, option.default, about)

  def options(self, cls: type, *names: str) -> None:
    """Add numbers and texts that a dataclass declares: `names`, or all."""
    table = options.table(cls)
    for name in names or table:
      option = table[name]
      if isinstance(option.default, int | float):
        self.number(f"--{name}", option.rule, option.default, option.about)
      else:
        self.add_argument(
          f"--{name}", metavar=option.metavar, help=option.about
        )

  def model(self, batch_size: int, about_batch: str) -> None:
    """Add what every model is loaded and run by; see `load_model`."""
    self.add_argument(
      "--backbone",
      required=True,
      metavar="SOURCE",
      help="an .npz file, its address or a short name such as augreg-B/32; a "
      "directory of transformers or timm, or hf://OWNER/NAME",
    )
    self.add_argument(
      "--task",
      required=True,
      action="append",
      metavar="DIR",
      help="a task, or a directory of tasks; may be given several times",
    )
    rule = config_lib.OPTIONS["batch_size_eval"].rule
    self.number("--batch_size", rule, batch_size, about_batch)
    self.dtype()

  def dtype(self) -> None:
    """Add the compute dtype; see `console.compute_dtype`."""
    self.add_argument(
      "--dtype",
      choices=dtypes.CHOICES,
      help="compute dtype; auto is bfloat16 if the device multiplies it faster "
      "(default: float32)",
    )


def _number(kind: type[int] | type[float], rule: Rule) -> Callable[[str], Any]:
  """Make the type of an argument: a number that a rule accepts."""

  def parse(text: str) -> Any:
    try:
      value: Any = kind(text)
    except ValueError:
      value = None
    if value is None or not rule.accepts(value):
      expected = f"{kind.__name__}: {rule.expected}"
      raise argparse.ArgumentTypeError(messages.refusal("it", text, expected))
    return value

  return parse


class CommandLine:
  """The flags of a command: its own, `--config` and `--config.KEY=VALUE`.

  Attributes:
    flags: where the command declares its own.
  """

  def __init__(self, about: str, argv: Sequence[str]) -> None:
    """Prepare to parse `argv`; `about` is what --help says first."""
    self._about, self._argv = about, list(argv)
    self.flags = flags.FlagValues()
    try:
      self._config = config_flags.DEFINE_config_file(
        "config", None, "Configuration: FILE.py, or NAME for one of "
        f"{', '.join(_names())}; an argument may follow: tfds:cifar10.",
        flag_values=self.flags, sys_argv=self._argv,
      )  # fmt: skip
    except _ERRORS as error:  # it opens --flagfile
      raise self._explained(error) from error
    self.flags["config"].parser = _ConfigFile()
    self._trusts = self.switch("trust_data_code", TRUST_HELP)

  def string(self, name: str, about: str) -> Callable[[], str | None]:
    """Declare a flag; return what reads it once all are parsed."""
    holder = flags.DEFINE_string(name, None, about, flag_values=self.flags)
    return lambda: holder.value

  def required_string(self, name: str, about: str) -> Callable[[], str]:
    """The same, of a flag that must be given: the reader raises if it is not.

    That is a `ConfigError`.
    """
    given = self.string(name, about)

    def read() -> str:
      value = given()
      if value is None:
        raise _missing(name, about)
      return value

    return read

  def strings(self, name: str, about: str) -> Callable[[], list[str]]:
    """Declare a flag that may be given several times."""
    holder = flags.DEFINE_multi_string(name, [], about, flag_values=self.flags)
    return lambda: holder.value

  def switch(self, name: str, about: str) -> Callable[[], bool]:
    """Declare a flag without a value."""
    holder = flags.DEFINE_bool(name, False, about, flag_values=self.flags)
    return lambda: holder.value

  def options(self, cls: type[_T]) -> Callable[[], _T]:
    """Declare a flag for each option of a dataclass; return what makes it."""
    table = options.table(cls)
    for name, option in table.items():
      define = _DEFINE[option.kind.removesuffix(" | None")]
      define(name, option.default, option.about, flag_values=self.flags)
    return lambda: cls(**{name: self.flags[name].value for name in table})

  def parse(self, needs_config: Callable[[], bool] = lambda: True) -> Config:
    """Parse all flags; return the configuration.

    Args:
      needs_config: whether --config must be, asked once flags are parsed;
        without it all options are at their defaults.

    Raises:
      SystemExit: with status 0, after --help.
      ConfigError: for what cannot be used.
    """
    if {"--help", "-help", "-h", "--helpfull"} & {*self._argv[1:]}:
      print(self._help())
      raise SystemExit(0)
    self._require_options()
    try:
      rest = self.flags(self._argv)[1:]
    except _ERRORS as error:
      raise self._explained(error) from error
    if rest:
      raise ConfigError(
        f"unknown arguments {messages.brief(rest)}; options start with --."
      )
    if needs_config() and self._config.value is None:
      raise _missing("config", self.flags["config"].help)
    given = self._config.value
    if given:
      config = self._with_one_value(config_lib.from_dict(given.to_dict()))
    else:
      config = Config()
    return dataclasses.replace(
      config, trust_data_code=self._trusts() or config.trust_data_code
    )

  def _with_one_value(self, config: Config) -> Config:
    """Drop the lists of a sweep for values given on the command line."""
    given = config_flags.get_override_values(self.flags["config"])
    for key, axis in (
      ("learning_rate", "learning_rate"),
      ("task.cells", "cells"),
      ("regime", "regime"),
    ):
      if key not in given or not getattr(config.sweep, axis):
        continue
      if f"sweep.{axis}" in given:
        raise ConfigError(
          f"config.{key} is one value of what config.sweep.{axis} varies: "
          "expected one of them."
        )
      empty: dict[str, Any] = {axis: ()}
      sweep = dataclasses.replace(config.sweep, **empty)
      config = dataclasses.replace(config, sweep=sweep)
    return config

  def _require_options(self) -> None:
    """Raise for an option that no configuration has."""
    known = {*config_lib.OPTIONS, *option_help.sections()}
    for argument in self._argv[1:]:
      found = re.match(r"--?(?:no)?config\.([^=\[]*)", argument)
      if found and found[1] not in known:
        unknown = options.unknown(
          "config", found[1], config_lib.OPTIONS, "config."
        )
        raise ConfigError(f"{unknown.removesuffix('.')}; {_SEE_HELP}.")

  def _explained(self, error: BaseException) -> ConfigError:
    """Our error for one of the libraries, with what was expected."""
    inner: BaseException | None = error
    while inner:  # ours are wrapped by absl
      if isinstance(inner, MemoryVitError):
        return ConfigError(str(inner))
      inner = inner.__cause__ or inner.__context__
    text = one_line(str(error) or type(error).__name__).rstrip(".")
    found = re.match(r"flag --config\.([\w.]+)=", text)
    option = config_lib.OPTIONS.get(found[1]) if found else None
    advice = f"expected {option.expected}" if option else ""
    return ConfigError(f"the command line: {text}; {advice or _SEE_HELP}.")

  def _help(self) -> str:
    lines = [self._about.strip(), "", "Flags:", ""]
    for name in self.flags:
      flag = self.flags[name]
      if flag.name == name and flag.help:
        default = "" if flag.default in (None, []) else f" ({flag.default!r})"
        lines += [f"  --{name}{default}", *option_help.indented(flag.help)]
    lines += [
      "",
      "Options of the configuration, with the defaults of memory_vit; a",
      "configuration file has its own:",
      "",
      option_help.text(),
    ]
    return "\n".join(lines)


def read_config(
  source: str,
  values: Mapping[str, Any] | None = None,
  flags: Sequence[str] = (),
) -> Config:
  """Read a configuration, as --config does.

  Args:
    source: FILE.py, which is run, or the name of one that comes with the
      package; an argument may follow, "tfds:cifar10".
    values: to be changed, {"learning_rate": 0.1, "data.flip": False}.
    flags: to be parsed, ["--config.learning_rate=0.1", ...].

  Raises:
    ConfigError: for a file that cannot be used, and options or values that
      cannot be.
  """
  line = CommandLine("", ["read_config", f"--config={source}", *flags])
  return line.parse().replaced(values or {})


def _missing(name: str, about: str) -> ConfigError:
  return ConfigError(f"--{name} is missing: {about}")


def _names() -> list[str]:
  """The configurations that come with the package."""
  found = (path.stem for path in _CONFIGS.glob("[!_]*.py"))
  return sorted(set(found) - {"base"})


class _ConfigFile(flags.ArgumentParser["ml_collections.ConfigDict"]):
  """Runs the Python of a configuration file; its errors are one line."""

  def parse(self, argument: str) -> ml_collections.ConfigDict:
    """FILE.py, or NAME, and :ARGUMENT -> what its get_config returns."""
    name, *given = argument.split(":", 1)
    path = paths.local(name, "--config")
    if not path.is_file() and name in _names():
      path = _CONFIGS / f"{name}.py"
    if not path.is_file():
      raise ConfigError(
        f"--config is {messages.brief(name)}: there is no such file. Expected "
        f"a file of Python, as FILE.py, or a name: {', '.join(_names())}."
      )
    try:
      found = _run(path, given)
    except Exception as error:  # whatever its author has written
      raise ConfigError(
        f"--config={one_line(name)}, {_place(error, path)}: "
        f"{type(error).__name__}: {one_line(str(error))}{_advice(error)}"
      ) from error
    if not isinstance(found, ml_collections.ConfigDict):
      raise ConfigError(
        f"--config={one_line(name)}: get_config() returned "
        f"{messages.brief(found)}, expected a ConfigDict, such as that of "
        "memory_vit.configs.base, changed."
      )
    return found.lock()

  def flag_type(self) -> str:
    """For messages of absl."""
    return "configuration file"


def _run(path: Path, given: Sequence[str]) -> Any:
  """Call get_config of a file of Python.

  It finds modules beside it, as a script does, however the command was started.
  """
  loader = importlib.machinery.SourceFileLoader("config_file", str(path))
  spec = importlib.util.spec_from_loader(loader.name, loader)
  module = importlib.util.module_from_spec(typing.cast(Any, spec))
  with _beside(path):
    loader.exec_module(module)
    return module.get_config(*given)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
  """Have the folder of a file first on `sys.path`, unless Python is to be safe.

  That is `python -P`, for which a script does not find what lies beside it.
  """
  if sys.flags.safe_path:
    yield
    return
  folder = str(path.resolve().parent)
  sys.path.insert(0, folder)
  try:
    yield
  finally:
    with contextlib.suppress(ValueError):  # the file may change it as well
      sys.path.remove(folder)


def _advice(error: Exception) -> str:
  """Advice for a configuration file that is written for a checkout."""
  if isinstance(error, ModuleNotFoundError) and error.name == "configs":
    return "; write: from memory_vit.configs import base"
  return ""


def _place(error: Exception, path: Path) -> str:
  """The line of the file in which something was raised, or that it called."""
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
