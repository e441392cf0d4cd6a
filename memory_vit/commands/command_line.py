"""Command lines: flags, options of a configuration, and --help.

jax and TensorFlow are not imported here, so that errors appear at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags
from etils import epy

from memory_vit import config as config_lib
from memory_vit.commands import config_file, option_help
from memory_vit.config import Config
from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.runtime import dtypes, messages, options
from memory_vit.runtime.options import Rule

with epy.lazy_imports():  # needed only if a command has a configuration
  from ml_collections import config_flags

# Errors that absl and ml_collections raise for bad flags and values.
_ERRORS = (flags.Error, AttributeError, LookupError, MemoryError, OSError,
           RecursionError, SyntaxError, TypeError, ValueError)  # fmt: skip
_T = TypeVar("_T")
_DEFINE: Mapping[str, Callable[..., Any]] = {
  "str": flags.DEFINE_string, "bool": flags.DEFINE_bool,
  "int": flags.DEFINE_integer,
}  # fmt: skip
_SEE_HELP = "--help lists all options"
TRUST_HELP = (
  "Run code that data sets name: feature classes from outside of TFDS, and "
  "TFDS names with a namespace."
)


class Parser(argparse.ArgumentParser):
  """Parser of a command without a configuration; its errors are one line."""

  def error(self, message: str) -> typing.NoReturn:
    """Raise a one-line `ConfigError`; argparse would print the whole usage."""
    problem = config_file.one_line(message).rstrip(".")
    raise ConfigError(f"the command line: {problem}; {_SEE_HELP}.")

  def parse(self, argv: Sequence[str], mixed: str = "") -> argparse.Namespace:
    """Parse a command line; arguments after "--" are never options.

    Args:
      argv: the arguments, without the name of the program.
      mixed: name of the positional arguments that may stand among options.

    Raises:
      ConfigError: if the command line is invalid.
    """
    before = [*itertools.takewhile(lambda argument: argument != "--", argv)]
    for argument in before:
      # Refuse "--NAME=--", because argparse would drop the value "--".
      if re.fullmatch(r"--[\w-]+=--", argument):
        self.error(f"{argument.removesuffix('=--')} is '--', expected a value")
    if not mixed:
      return self.parse_args(argv)
    # Append the arguments after `--` here, because argparse of Python 3.11
    # would parse some of these arguments as options.
    arguments = self.parse_intermixed_args(before)
    after = argv[len(before) + 1 :]
    setattr(arguments, mixed, [*getattr(arguments, mixed), *after])
    return arguments

  def switch(self, name: str, about: str) -> None:
    self.add_argument(name, action="store_true", help=about)

  def strings(self, name: str, metavar: str, about: str) -> None:
    """Add an option that may be given any number of times."""
    self.add_argument(
      name, action="append", default=[], metavar=metavar, help=about
    )

  def number(self, name: str, rule: Rule, default: float, about: str) -> None:
    """Add an option whose value is a number, of the type of its default."""
    kind = _number(type(default), rule)
    about += " (default: %(default)s)"
    self.add_argument(name, type=kind, default=default, help=about)

  def option(self, name: str, key: str, about: str) -> None:
    """Add a number option with the rule and the default of `config.KEY`."""
    option = config_lib.OPTIONS[key]
    self.number(name, option.rule, option.default, about)

  def options(self, cls: type, *names: str) -> None:
    """Add all options of a dataclass or, if `names` are given, only these."""
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
    """Add --backbone, --task, --batch_size and --dtype."""
    self.add_argument(
      "--backbone",
      required=True,
      metavar="SOURCE",
      help="an .npz file, its URL or a short name such as augreg-B/32; a model "
      "directory of transformers or timm; or hf://OWNER/NAME",
    )
    self.add_argument(
      "--task",
      required=True,
      action="append",
      metavar="DIR",
      help="a task, or a directory of tasks; or hf://OWNER/NAME[/TASK]; may be "
      "given several times",
    )
    rule = config_lib.OPTIONS["batch_size_eval"].rule
    self.number("--batch_size", rule, batch_size, about_batch)
    self.dtype()

  def dtype(self) -> None:
    """Add --dtype; see `console.compute_dtype`."""
    self.add_argument(
      "--dtype",
      choices=dtypes.CHOICES,
      help="compute dtype; auto means bfloat16 if the device multiplies it "
      "faster (default: float32)",
    )


def _number(kind: type[int] | type[float], rule: Rule) -> Callable[[str], Any]:
  def parse(text: str) -> Any:
    try:
      value: Any = kind(text)
    except ValueError:
      value = None
    if value is None or not rule.accepts(value):
      expected = f"{kind.__name__}: {rule.expected}"
      raise argparse.ArgumentTypeError(
        messages.refusal("the value", text, expected)
      )
    return value

  return parse


class CommandLine:
  """Flags of a command, with `--config` and `--config.KEY=VALUE`.

  Attributes:
    flags: all flags; the command adds further flags here.
  """

  def __init__(self, about: str, argv: Sequence[str]) -> None:
    """Prepare to parse `argv`; `about` is the beginning of --help."""
    # Callers may pass `__doc__`, which is None under `python -OO`.
    self._about, self._argv = about or "", list(argv)
    self.flags = flags.FlagValues()
    try:
      self._config = config_flags.DEFINE_config_file(
        "config", None, "Configuration: FILE.py, or one of the names "
        f"{', '.join(config_file.names())}. An argument may follow: "
        "tfds:cifar10.",
        flag_values=self.flags, sys_argv=self._argv,
      )  # fmt: skip
    except _ERRORS as error:  # the file of --flagfile may be missing
      raise self._explained(error) from error
    self.flags["config"].parser = config_file.ConfigFile()
    self._trusts = self.switch("trust_data_code", TRUST_HELP)

  def string(self, name: str, about: str) -> Callable[[], str | None]:
    """Declare a flag; the returned function reads it after `parse`."""
    holder = flags.DEFINE_string(name, None, about, flag_values=self.flags)
    return lambda: holder.value

  def required_string(self, name: str, about: str) -> Callable[[], str]:
    """Declare a flag that must be given.

    The returned function raises `ConfigError` if it is missing.
    """
    get_value = self.string(name, about)

    def read() -> str:
      value = get_value()
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
    """Declare a flag for each option of a dataclass.

    The returned function builds the dataclass after `parse`.
    """
    table = options.table(cls)
    for name, option in table.items():
      define = _DEFINE[option.kind.removesuffix(" | None")]
      define(name, option.default, option.about, flag_values=self.flags)
    return lambda: cls(**{name: self.flags[name].value for name in table})

  def parse(self, needs_config: Callable[[], bool] = lambda: True) -> Config:
    """Parse all flags; return the configuration.

    Args:
      needs_config: is called after parsing, and returns whether --config is
        required; without --config all options have their defaults.

    Raises:
      SystemExit: with status 0, after --help.
      ConfigError: if a flag is unknown, or a value is not allowed.
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
    config_dict = self._config.value
    if config_dict:
      config = self._with_one_value(config_lib.from_dict(config_dict.to_dict()))
    else:
      config = Config()
    return dataclasses.replace(
      config, trust_data_code=self._trusts() or config.trust_data_code
    )

  def _with_one_value(self, config: Config) -> Config:
    """Return `config` without the sweeps of the options that flags set."""
    overrides = config_flags.get_override_values(self.flags["config"])
    for key, axis in (
      ("learning_rate", "learning_rate"),
      ("task.cells", "cells"),
      ("regime", "regime"),
    ):
      if key not in overrides or not getattr(config.sweep, axis):
        continue
      if f"sweep.{axis}" in overrides:
        raise ConfigError(
          f"config.{key} (one value) and config.sweep.{axis} (several values) "
          "are both given: expected only one of them."
        )
      empty: dict[str, Any] = {axis: ()}
      sweep = dataclasses.replace(config.sweep, **empty)
      config = dataclasses.replace(config, sweep=sweep)
    return config

  def _require_options(self) -> None:
    known = {*config_lib.OPTIONS, *option_help.sections()}
    for argument in self._argv[1:]:
      match = re.match(r"--?(?:no)?config\.([^=\[]*)", argument)
      if match and match[1] not in known:
        unknown = options.unknown(
          "config", match[1], config_lib.OPTIONS, "config."
        )
        raise ConfigError(f"{unknown.removesuffix('.')}; {_SEE_HELP}.")

  def _explained(self, error: BaseException) -> ConfigError:
    """Return a `ConfigError` that says what is wrong, and what is expected."""
    inner: BaseException | None = error
    while inner:  # absl wraps this package's errors
      if isinstance(inner, MemoryVitError):
        return ConfigError(str(inner))
      inner = inner.__cause__ or inner.__context__
    text = config_file.one_line(str(error) or type(error).__name__).rstrip(".")
    match = re.match(r"flag --config\.([\w.]+)=", text)
    option = config_lib.OPTIONS.get(match[1]) if match else None
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
      "Options of the configuration, with the defaults of memory_vit, which a",
      "configuration file may change:",
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
    source: FILE.py, which is run, or the name of a configuration of the
      package; an argument may follow, such as "tfds:cifar10".
    values: options to change, {"learning_rate": 0.1, "data.flip": False}.
    flags: flags to parse, ["--config.learning_rate=0.1", ...].

  Raises:
    ConfigError: if the file fails, an option is unknown, or a value is not
      allowed.
  """
  line = CommandLine("", ["read_config", f"--config={source}", *flags])
  return line.parse().replaced(values or {})


def _missing(name: str, about: str) -> ConfigError:
  return ConfigError(f"--{name} is missing: {about}")
