"""Evaluates tasks in one model, each on its own data set.

  python -m memory_vit.evaluate --backbone=NPZ --task=DIR [--task=DIR ...]

The data set of a task is that of the run that made it. With --verify every task
is compared with itself alone, and the original outputs with those of the plain
ViT; the exit status is then 1 where something differs. It is 2 for bad input.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit import commands, comparison, data, preprocess, records, sharding
from memory_vit.backbone import Backbone
from memory_vit.config import Config
from memory_vit.errors import ConfigError, TaskError
from memory_vit.tables import table
from memory_vit.tasks import BACKBONE, EvalPreprocessing, Task

# What a task may say of its data set. A TFDS name with a namespace in front
# ("community:name") would be fetched from elsewhere, with its code.
_KINDS = {
  "name": str,
  "dir": str,
  "split": str,
  "test": str,
  "validation": str,
  "eval_crop": str,
  "resize": int,
  "cache_gib": float,
}
_DATA_NAME = re.compile(r"digits(:\d-\d)?|\w+(/[\w.-]+)?(:\d+\.\d+\.\d+)?|")


@dataclasses.dataclass(frozen=True)
class Where:
  """A split on which something is evaluated; the fields are as in `config`."""

  name: str
  dir: str
  split: str
  cache_gib: float

  def open(self, arguments: argparse.Namespace) -> data.Source:
    """Opens it, as patient and as lenient as was asked for."""
    return data.open_source(
      self.name,
      self.split,
      self.dir,
      self.cache_gib,
      max_bad=arguments.max_bad,
      stall_timeout=arguments.stall_timeout,
    )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  arguments = _parser().parse_args(argv)
  return commands.run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m memory_vit.evaluate",
    description="Evaluates tasks in one model, each on its own data set.",
  )
  for name, options in {
    "--backbone": {
      "required": True,
      "metavar": "NPZ",
      "help": "an .npz file, its address or a short name",
    },
    "--task": {
      "required": True,
      "action": "append",
      "metavar": "DIR",
      "help": "a task, or a directory of tasks; may be given several times",
    },
    "--data_dir": {
      "action": "append",
      "default": [],
      "metavar": "[TASK=]DIR",
      "help": "where the data sets are, if not where they were: of all, of one "
      "task, or of the original one (backbone=DIR)",
    },
    "--split": {"help": "evaluate this one, instead of the test split"},
    "--verify": {
      "action": "store_true",
      "help": "compare with each task alone, and with the plain ViT",
    },
    "--json": {"metavar": "FILE", "help": "write the numbers to a file"},
    "--batch_size": {"type": int, "default": 256},
    "--max_bad": {
      "type": int,
      "default": Config.data.max_bad,
      "help": "so many pictures of a data set may be left out (and counted) as "
      "they cannot be read (default: %(default)s)",
    },
    "--stall_timeout": {
      "type": float,
      "default": Config.stall_timeout,
      "metavar": "SECONDS",
      "help": "end, with status 74, where pictures are waited for so long "
      "(default: %(default)s; 0 waits for ever)",
    },
    "--fsdp": {
      "type": int,
      "default": Config.mesh.fsdp,
      "help": "split the backbone over so many devices, see config.mesh",
    },
    "--dtype": {"choices": ("float32", "bfloat16"), "default": "float32"},
  }.items():
    parser.add_argument(name, **options)
  return parser


def _run(arguments: argparse.Namespace) -> int:
  if arguments.max_bad < 0 or arguments.stall_timeout < 0:
    raise ConfigError(
      f"--max_bad is {arguments.max_bad}, --stall_timeout "
      f"{arguments.stall_timeout:g}: expected at least 0."
    )
  if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
    raise ConfigError(
      f"--json is {arguments.json}: there is no such directory."
    )
  backbone, tasks = commands.load_model(
    arguments.backbone, arguments.task, arguments.dtype
  )
  mesh = sharding.make_mesh(fsdp=arguments.fsdp)
  sharding.require_divisible(arguments.batch_size, mesh, "--batch_size")
  params = sharding.put_backbone(backbone.params, mesh)
  backbone = dataclasses.replace(backbone, params=params)
  evaluator = comparison.Evaluator(backbone, tasks, mesh, arguments.batch_size)
  # All data sets first: a wrong one must not cost an evaluation.
  moved = _moved(arguments.data_dir)
  opened = _open_all(tasks, moved, arguments)
  upstream = None
  if arguments.verify:
    upstream = _open_upstream(backbone, tasks, moved, arguments)

  results = {}
  for source, names in opened:
    results |= evaluator.evaluate(source, names, verify=arguments.verify)
  result = {
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
    verified = comparison.verified(result, arguments.dtype)
    result["verified"] = verified
  commands.show(_text(result))
  if arguments.json:
    text = json.dumps(result, indent=2) + "\n"
    Path(arguments.json).write_text(text, encoding="utf-8")
  return 0 if verified else 1


def _open_all(
  tasks: Sequence[Task],
  moved: Mapping[str, str],
  arguments: argparse.Namespace,
) -> list[tuple[data.Source, list[str]]]:
  """Every data set that is needed, with the tasks that are evaluated on it."""
  names: dict[Where, list[str]] = {}
  for task in tasks:
    where = _where(task, moved, arguments.split)
    names.setdefault(where, []).append(task.spec.name)
  found = []
  for where, of in names.items():
    source = where.open(arguments)
    for task in tasks:
      if task.spec.name in of:
        _require_classes(task, source)
    found.append((source, of))
  return found


def _open_upstream(
  backbone: Backbone,
  tasks: Sequence[Task],
  moved: Mapping[str, str],
  arguments: argparse.Namespace,
) -> tuple[data.Source, EvalPreprocessing] | None:
  """The backbone's own task, where the run of one of the tasks named it."""
  for task in tasks:
    name, split, directory, crop, resize = _made(
      task, "upstream", "name", "split", "dir", "eval_crop", "resize"
    )
    if name:
      directory = moved.get(BACKBONE, moved.get("", directory))
      (cache_gib,) = _made(task, "data", "cache_gib")
      source = Where(name, directory, split, cache_gib).open(arguments)
      if source.num_classes != backbone.config.num_classes:
        raise TaskError(
          f"{source.name} has {source.num_classes} classes, the head of the "
          f"backbone has {backbone.config.num_classes}."
        )
      size = backbone.config.image_size
      return source, preprocess.evaluation_of(crop, resize, size)
  return None


