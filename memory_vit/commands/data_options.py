"""Options of commands that evaluate tasks, each on its own data set."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.commands.command_line import TRUST_HELP, Parser

with epy.lazy_imports():  # --help and errors do not wait for these imports
  from memory_vit.data import datasets
  from memory_vit.evaluation import task_data

if TYPE_CHECKING:
  from memory_vit.data.split import Split
  from memory_vit.data.split_ref import SplitRef
  from memory_vit.evaluation.task_data import Given
  from memory_vit.model.task import Task


def add(parser: Parser, *, original: bool) -> None:
  """Add options that name data of tasks and, if `original`, of the backbone."""

  def whose(metavar: str, none: str = "") -> str:
    if not original:
      return "for all tasks, or for one"
    return (
      "for all tasks, for one, or for the original outputs of the backbone "
      f"(backbone={metavar}{none})"
    )

  parser.strings(
    "--data_dir",
    "[TASK=]DIR",
    f"directory of data sets, {whose('DIR')}. Each task names the data set "
    "that it needs",
  )
  none = "; backbone= for none"
  parser.strings(
    "--data",
    "[TASK=]NAME",
    f"data set, as in config.data.name, {whose('NAME', none)}. TFDS may "
    "download a data set that is named here",
  )
  parser.strings(
    "--data_root",
    "DIR",
    "also open data directories that tasks name, if they lie below DIR (after "
    "links are resolved); may be repeated",
  )
  parser.strings(
    "--split",
    "[TASK=]SPLIT",
    f"split to evaluate instead of the test split, {whose('SPLIT')}",
  )
  parser.option(
    "--cache_gib",
    "data.cache_gib",
    "maximum size of a data set without random access, because it is read into "
    "memory",
  )
  parser.option(
    "--max_bad",
    "data.max_bad",
    "maximum number of unreadable images to skip in a data set; they are "
    "counted",
  )
  parser.option(
    "--stall_timeout",
    "stall_timeout",
    "seconds without a new image after which the process ends with status 74; "
    "0 sets no limit",
  )
  parser.switch("--trust_data_code", TRUST_HELP)


def is_given(arguments: argparse.Namespace) -> bool:
  return bool(
    arguments.data or arguments.data_dir or arguments.data_root
    or arguments.split
  )  # fmt: skip


def given(
  arguments: argparse.Namespace, owners: Iterable[str], original: str = ""
) -> Given:
  """Return the options that name data, by task; see `task_data.parse`."""
  owners = list(owners)

  def parsed(option: str, texts: Sequence[str]) -> dict[str, str]:
    return task_data.parse(option, texts, owners, original)

  return task_data.Given(
    data=parsed("--data", arguments.data),
    directories=parsed("--data_dir", arguments.data_dir),
    splits=parsed("--split", arguments.split),
    roots=tuple(arguments.data_root),
  )


def open_split(ref: SplitRef, arguments: argparse.Namespace) -> Split:
  """Open a split with the limits of the command line."""
  return datasets.open_ref(
    dataclasses.replace(
      ref,
      cache_gib=arguments.cache_gib,
      max_bad=arguments.max_bad,
      stall_timeout=arguments.stall_timeout,
      trust_code=arguments.trust_data_code,
    )
  )


def open_all(
  tasks: Sequence[Task],
  chosen: Mapping[str, SplitRef],
  arguments: argparse.Namespace,
) -> list[tuple[Split, list[str]]]:
  """Return each split, opened once, with the names of its tasks."""
  owners: dict[SplitRef, list[Task]] = {}
  for task in tasks:
    names = task.spec.class_names
    ref = dataclasses.replace(chosen[task.name], class_names=names)
    owners.setdefault(ref, []).append(task)
  opened = [
    (open_split(ref, arguments), group) for ref, group in owners.items()
  ]
  for source, group in opened:
    for task in group:
      task_data.require_classes(task, source)
  return [(source, [task.name for task in group]) for source, group in opened]
