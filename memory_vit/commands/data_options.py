"""The options of commands that evaluate tasks, each on its own data set."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epy

from memory_vit.commands.command_line import TRUST_HELP, Parser

with epy.lazy_imports():  # --help and wrong arguments do not wait for them
  from memory_vit.data import datasets
  from memory_vit.evaluation import task_data

if TYPE_CHECKING:
  from memory_vit.data.split import Split
  from memory_vit.data.split_ref import SplitRef
  from memory_vit.evaluation.task_data import Given
  from memory_vit.model.task import Task


def add(parser: Parser, *, original: bool) -> None:
  """Add the options that say which data are opened, and how.

  Args:
    parser: of the command.
    original: whether the command also evaluates the backbone's own task.
  """

  def whose(metavar: str, none: str = "") -> str:
    if not original:
      return "of all tasks, or of one"
    return (
      f"of all tasks, of one, or of the original one (backbone={metavar}{none})"
    )

  parser.strings(
    "--data_dir",
    "[TASK=]DIR",
    f"where the data sets are: {whose('DIR')}. Which of those in it a task "
    "needs the task says",
  )
  none = "; backbone= for none"
  parser.strings(
    "--data",
    "[TASK=]NAME",
    f"the data set, as config.data.name: {whose('NAME', none)}. TFDS may "
    "download what is named here",
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
    f"evaluate this one, instead of the test split: {whose('SPLIT')}",
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
  parser.switch("--trust_data_code", TRUST_HELP)


def is_given(arguments: argparse.Namespace) -> bool:
  """Whether any data are named."""
  return bool(
    arguments.data or arguments.data_dir or arguments.data_root
    or arguments.split
  )  # fmt: skip


def given(
  arguments: argparse.Namespace, owners: Iterable[str], original: str = ""
) -> Given:
  """What the command line says of the data of tasks.

  Args:
    arguments: of the command.
    owners: names of the tasks that data may be named for.
    original: the option with which the backbone's own task is among them; ""
      for a command that has none.

  Raises:
    ConfigError: for a task that is not there, or what is said twice.
  """
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
  """Open a split, as patient and as lenient as was asked for."""
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
  """Open every data set that is needed, once.

  Args:
    tasks: those that are evaluated.
    chosen: {name of a task: its data}.
    arguments: of the command.

  Returns:
    Data sets, each with the names of the tasks that are evaluated on it.

  Raises:
    TaskError: for a data set with other classes than a task has learned.
  """
  names: dict[SplitRef, list[str]] = {}
  for task in tasks:
    names.setdefault(chosen[task.name], []).append(task.name)
  sources = {ref: open_split(ref, arguments) for ref in names}
  for task in tasks:
    task_data.require_classes(task, sources[chosen[task.name]])
  return [(sources[ref], task_names) for ref, task_names in names.items()]
