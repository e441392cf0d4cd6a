"""Commands, one file each, and the flags, help and errors that they share."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.commands.command_line import CommandLine
  from memory_vit.commands.console import run_command

__all__ = ["CommandLine", "run_command"]
