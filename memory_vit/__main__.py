"""Run a command of memory_vit by its name.

  memory-vit COMMAND [ARGUMENT ...]
  memory-vit COMMAND --help
  memory-vit --version

The commands:
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from memory_vit.errors import ConfigError

# Commands in the order of use; each is a module of `commands/`.
COMMANDS = (
  "check_data", "train", "evaluate", "predict", "embed", "inspect", "serve",
  "export", "push", "list", "convert", "attention",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Run a command; return the exit status. `argv` excludes the program name."""
  name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
  if name not in COMMANDS:
    from memory_vit.commands import console

    return console.run_command(lambda: _say(name))
  # Code that reads `sys.argv` now finds, for example, "memory-vit train" as the
  # name of the program.
  sys.argv = [f"memory-vit {name}", *arguments]
  command = importlib.import_module(f"memory_vit.commands.{name}")
  return command.main(arguments)


def _say(name: str) -> int:
  """Print what --help or --version asks for; refuse any other option."""
  from memory_vit.commands import console
  from memory_vit.version import __version__

  if name not in ("-h", "--help", "--version"):
    raise ConfigError(
      f"there is no command {name!r}, expected one of: {', '.join(COMMANDS)}."
    )
  console.show(__version__ if name == "--version" else _help())
  return 0


def _help() -> str:
  """Return a list of commands and their summaries, without importing them."""
  from memory_vit.commands.option_help import docstring

  folder = Path(__file__).parent / "commands"
  lines = [docstring(__file__)]
  for name in COMMANDS:
    summary = docstring(folder / f"{name}.py").partition("\n")[0]
    lines.append(f"  {name:<11} {summary}")
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
