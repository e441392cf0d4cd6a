r"""Exports a backbone and its tasks as one function that servers can call.

  memory-vit export --backbone=NPZ --task=DIR [--task=DIR ...] \
    --format={stablehlo,saved_model,onnx,safetensors,orbax} --out=DIR

The exported model is run in another process and compared with this package. If
its outputs differ too much, the exit status is 2 and the export is deleted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.commands import console
from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import show
from memory_vit.exports.image_input import KINDS, ImageInput, parse_size
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.tables import aligned

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.exports import export
  from memory_vit.tasks import model_loading

if TYPE_CHECKING:
  from memory_vit.exports.export_manifest import ExportReport

_FORMATS = ("stablehlo", "saved_model", "onnx", "safetensors", "orbax")
_MIB = 2**20


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return console.run_command(lambda: _export(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit export",
    description="Exports a backbone and its tasks as one function.",
  )
  parser.model(8, "random images on which outputs and speed are compared")
  parser.add_argument(
    "--format",
    required=True,
    choices=_FORMATS,
    help="stablehlo, saved_model and onnx write one function for servers; "
    "safetensors writes the tasks alone, as files for a model hub, with a "
    "README; orbax writes all parameters, as a checkpoint",
  )
  parser.add_argument(
    "--out",
    required=True,
    metavar="DIR",
    help="output directory; an earlier export is replaced",
  )
  parser.add_argument(
    "--input",
    choices=KINDS,
    default="float32",
    help="input of the function: images of the model's size in [-1, 1], or "
    "pixels in [0, 255], which it resizes and scales (default: %(default)s)",
  )
  parser.add_argument(
    "--input_size",
    metavar="HEIGHTxWIDTH",
    help="fixed image size for --input=uint8; required by ONNX",
  )
  parser.switch(
    "--activation",
    "return probabilities of classes and labels, and values in their units, "
    "instead of the raw outputs of the heads",
  )
  return parser


def _export(arguments: argparse.Namespace) -> int:
  size = arguments.input_size
  images = ImageInput(
    kind=arguments.input, size=parse_size(size) if size else None
  )
  export.require_options(
    arguments.format, images, arguments.batch_size, arguments.activation
  )
  backbone, tasks = model_loading.load_model(
    arguments.backbone,
    arguments.task,
    console.compute_dtype(arguments.dtype),
    any_regime=True,
  )
  report = export.export_model(
    backbone,
    tasks,
    arguments.out,
    format=arguments.format,
    images=images,
    examples=arguments.batch_size,
    activation=arguments.activation,
  )
  show(_text(arguments.out, report))
  return 0


def _text(out: str, report: ExportReport) -> str:
  """Return a summary: size, speed, and difference from memory_vit outputs."""
  size = sum(file["bytes"] for file in report.files.values())
  names = ", ".join(task["name"] for task in report.tasks)
  rows = [
    ("written", f"{escaped(out)}: {report.format}, {size / _MIB:,.1f} MiB"),
    ("tasks", names),
  ]
  comparison = report.comparison
  if comparison:
    for signature, shares in comparison["max_difference"].items():
      differences = ", ".join(f"{n} {share:.1e}" for n, share in shares.items())
      limit = comparison["tolerance"][signature]
      rows += [
        (f"difference, {signature}", differences),
        ("allowed", f"{limit:g} of the greatest output"),
      ]
    rows += [
      ("loading", f"{comparison['load_seconds']:.2f} s"),
      ("first call", f"{comparison['first_call_seconds']:.2f} s"),
      (f"{comparison['images']} images", f"{comparison['call_seconds']:.4f} s"),
      ("by memory_vit", f"{comparison['memory_vit_call_seconds']:.4f} s"),
    ]
  return aligned(rows)
