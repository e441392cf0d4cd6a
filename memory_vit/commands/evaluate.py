"""Evaluates tasks in one model, each on its own data set.

  memory-vit evaluate --backbone=NPZ --task=DIR [--task=DIR ...] \\
    --data_dir=[TASK=]DIR [--data=[TASK=]NAME ...]

Tasks of all kinds (classes, labels, values) share a pass. A task whose regime
shares no pass (probe, full, ...) is evaluated alone. The command line chooses
the data: the data set that a task names is opened only if it is inside a
directory given here. --verify compares every task with the same task evaluated
alone, and the original outputs with those of the plain ViT; the exit status is
1 if something differs, 2 for bad input. --report=DIR writes a page for every
task, with its metrics, figures and mistakes, and tables of all predictions
(docs/evaluation.md of the repository).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.commands import console, data_options
from memory_vit.commands.command_line import Parser
from memory_vit.errors import ConfigError
from memory_vit.kinds import CLASSES, KINDS
from memory_vit.runtime import files, paths, progress_bar
from memory_vit.runtime.messages import brief, counted, escaped
from memory_vit.runtime.options import Number
from memory_vit.runtime.tables import table

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit import reports
  from memory_vit.data import crop_sizes
  from memory_vit.evaluation import task_data, verify
  from memory_vit.images import image_files
  from memory_vit.model import task as task_sets
  from memory_vit.reports import directory
  from memory_vit.runtime import sharding
  from memory_vit.tasks import find, model_loading

if TYPE_CHECKING:
  from pathlib import Path

  from memory_vit.data.split import Split
  from memory_vit.data.split_ref import SplitRef
  from memory_vit.evaluation.task_data import Upstream
  from memory_vit.model.backbone import Backbone
  from memory_vit.model.task import EvalPreprocessing, Task


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return console.run_command(lambda: _run(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit evaluate",
    description="Evaluates tasks in one model, each on its own data set.",
  )
  parser.model(256, "images in a batch")
  data_options.add(parser, original=True)
  parser.option(
    "--fsdp",
    "mesh.fsdp",
    "number of devices over which the backbone is sharded, see config.mesh",
  )
  parser.switch(
    "--verify", "compare with each task alone, and with the plain ViT"
  )
  parser.add_argument(
    "--unknown_data",
    metavar="DIR",
    help="directory of images that belong to no class, to measure how well "
    "tasks of classes tell them from images of their classes",
  )
  parser.add_argument(
    "--json", metavar="FILE", help="write the numbers to a file"
  )
  parser.add_argument(
    "--report",
    metavar="DIR",
    help="write a page, figures and tables of every task to DIR/TASK; an "
    "earlier report is replaced",
  )
  parser.number(
    "--report_images",
    Number(0, 200, "images on one page"),
    24,
    "number of images in a report, which show the worst mistakes; 0 for none",
  )
  return parser


def _run(arguments: argparse.Namespace) -> int:
  written = console.json_file(arguments.json, "backbone")
  report = _report_directory(arguments.report, written)
  progress_bar.log_to_stderr()
  # Check all options before loading anything, so that mistakes show at once.
  chosen, original = _choose(arguments)
  dtype = console.compute_dtype(arguments.dtype)
  backbone, tasks = model_loading.load_model(
    arguments.backbone, arguments.task, dtype, any_regime=True
  )
  unknown = _unknown_data(arguments.unknown_data, tasks)
  mesh = sharding.make_mesh(fsdp=arguments.fsdp)
  sharding.require_divisible(arguments.batch_size, mesh, "--batch_size")
  params = sharding.put_backbone(backbone.params, mesh)
  backbone = dataclasses.replace(backbone, params=params)
  # Open all data sets before evaluating, so that a wrong data set fails early.
  opened = data_options.open_all(tasks, chosen, arguments)
  upstream = original and _open_upstream(backbone, original, arguments)
  evaluator = verify.Evaluator(backbone, tasks, mesh, arguments.batch_size)

  results: dict[str, dict[str, Any]] = {}
  predictions: dict[str, Any] = {}
  for source, names in opened:
    evaluated, predicted = evaluator.evaluate(
      source,
      names,
      verify=arguments.verify,
      predictions=report is not None or unknown is not None,
    )
    results |= evaluated
    predictions |= predicted
  if unknown:
    known = {
      task.name: predictions[task.name] for task in tasks if _rejects(task)
    }
    for name, judged in evaluator.unknown_images(unknown, known).items():
      results[name]["unknown_data"] = dataclasses.asdict(judged)
  result: dict[str, Any] = {
    "backbone": {
      "fingerprint": backbone.fingerprint,
      "variant": backbone.config.variant,
      "dtype": dtype,
    },
    "tasks": [results[task.spec.name] for task in tasks],
    "timing": evaluator.timing(opened[0][0]),
  }
  verified = True  # without --verify, the exit status is 0
  if arguments.verify:
    result["backbone"]["upstream"] = upstream and evaluator.upstream(*upstream)
    verified = verify.verified(result)
    result["verified"] = verified
  console.show(text(result))
  if written:
    files.write_json(written, result)
  if report:
    splits = {name: split for split, names in opened for name in names}
    _write_report(report, tasks, splits, predictions, result, arguments)
  return 0 if verified else 1


def _rejects(task: Task) -> bool:
  """Return whether a task can reject images that belong to no class."""
  return "unknown" in task.spec.kind.kind.stated


def _unknown_data(text: str | None, tasks: Sequence[Task]) -> Path | None:
  if text is None:
    return None
  if not any(map(_rejects, tasks)):
    raise ConfigError(
      "--unknown_data needs a task of classes, but all given tasks are of "
      f"other kinds: {brief([task.name for task in tasks])}."
    )
  directory = paths.local(text, "--unknown_data")
  if not directory.is_dir():
    raise ConfigError(
      f"--unknown_data {brief(text)} is not a directory: expected a "
      "directory with images."
    )
  # Refuse an empty directory now, not after a long evaluation.
  if not any(not file.reason for file in image_files.find_images([text])):
    raise ConfigError(
      f"--unknown_data {brief(text)} holds no images: expected a directory "
      "with images."
    )
  return directory


def _write_report(
  path: Path,
  tasks: Sequence[Task],
  readers: Mapping[str, Split],
  predictions: Mapping[str, Any],
  result: Mapping[str, Any],
  arguments: argparse.Namespace,
) -> None:
  evaluations = [
    reports.TaskEvaluation.of(
      task,
      readers[task.name],
      predictions[task.name],
      dtype=result["backbone"]["dtype"],
      shown_images=arguments.report_images,
      alone=entry.get("alone"),
    )
    for task, entry in zip(tasks, result["tasks"], strict=True)
  ]
  reports.write_reports(path, evaluations)
  console.show(f"report: {escaped(str(reports.first_page(path)))}")


def _report_directory(text: str | None, written: Path | None) -> Path | None:
  if text is None:
    return None
  report = directory.REPORT.require_own(text)
  # Refuse a JSON file inside the report's directory, because a new report
  # replaces the whole directory, and would delete the JSON file.
  place = written and written.resolve()
  if place and report.resolve() in (place, *place.parents):
    raise ConfigError(
      f"--json {brief(str(written))} is inside --report {brief(text)} or is "
      "the same path, but a report replaces its whole directory: expected a "
      "JSON file elsewhere."
    )
  return report


def _choose(
  arguments: argparse.Namespace,
) -> tuple[dict[str, SplitRef], Upstream | None]:
  """Return ({task: split}, data for the original head).

  The second item is None without --verify, or if no data are named for the
  original head.
  """
  tasks = [manifest for _, manifest in find.find_tasks(arguments.task)]
  owners = [task.spec.name for task in tasks]
  owners += [task_sets.BACKBONE] if arguments.verify else []
  if arguments.verify:
    verify.require_comparable([task.spec for task in tasks])
  flags = data_options.given(arguments, owners, original="--verify")
  return task_data.choose(tasks, flags, upstream=arguments.verify)


def _open_upstream(
  backbone: Backbone, original: Upstream, arguments: argparse.Namespace
) -> tuple[Split, EvalPreprocessing]:
  """Return (split, preprocessing) to evaluate the backbone's original head."""
  size = backbone.config.image_size
  preprocessing = crop_sizes.preprocessing_of(
    original.eval_crop, original.resize, size, backbone.preprocessing
  )
  return data_options.open_split(original.ref, arguments), preprocessing


