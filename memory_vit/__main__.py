"""Runs a command of memory_vit by its name.

  memory-vit COMMAND [ARGUMENT ...]
  memory-vit COMMAND --help
  memory-vit --version

The commands:
"""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from memory_vit.errors import ConfigError

# In the order in which they are met: name and module. `memory-vit NAME` is
# `python -m memory_vit.MODULE`.
COMMANDS = {
  "check_data": "check_data", "train": "main", "evaluate": "evaluate",
  "predict": "predict", "embed": "embed", "inspect": "inspect",
  "serve": "serve", "export": "export", "convert": "convert", "paper": "paper",
  "vtab": "vtab", "attention": "attention",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Run a command as its module would be; return the exit status.

  It ends the process by `SystemExit` where the command does so.

  Args:
    argv: without the name of the program; by default that of the process.
  """
  name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
  if name not in COMMANDS:
    from memory_vit.cli import commands

    return commands.run_command(lambda: _say(name))
  sys.argv = [f"memory-vit {name}", *arguments]
  runpy.run_module(
    f"memory_vit.{COMMANDS[name]}", run_name="__main__", alter_sys=True
  )
  return 0


def _say(name: str) -> int:
  """Print what --help or --version asks for; no other option is known."""
  from memory_vit import __version__
  from memory_vit.cli import commands

  if name not in ("-h", "--help", "--version"):
    raise ConfigError(
      f"there is no command {name!r}, expected one of: {', '.join(COMMANDS)}."
    )
  commands.show(__version__ if name == "--version" else _help())
  return 0


def _help() -> str:
  """Every command with the first line of its docstring; none is imported."""
  folder = Path(__file__).parent
  lines = [(__doc__ or "").strip()]
  for name, module in COMMANDS.items():
    text = (folder / f"{module}.py").read_text(encoding="utf-8")
    summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    lines.append(f"  {name:<11} {summary}")
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
