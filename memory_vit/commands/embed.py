"""Embeds images into Parquet: the inputs of heads and probes on a backbone.

  memory-vit embed --backbone=SOURCE --input=FOLDER --output=DIR

The row of an image holds the input of the backbone's head, and the class token
and the mean patch token of every layer. Heads and probes are trained on these
rows without images. The exit status is 0, 1 if images could not be read, 2 for
other bad input.
"""

from __future__ import annotations

from collections.abc import Sequence

from etils import epy

from memory_vit import config as config_lib
from memory_vit.commands import bulk_options, console
from memory_vit.commands.command_line import Parser
from memory_vit.runtime.options import Number

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.bulk import embeddings


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return console.run_command(lambda: _embed(_parser(), argv))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit embed",
    description="Embeds images with a frozen backbone, into Parquet.",
  )
  parser.add_argument(
    "--backbone",
    required=True,
    metavar="SOURCE",
    help="an .npz file, its URL or a short name such as augreg-B/32; a model "
    "directory of transformers or timm; or hf://OWNER/NAME",
  )
  parser.add_argument(
    "--task",
    default="",
    metavar="DIR",
    help="a task whose image size and preprocessing to use (default: those "
    "that the backbone states, or images squeezed to its size)",
  )
  rule = config_lib.OPTIONS["batch_size_eval"].rule
  parser.number("--batch_size", rule, 32, "images per pass")
  parser.dtype()
  parser.add_argument(
    "--stored",
    choices=("float32", "bfloat16"),
    default="bfloat16",
    help="dtype of the written values; bfloat16 takes half of the space, with "
    "8 bits of mantissa (default: %(default)s)",
  )
  parser.number(
    "--memory_mib",
    Number(1, 2**20, "MiB"),
    2048,
    "memory for batches of images and for decoding",
  )
  bulk_options.add(parser, required=True)
  return parser


def _embed(parser: Parser, argv: Sequence[str]) -> int:
  arguments = parser.parse(argv)
  bulk_options.require_used(parser, arguments)
  job = embeddings.EmbeddingJob(
    backbone=bulk_options.whole_path(arguments.backbone),
    task=bulk_options.whole_path(arguments.task),
    batch_size=arguments.batch_size,
    dtype=bulk_options.compute_dtype(arguments),
    stored=arguments.stored,
    memory_mib=arguments.memory_mib,
  )
  return bulk_options.run_job(arguments, job)