def text(result: Mapping[str, Any]) -> str:
  """Return the results as text for the terminal."""
  verified = "verified" in result
  by_kind = [
    [task for task in result["tasks"] if task["kind"] == kind] for kind in KINDS
  ]
  problems = [
    problem
    for task in result["tasks"]
    for problem in _problems(task["name"], task)
  ]
  lines = [
    "\n\n".join(_table(tasks, verified) for tasks in by_kind if tasks),
    *itertools.chain.from_iterable(map(_rejection, result["tasks"])),
    *problems,
    "",
    _timing_line(result["timing"]),
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


def _rejection(task: Mapping[str, Any]) -> list[str]:
  """Return lines about images that a task rejects as unknown."""
  name, lines = task["name"], []
  if rejection := task.get("rejection"):
    lines.append(
      f"{name}: rejects {_percent(rejection['rejected'])} of these images as "
      f"unknown; accuracy on accepted images {_percent(rejection['accuracy'])}"
    )
  if unknown := task.get("unknown_data"):
    line = (
      f"{name}: {counted(unknown['images'], 'image')} that belong to no class, "
      f"from {escaped(unknown['directory'])}: area under the ROC curve "
      f"{unknown['area']:.3f}"
    )
    if unknown["rejected"] is not None:
      line += f"; {_percent(unknown['rejected'])} are rejected as unknown"
    if unknown["skipped"]:
      line += f"; {counted(unknown['skipped'], 'image')} could not be used"
    lines.append(line)
  return lines


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{100 * share:.2f} %"


def _timing_line(timing: Mapping[str, Any]) -> str:
  plain, tasks = timing["plain"], timing["tasks"]
  line = (
    f"a batch of {timing['batch_size']}: plain ViT {plain:.3f} s; "
    f"{counted(tasks, 'task')} in one pass {timing['together'] / plain:.2f} "
    "times that"
  )
  if tasks == 1:  # with one task, there is only one pass to time
    return line
  return f"{line}, one after the other {timing['one_by_one'] / plain:.2f} times"


def _table(tasks: Sequence[Mapping[str, Any]], verified: bool) -> str:
  """Return a table of tasks of one kind; `verified` adds two columns."""
  rows = []
  for task in tasks:
    kind = KINDS[task["kind"]]
    units = [*map(escaped, task.get("units", ()))]
    columns = {
      "task": task["name"], "data set": _data_of(task),
      "split": escaped(task["split"]), "examples": f"{task['examples']:,}",
      **kind.table(task["metrics"], _outputs(task), units),
    }  # fmt: skip
    if verified:
      difference = task["alone"]["max_difference"]
      columns["alone"] = kind.score.text(task["alone"]["score"])
      columns["max. difference"] = (
        "not finite" if difference is None else f"{difference:.1e}"
      )
    rows.append(columns)
  return table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _outputs(task: Mapping[str, Any]) -> int:
  """Return the number of outputs of a task, from its metrics per output."""
  return len(next(iter(task["per_output"].values())))


def _data_of(entry: Mapping[str, Any]) -> str:
  """Return the name and directory of the data set that `entry` names."""
  return escaped(f"{entry['data']} {entry['directory']}".rstrip())


def _problems(name: str, entry: Mapping[str, Any]) -> list[str]:
  """Return warnings about unreadable images, and about non-finite outputs."""
  lines, data = [], _data_of(entry)
  if entry["skipped"]:
    lines.append(
      f"{name}: {counted(entry['skipped'], 'image')} of {data} could not be "
      "read: left out of these numbers"
    )
  if entry["not_finite"]:
    lines.append(
      f"{name}: outputs for {counted(entry['not_finite'], 'image')} of {data} "
      f"are not finite: {KINDS[entry.get('kind', CLASSES.name)].not_finite}"
    )
  return lines


def _upstream_line(upstream: Mapping[str, Any] | None) -> list[str]:
  if not upstream:
    return []
  label, accuracy = "original outputs", ""
  if upstream["score"] is not None:
    label = "original task"
    accuracy = (
      f"{100 * upstream['score']:.2f} % with all tasks in the pass, "
      f"{100 * upstream['score_plain']:.2f} % by the plain ViT; "
    )
  return [
    f"{label}, {_data_of(upstream)} ({upstream['examples']:,} images): "
    f"{accuracy}equal to the bit: "
    f"{'yes' if upstream['outputs_bit_equal'] else 'NO'}",
    *_problems(label, upstream),
  ]
