"""Writes a backbone in another format, or converts tasks from PyTorch.

  memory-vit convert SOURCE OUT.npz [--mean=R,G,B --std=R,G,B]
  memory-vit convert SOURCE OUT_DIR --format=hf
  memory-vit convert --task=FILE.pt --backbone=SOURCE OUT_DIR

SOURCE is whatever other commands accept as --backbone: a model directory of
transformers or timm, hf://OWNER/NAME, a .safetensors file, an .npz file.
OUT.npz has bitwise identical parameters and the same fingerprint; it also holds
the SHA-256 and the licence of its source. --mean and --std are for models of
transformers and timm that do not state how images in [0, 1] are normalized.

FILE.pt is a state dict of the public PyTorch reproduction, `MemoryCapableViT`,
trained on the ViT of transformers in SOURCE. Each of its heads becomes a task,
OUT_DIR/head-1 and so on; this needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from etils import epy

from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import run_command, show
from memory_vit.errors import ConfigError, TaskError
from memory_vit.runtime import paths
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.progress_bar import ProgressBar

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.backbones import describe, load, save
  from memory_vit.tasks import store, torch_import


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return run_command(lambda: _run(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit convert",
    description="Writes a backbone in another format, or converts tasks from "
    "PyTorch.",
  )
  parser.add_argument(
    "paths",
    nargs="+",
    metavar="SOURCE OUT",
    help="a backbone (a model directory of transformers or timm, "
    "hf://OWNER/NAME[@REVISION], a .safetensors file with its config.json "
    "beside it, an .npz file), and the file or directory to write; with --task "
    "only the directory to write",
  )
  parser.add_argument(
    "--format",
    choices=("npz", "hf"),
    help='format to write a backbone in: "npz" for memory_vit, or "hf", a '
    "directory for transformers (default: npz)",
  )
  parser.add_argument(
    "--task",
    metavar="FILE.pt",
    help="a state dict of the public PyTorch reproduction (MemoryCapableViT), "
    "whose heads become tasks; needs torch",
  )
  parser.add_argument(
    "--backbone",
    metavar="SOURCE",
    help="with --task: the transformers model that the tasks were trained on",
  )
  examples = {"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225"}
  for name, example in examples.items():
    parser.add_argument(
      f"--{name}",
      type=lambda text: text.split(","),
      metavar="R,G,B",
      help=f"{name} that the model normalizes images in [0, 1] with, such as "
      f"{example}; for models whose files state none",
    )
  return parser


def _run(arguments: argparse.Namespace) -> int:
  normalization = {"mean": arguments.mean, "std": arguments.std}
  expected = 1 if arguments.task else 2
  if len(arguments.paths) != expected or (
    bool(arguments.task) != bool(arguments.backbone)
  ):
    raise ConfigError(
      "the command line: expected SOURCE OUT, or --task=FILE.pt "
      "--backbone=SOURCE OUT_DIR; --help lists all options."
    )
  *source, out = arguments.paths
  if arguments.task:
    if arguments.format:
      raise ConfigError(
        "--format applies only when a backbone is written, and --task does not "
        "write one: leave out --format."
      )
    return _convert_tasks(
      arguments.task, arguments.backbone, out, normalization
    )
  return _convert(source[0], out, arguments.format or "npz", normalization)


def _convert_tasks(
  torch_file: str, source: str, directory: str, normalization: dict[str, Any]
) -> int:
  out = paths.local(directory, "OUT_DIR")
  if out.exists() and not (out.is_dir() and not any(out.iterdir())):
    raise TaskError(
      f"{escaped(str(out))} exists, and is left as it is: give a new or an "
      "empty directory."
    )
  file = paths.local(torch_file, "--task", TaskError)
  for task in torch_import.read_tasks(file, source, **normalization):
    store.save_task(task, out / task.name)
    show(f"{escaped(str(out / task.name))}: {task!r}")
  return 0


def _convert(
  path: str, target: str, format: str, normalization: dict[str, Any]
) -> int:
  out = paths.local(target, "OUT")
  if format == "npz":
    if out.suffix != ".npz":
      raise ConfigError(
        f"OUT is {escaped(str(out))}, expected a name that ends in .npz, or "
        "--format=hf to write a directory."
      )
    paths.require_writable(out, "OUT")
  with ProgressBar("converting", 2, "steps", delay=0) as bar:
    bar.note("reading")
    published = load.read_published(path, **normalization)
    backbone = load.to_backbone(published)
    source = published.source or describe.source_of(path)
    bar.update()
    bar.note("writing")
    save.save_backbone(backbone, out, format=format, source=source)
    bar.update()
  licence = f"; licence: {escaped(source.licence)}" if source else ""
  show(f"{escaped(str(out))}: {backbone!r}{licence}")
  return 0
