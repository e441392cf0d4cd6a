"""Command lines: flags, options of a configuration, and --help.

Nothing here imports jax or TensorFlow: errors of a command line come at once.
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

with epy.lazy_imports():  # not all commands have a configuration
  from ml_collections import config_flags

# Raised by absl, ml_collections, and `ast.literal_eval` within them.
_ERRORS = (flags.Error, AttributeError, LookupError, MemoryError, OSError,
           RecursionError, SyntaxError, TypeError, ValueError)  # fmt: skip
_T = TypeVar("_T")
_DEFINE: Mapping[str, Callable[..., Any]] = {
  "str": flags.DEFINE_string, "bool": flags.DEFINE_bool,
  "int": flags.DEFINE_integer,
}  # fmt: skip
_SEE_HELP = "--help lists all"
TRUST_HELP = (
  "Run code that data sets name: feature classes outside of TFDS, and TFDS "
  "names with a namespace."
)


class Parser(argparse.ArgumentParser):
  """For a command without a configuration; errors are one line."""

  def error(self, message: str) -> typing.NoReturn:
    """Raise `ConfigError`; argparse would print the whole usage."""
    problem = config_file.one_line(message).rstrip(".")
    raise ConfigError(f"the command line: {problem}; {_SEE_HELP}.")

  def parse(self, argv: Sequence[str], mixed: str = "") -> argparse.Namespace:
    """Parse a command line; arguments after "--" are never options.

    Args:
      argv: without the program.
      mixed: the positional argument, a list, that may stand among options.

    Raises:
      ConfigError: for a command line that is refused.
    """
    before = [*itertools.takewhile(lambda argument: argument != "--", argv)]
    for argument in before:
      if re.fullmatch(r"--[\w-]+=--", argument):  # argparse takes -- out of it
        self.error(f"{argument.removesuffix('=--')} is '--', expected a value")
    if not mixed:
      return self.parse_args(argv)
    # Given the --, argparse of Python 3.11 would drop it too early.
    arguments = self.parse_intermixed_args(before)
    after = argv[len(before) + 1 :]
    setattr(arguments, mixed, [*getattr(arguments, mixed), *after])
    return arguments

  def switch(self, name: str, about: str) -> None:
    self.add_argument(name, action="store_true", help=about)

  def strings(self, name: str, metavar: str, about: str) -> None:
    """Add an argument that may be given any number of times."""
    self.add_argument(
      name, action="append", default=[], metavar=metavar, help=about
    )

  def number(self, name: str, rule: Rule, default: float, about: str) -> None:
    """Add a number of the type of its default."""
    kind = _number(type(default), rule)
    about += " (default: %(default)s)"
    self.add_argument(name, type=kind, default=default, help=about)

  def option(self, name: str, key: str, about: str) -> None:
    """Add a number with the rule and the default of `config.KEY`."""
    option = config_lib.OPTIONS[key]
    self.number(name, option.rule, option.default, about)

  def options(self, cls: type, *names: str) -> None:
    """Add the options `names`, or all, that a dataclass declares."""
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
    """Add the arguments of `load_model`."""
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
      help="a task, or a directory of tasks; or hf://OWNER/NAME[/TASK]; may be "
      "given several times",
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
    flags: to which the command adds its own.
  """

  def __init__(self, about: str, argv: Sequence[str]) -> None:
    """Prepare to parse `argv`; `about` is the beginning of --help."""
    # `python -OO` removes the docstrings that studies give.
    self._about, self._argv = about or "", list(argv)
    self.flags = flags.FlagValues()
    try:
      self._config = config_flags.DEFINE_config_file(
        "config", None, "Configuration: FILE.py, or one of the names "
        f"{', '.join(config_file.names())}. An argument may follow: "
        "tfds:cifar10.",
        flag_values=self.flags, sys_argv=self._argv,
      )  # fmt: skip
    except _ERRORS as error:  # it opens --flagfile
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
      needs_config: whether --config is required, called after parsing; without
        --config all options have their defaults.

    Raises:
      SystemExit: with status 0, after --help.
      ConfigError: for unknown flags and values that are not allowed.
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
    """Drop a list of the sweep if the command line gives one value."""
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
    known = {*config_lib.OPTIONS, *option_help.sections()}
    for argument in self._argv[1:]:
      found = re.match(r"--?(?:no)?config\.([^=\[]*)", argument)
      if found and found[1] not in known:
        unknown = options.unknown(
          "config", found[1], config_lib.OPTIONS, "config."
        )
        raise ConfigError(f"{unknown.removesuffix('.')}; {_SEE_HELP}.")

  def _explained(self, error: BaseException) -> ConfigError:
    """Turn an error of a library into ours, with the expected value."""
    inner: BaseException | None = error
    while inner:  # ours are wrapped by absl
      if isinstance(inner, MemoryVitError):
        return ConfigError(str(inner))
      inner = inner.__cause__ or inner.__context__
    text = config_file.one_line(str(error) or type(error).__name__).rstrip(".")
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
    source: FILE.py, which is run, or the name of a configuration of the
      package; an argument may follow, "tfds:cifar10".
    values: options to change, {"learning_rate": 0.1, "data.flip": False}.
    flags: to parse, ["--config.learning_rate=0.1", ...].

  Raises:
    ConfigError: for a file that fails, unknown options and values that are not
      allowed.
  """
  line = CommandLine("", ["read_config", f"--config={source}", *flags])
  return line.parse().replaced(values or {})


def _missing(name: str, about: str) -> ConfigError:
  return ConfigError(f"--{name} is missing: {about}")