def _made(task: Task, part: str, *keys: str) -> list[Any]:
  """Options of the run that made a task: `keys` of a part of its config."""
  made = task.provenance.get("config")
  values = made.get(part) if isinstance(made, Mapping) else None
  if not isinstance(values, Mapping) or not values.keys() >= set(keys):
    raise TaskError(
      f"task {task.spec.name!r} does not know its data set: expected config."
      f"{part} with {list(keys)} in its provenance, as memory_vit.main writes."
    )
  for key in keys:
    if not _is_of(_KINDS[key], values[key]):
      raise TaskError(
        f"task {task.spec.name!r}: config.{part}.{key} in its provenance is "
        f"{records.brief(values[key])}, expected a value of type "
        f"{_KINDS[key].__name__}."
      )
  if "name" in keys and not _DATA_NAME.fullmatch(values["name"]):
    raise TaskError(
      f"task {task.spec.name!r} names the data set "
      f"{records.brief(values['name'])}: expected 'folder', 'digits' or a TFDS "
      "name without a namespace."
    )
  return [values[key] for key in keys]


def _is_of(kind: type, value: Any) -> bool:
  if kind is float:
    return type(value) in (int, float) and math.isfinite(value)
  return type(value) is kind


def _where(task: Task, moved: Mapping[str, str], split: str | None) -> Where:
  """The data set of the run that made a task, or what was said instead."""
  name, directory, test, validation, cache_gib = _made(
    task, "data", "name", "dir", "test", "validation", "cache_gib"
  )
  split = split or test or validation
  if not split:
    raise TaskError(
      f"task {task.spec.name!r} was made without a test split: give --split."
    )
  directory = moved.get(task.spec.name, moved.get("", directory))
  return Where(name, directory, split, cache_gib)


def _moved(given: Sequence[str]) -> dict[str, str]:
  """--data_dir=DIR and --data_dir=TASK=DIR -> {task, or "" for all: DIR}."""
  found = {}
  for text in given:
    name, separator, directory = text.partition("=")
    found[name if separator else ""] = directory if separator else text
  return found


def _require_classes(task: Task, source: data.Source) -> None:
  """Refuses a data set with other classes than the task has learned."""
  if task.spec.class_names != source.class_names:
    raise TaskError(
      f"task {task.spec.name!r} has {task.spec.num_classes} classes "
      f"({', '.join(task.spec.class_names[:3])}, ...), the data set "
      f"{source.name!r} has {source.num_classes} "
      f"({', '.join(source.class_names[:3])}, ...)."
    )


def _text(result: Mapping[str, Any]) -> str:
  """The result for people."""
  verified = "verified" in result
  header = ("task", "data set", "split", "examples", "top-1", "top-5")
  if verified:
    header += ("alone", "max. difference")
  rows = []
  for task in result["tasks"]:
    row = [
      task["name"],
      task["data"],
      task["split"],
      f"{task['examples']:,}",
      f"{100 * task['accuracy']:.2f} %",
      f"{100 * task['top5']:.2f} %",
    ]
    if verified:
      row.append(f"{100 * task['alone']['accuracy']:.2f} %")
      difference = task["alone"]["max_difference"]
      row.append("not finite" if difference is None else f"{difference:.1e}")
    rows.append(tuple(row))
  skipped = [
    f"{task['name']}: {task['skipped']:,} pictures of {task['data']} could not "
    "be read, and do not count"
    for task in result["tasks"]
    if task["skipped"]
  ]
  timing = result["timing"]
  plain = timing["plain"]
  lines = [
    table(header, rows),
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


def _upstream_line(upstream: Mapping[str, Any] | None) -> list[str]:
  if not upstream:
    return []
  return [
    f"original task, {upstream['data']} ({upstream['examples']:,} pictures): "
    f"{100 * upstream['accuracy']:.2f} % with all tasks in the pass, "
    f"{100 * upstream['accuracy_plain']:.2f} % by the plain ViT; equal to the "
    f"bit: {'yes' if upstream['outputs_bit_equal'] else 'NO'}"
  ]


if __name__ == "__main__":
  commands.leave_current_directory()
  sys.exit(main())
