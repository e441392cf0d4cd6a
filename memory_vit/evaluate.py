"""Evaluates tasks in one model, each on its own data set.

  python -m memory_vit.evaluate --backbone=NPZ --task=DIR [--task=DIR ...] \\
    --data_dir=[TASK=]DIR [--data=[TASK=]NAME ...]

Which data are opened the command line says: what a task says of the data set of
its run names it inside of a directory that is given here, and else is a hint.
With --verify every task is compared with itself alone, and the original outputs
with those of the plain ViT; the exit status is then 1 where something differs.
It is 2 for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.cli import commands
from memory_vit.cli.command_line import TRUST_HELP, Parser
from memory_vit.errors import TaskError
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.tables import table

with epy.lazy_imports():  # once the command line is known to be right
  from memory_vit.data import datasets, image_ops
  from memory_vit.evaluation import metrics, task_data, verify
  from memory_vit.model import task as task_sets
  from memory_vit.runtime import sharding
  from memory_vit.tasks import manifest, model_loading, store

if TYPE_CHECKING:
  from memory_vit.data.reader import Reader
  from memory_vit.data.split_ref import SplitRef
  from memory_vit.evaluation.task_data import Upstream
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.task import EvalPreprocessing, Task


def main(argv: Sequence[str] | None = None) -> int:
  """Run the command; return its exit status."""
  return commands.run_command(lambda: _run(_parser().parse_args(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="python -m memory_vit.evaluate",
    description="Evaluates tasks in one model, each on its own data set.",
  )
  parser.model(256, "images in a batch")
  parser.strings(
    "--data_dir",
    "[TASK=]DIR",
    "where the data sets are: of all tasks, of one, or of the original one "
    "(backbone=DIR). Which of those in it a task needs the task says",
  )
  parser.strings(
    "--data",
    "[TASK=]NAME",
    "the data set, as config.data.name: of all tasks, of one, or of the "
    "original one (backbone=NAME; backbone= for none). TFDS may download what "
    "is named here",
  )
  parser.strings(
    "--data_root",
    "DIR",
    "also open directories that tasks name, where they lie below this one, "
    "links resolved; may be given several times",
  )
  parser.strings(
    "--split",
    "[TASK=]SPLIT",
    "evaluate this one, instead of the test split: of all tasks, of one, or of "
    "the original one (backbone=SPLIT)",
  )
  parser.option(
    "--cache_gib",
    "data.cache_gib",
    "greatest size of a data set without random access, which is read into "
    "memory",
  )
  parser.option(
    "--max_bad",
    "data.max_bad",
    "so many images of a data set may be left out (and counted) as they "
    "cannot be read",
  )
  parser.option(
    "--stall_timeout",
    "stall_timeout",
    "end, with status 74, where images are waited for so many seconds; 0 "
    "waits for ever",
  )
  parser.option(
    "--fsdp",
    "mesh.fsdp",
    "split the backbone over so many devices, see config.mesh",
  )
  parser.switch("--trust_data_code", TRUST_HELP)
  parser.switch(
    "--verify", "compare with each task alone, and with the plain ViT"
  )
  parser.add_argument(
    "--json", metavar="FILE", help="write the numbers to a file"
  )
  return parser


def _run(arguments: argparse.Namespace) -> int:
  written = commands.json_file(arguments.json)
  # First of all: what is missing on the command line costs nothing.
  chosen, own = _choose(arguments)
  backbone, tasks = model_loading.load_model(
    arguments.backbone, arguments.task, arguments.dtype
  )
  mesh = sharding.make_mesh(fsdp=arguments.fsdp)
  sharding.require_divisible(arguments.batch_size, mesh, "--batch_size")
  params = sharding.put_backbone(backbone.params, mesh)
  backbone = dataclasses.replace(backbone, params=params)
  # All data sets first: a wrong one must not cost an evaluation.
  opened = _open_all(tasks, chosen, arguments)
  upstream = own and _open_upstream(backbone, own, arguments)
  evaluator = verify.Evaluator(backbone, tasks, mesh, arguments.batch_size)

  results: dict[str, dict[str, Any]] = {}
  for source, names in opened:
    results |= evaluator.evaluate(source, names, verify=arguments.verify)
  result: dict[str, Any] = {
    "backbone": {
      "fingerprint": backbone.fingerprint,
      "variant": backbone.config.variant,
      "dtype": arguments.dtype,
    },
    "tasks": [results[task.spec.name] for task in tasks],
    "timing": evaluator.timing(opened[0][0]),
  }
  verified = True  # nothing contradicts it where nothing is compared
  if arguments.verify:
    result["backbone"]["upstream"] = upstream and evaluator.upstream(*upstream)
    verified = verify.verified(result, arguments.dtype)
    result["verified"] = verified
  commands.show(text(result))
  if written:
    commands.write_json(written, result)
  return 0 if verified else 1


def _choose(
  arguments: argparse.Namespace,
) -> tuple[dict[str, SplitRef], Upstream | None]:
  """Choose the data to open; nothing is opened yet."""
  tasks = [manifest.read(path) for path in store.find_tasks(arguments.task)]
  owners = [task.spec.name for task in tasks]
  owners += [task_sets.BACKBONE] if arguments.verify else []
  given = task_data.Given(
    data=task_data.parse("--data", arguments.data, owners),
    directories=task_data.parse("--data_dir", arguments.data_dir, owners),
    splits=task_data.parse("--split", arguments.split, owners),
    roots=tuple(arguments.data_root),
  )
  return task_data.choose(tasks, given, upstream=arguments.verify)


def _open(ref: SplitRef, arguments: argparse.Namespace) -> Reader:
  """Open a split, as patient and as lenient as was asked for."""
  return datasets.open_reader(
    dataclasses.replace(
      ref,
      cache_gib=arguments.cache_gib,
      max_bad=arguments.max_bad,
      stall_timeout=arguments.stall_timeout,
      trust_code=arguments.trust_data_code,
    )
  )


def _open_all(
  tasks: Sequence[Task],
  chosen: Mapping[str, SplitRef],
  arguments: argparse.Namespace,
) -> list[tuple[Reader, list[str]]]:
  """Every data set that is needed, with the tasks that are evaluated on it."""
  names: dict[SplitRef, list[str]] = {}
  for task in tasks:
    names.setdefault(chosen[task.name], []).append(task.name)
  sources = {ref: _open(ref, arguments) for ref in names}
  for task in tasks:
    task_data.require_classes(task, sources[chosen[task.name]])
  return [(sources[ref], some) for ref, some in names.items()]


def _open_upstream(
  backbone: Backbone, own: Upstream, arguments: argparse.Namespace
) -> tuple[Reader, EvalPreprocessing]:
  """The backbone's own task, and how its images are prepared."""
  size = backbone.config.image_size
  preprocessing = image_ops.evaluation_of(
    own.eval_crop, own.resize, size, backbone.evaluation
  )
  source = _open(own.ref, arguments)
  if source.num_classes != backbone.config.num_classes:
    raise TaskError(
      f"{source.name} has {source.num_classes} classes, the head of the "
      f"backbone has {backbone.config.num_classes}."
    )
  return source, preprocessing


