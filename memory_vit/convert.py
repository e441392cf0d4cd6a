"""Writes a backbone in another format.

  python -m memory_vit.convert SOURCE OUT.npz
  python -m memory_vit.convert SOURCE OUT_DIR --format=hf

SOURCE is whatever --backbone takes: a directory of transformers or timm,
hf://OWNER/NAME, a .safetensors file, an .npz file. OUT.npz is read without any
of that, to the bit the same and with the same fingerprint, and notes the
SHA-256 and the licence of what it was made of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from etils import epy

from memory_vit.cli import commands
from memory_vit.cli.command_line import Parser
from memory_vit.cli.commands import run_command, show
from memory_vit.errors import ConfigError
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import escaped

with epy.lazy_imports():  # once the command line is known to be right
  from memory_vit.backbones import describe, load, save


def main(argv: Sequence[str] | None = None) -> int:
  """Run the command; return its exit status."""
  return run_command(lambda: _convert(_parser().parse_args(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="python -m memory_vit.convert",
    description="Writes a backbone in another format.",
  )
  parser.add_argument(
    "source",
    help="a directory of transformers or timm, hf://OWNER/NAME[@REVISION], a "
    ".safetensors file with its config.json beside it, or an .npz file",
  )
  parser.add_argument("out", help="the file or directory to write")
  parser.add_argument(
    "--format",
    choices=("npz", "hf"),
    default="npz",
    help='"npz" for memory_vit, "hf" a directory for transformers (default: '
    "%(default)s)",
  )
  return parser


def _convert(arguments: argparse.Namespace) -> int:
  out = paths.local(arguments.out, "OUT")
  if arguments.format == "npz":
    if out.suffix != ".npz":
      raise ConfigError(
        f"OUT is {escaped(str(out))}, expected a name that ends in .npz; or "
        "--format=hf, for a directory."
      )
    paths.require_writable(out, "OUT")
  published = load.read_published(arguments.source)
  backbone = load.to_backbone(published)
  source = published.source or describe.source_of(arguments.source)
  with files.writing(out):
    save.save_backbone(backbone, out, format=arguments.format, source=source)
  licence = f"; licence: {escaped(source.licence)}" if source else ""
  show(f"{escaped(str(out))}: {backbone!r}{licence}")
  return 0


if __name__ == "__main__":
  commands.leave_current_directory()
  sys.exit(main())
