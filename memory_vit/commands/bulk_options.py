"""Options of commands that read many images and write Parquet."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.commands import console
from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import show
from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.options import Number

with epy.lazy_imports():  # --help and errors do not wait for these imports
  import jax

  from memory_vit.bulk import ray_engine, readers, run

if TYPE_CHECKING:
  from memory_vit.bulk.run import Job

# Maximum number of unreadable images to list on stderr; --output lists all.
_MOST_NAMED = 20
_OF_RAY = ("ray_address", "workers", "worker_cpus", "worker_gpus")
# Options that need --input and --output.
_OPTIONS = (
  "image_column", "label_column", "image_root", "shard_images", "engine",
  *_OF_RAY,
)  # fmt: skip


def add(parser: Parser, *, required: bool) -> None:
  """Add the options of input, output and engine."""
  parser.add_argument(
    "--input",
    action="append",
    default=[],
    required=required,
    metavar="PATH",
    help="an image file; a Parquet or ArrayRecord file of images; or a folder "
    "of files of one of these kinds; may be repeated",
  )
  parser.add_argument(
    "--output",
    required=required,
    metavar="PATH",
    help="a directory for Parquet shards; the same command resumes an "
    "interrupted run",
  )
  parser.add_argument(
    "--image_column",
    default="",
    metavar="NAME",
    help="Parquet column of images: bytes, structs {bytes, path}, or paths "
    "(default: the first of image, bytes, path, file and file_name)",
  )
  parser.add_argument(
    "--label_column",
    default="",
    metavar="NAME",
    help="Parquet column of classes, which is copied to the output (default: "
    "label, if it exists); images in folders get the name of their folder",
  )
  parser.add_argument(
    "--image_root",
    default="",
    metavar="DIR",
    help="folder of relative paths in Parquet (default: the file's folder)",
  )
  shard = Number(1, 2**24, "images")
  parser.number("--shard_images", shard, 4096, "images per shard")
  _add_engine(parser)


def _add_engine(parser: Parser) -> None:
  parser.add_argument(
    "--engine",
    choices=("local", "ray"),
    default="local",
    help="local: this process; ray: workers of a Ray cluster (default: local)",
  )
  parser.add_argument(
    "--ray_address",
    default="",
    metavar="ADDRESS",
    help="address of a running cluster (default: $RAY_ADDRESS; without it, a "
    "cluster is started here)",
  )
  count = Number(1, 2**16, "processes")
  parser.number("--workers", count, 2, "Ray workers, each with its own model")
  share = Number(0, 2**16, "a number")
  about = "CPUs that Ray reserves for each worker; 0 is Ray's default"
  parser.number("--worker_cpus", share, 0.0, about)
  parser.number("--worker_gpus", share, 0.0, "GPUs per worker, or a fraction")


def compute_dtype(arguments: argparse.Namespace) -> str:
  """Resolve --dtype as `console.compute_dtype` does; refuse "auto" for Ray."""
  if arguments.engine == "local":
    console.recommend_dtype(arguments.dtype)
    return console.compute_dtype(arguments.dtype)
  if arguments.dtype == "auto":
    raise ConfigError(
      "--dtype=auto cannot be used with --engine=ray, because workers may have "
      "other devices: expected --dtype=float32 or --dtype=bfloat16."
    )
  return arguments.dtype or "float32"


def run_job(arguments: argparse.Namespace, job: Job) -> int:
  """Run a bulk job; return 1 if images could not be read, else 0."""
  columns = readers.Columns(
    arguments.image_column, arguments.label_column, arguments.image_root
  )
  engine = None
  if arguments.engine == "ray":
    # Use the CPU here, and leave GPUs and TPUs to the workers.
    jax.config.update("jax_platforms", "cpu")
    engine = ray_engine.RayEngine(
      arguments.workers,
      arguments.worker_cpus,
      arguments.worker_gpus,
      arguments.ray_address,
    )
  summary = run.run_bulk(
    job,
    arguments.input,
    arguments.output,
    columns=columns,
    shard_images=arguments.shard_images,
    engine=engine,
    say=lambda line: show(escaped(line), sys.stderr),
  )
  if summary.errors:
    _name_unreadable(arguments.output, summary)
  show(
    f"{summary.images:,} images, {summary.errors:,} of them unreadable, in "
    f"{summary.shards:,} shards ({summary.made:,} written by this run): "
    f"{escaped(arguments.output)}"
  )
  return 1 if summary.errors else 0


def _name_unreadable(output: str, summary: run.Summary) -> None:
  """Print the first unreadable images, and say where to find the rest."""
  for path, reason in itertools.islice(run.unreadable(output), _MOST_NAMED):
    show(f"skipped {escaped(path)}: {escaped(reason)}", sys.stderr)
  more = summary.errors - _MOST_NAMED
  if more > 0:
    show(
      f"skipped {more:,} more: see rows of the output that have an `error`",
      sys.stderr,
    )


def whole_path(source: str) -> str:
  """Return an existing path as an absolute path, other sources unchanged."""
  path = os.path.expanduser(source)
  return os.path.abspath(path) if os.path.exists(path) else source


def require_used(
  parser: Parser, arguments: argparse.Namespace, *others: str
) -> None:
  """Raise if an option, such as one of `others`, would have no effect."""
  if bool(arguments.input) != bool(arguments.output):
    raise ConfigError(
      "the command line: expected both --input and --output, or neither."
    )
  if not arguments.input:
    names: Sequence[str] = (*_OPTIONS, *others)
    problem = "is for predictions into Parquet: expected --input and --output"
  else:
    names = _OF_RAY if arguments.engine != "ray" else ()
    problem = "is for workers of Ray: expected --engine=ray"
  for name in names:
    if getattr(arguments, name) != parser.get_default(name):
      raise ConfigError(f"--{name} {problem} as well.")