def text(result: Mapping[str, Any]) -> str:
  """The result for people."""
  verified = "verified" in result
  header: tuple[str, ...]
  header = ("task", "data set", "split", "examples", "top-1", "top-5")
  if verified:
    header += ("alone", "max. difference")
  skipped = [
    f"{task['name']}: {task['skipped']:,} images of {escaped(task['data'])} "
    "could not be read, and do not count"
    for task in result["tasks"]
    if task["skipped"]
  ]
  timing = result["timing"]
  plain = timing["plain"]
  lines = [
    table(header, [_row(task) for task in result["tasks"]]),
    *skipped,
    "",
    f"a batch of {timing['batch_size']}: plain ViT {plain:.3f} s; "
    f"{timing['tasks']} task(s) in one pass {timing['together'] / plain:.2f} "
    f"times that, one after the other {timing['one_by_one'] / plain:.2f} times",
  ]
  if verified:
    equal = all(t["alone"]["outputs_bit_equal"] for t in result["tasks"])
    lines += [
      f"original outputs equal to the bit to those of the plain ViT: "
      f"{'yes' if equal else 'NO'}",
      *_upstream_line(result["backbone"]["upstream"]),
      f"verified: {'yes' if result['verified'] else 'NO'}",
    ]
  return "\n".join(lines)


def _row(task: Mapping[str, Any]) -> tuple[str, ...]:
  """A task in the table; two more columns where it was verified."""
  row = (
    task["name"],
    escaped(task["data"]),
    escaped(task["split"]),
    f"{task['examples']:,}",
    f"{100 * task['accuracy']:.2f} %",
    f"{100 * task['top5']:.2f} %" if metrics.tells_top5(task) else "-",
  )
  if "alone" not in task:
    return row
  difference = task["alone"]["max_difference"]
  return (
    *row,
    f"{100 * task['alone']['accuracy']:.2f} %",
    "not finite" if difference is None else f"{difference:.1e}",
  )


def _upstream_line(upstream: Mapping[str, Any] | None) -> list[str]:
  if not upstream:
    return []
  return [
    f"original task, {escaped(upstream['data'])} ({upstream['examples']:,} "
    "images): "
    f"{100 * upstream['accuracy']:.2f} % with all tasks in the pass, "
    f"{100 * upstream['accuracy_plain']:.2f} % by the plain ViT; equal to the "
    f"bit: {'yes' if upstream['outputs_bit_equal'] else 'NO'}"
  ]


if __name__ == "__main__":
  commands.leave_current_directory()
  sys.exit(main())
