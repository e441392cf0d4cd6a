"""Checks the data of a configuration: broken images, labels, duplicates.

  memory-vit check_data --config=folder \\
    --config.data.dir=DATA [--split=SPLIT ...] [--json=FILE]

Reads and decodes every image of data.train, data.validation, data.test and
upstream.split, or of the splits of data.name that --split names. Errors are:
unreadable records and images; targets that are invalid for task.kind (unknown
classes, labels other than 0 and 1, values that are not finite); in the first
split a single class, classes or labels without an image, and constant values;
images that are one pixel wide or high, or too elongated for crops; files that
are in two splits of data.name. Class imbalance, and other files in folders, are
reported but are not errors. The exit status is 0 without errors, 1 with errors,
2 for bad usage, 74 if no image arrives for stall_timeout seconds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.commands import command_line, console, option_help
from memory_vit.config import OPTIONS, Config
from memory_vit.errors import ConfigError
from memory_vit.kinds import KINDS
from memory_vit.runtime import files, messages
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.tables import table

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.data import audit
  from memory_vit.train import progress

_SHOWN = 10  # maximum number of lines per list; the --json file has all lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckArguments:
  """Parsed command line; empty `splits` are those of the configuration."""

  config: Config
  splits: tuple[str, ...]
  json: Path | None


def main(argv: Sequence[str]) -> int:
  arguments = console.parsed(lambda: parse(["memory-vit check_data", *argv]))
  return console.run_command(lambda: execute(arguments))


def parse(argv: Sequence[str]) -> CheckArguments:
  """Read the command line, and run its configuration file."""
  line = command_line.CommandLine(option_help.docstring(__file__), argv)
  splits = line.strings(
    "split", "Check this split of data.name instead; may be repeated."
  )
  file = line.string("json", "Write all findings to a file.")
  config = line.parse()
  rule = OPTIONS["data.train"].rule
  for split in splits():
    if not rule.accepts(split):
      raise ConfigError(
        f"--split is {messages.brief(split)}, expected {rule.expected}."
      )
  return CheckArguments(
    config=config,
    splits=tuple(splits()),
    json=console.json_file(file(), "splits"),
  )


def execute(arguments: CheckArguments) -> int:
  progress.log_to_stderr()
  # Hide warnings about unreadable images, because the report lists them.
  logging.getLogger("memory_vit.data.split").setLevel(logging.ERROR)
  report = audit.audit_data(arguments.config, arguments.splits)
  console.show(text(report))
  if arguments.json:
    files.write_json(arguments.json, report)
  return 0 if report["clean"] else 1


def text(report: dict[str, Any]) -> str:
  header = ("split", "data set", "examples", "classes", "per class", "smallest",
            "largest", "repeated", "problems")  # fmt: skip
  lines = [table(header, [_row(entry) for entry in report["splits"]])]
  for entry in report["splits"]:
    lines += _kinds(entry) + _balanced(entry) + _values(entry)
    lines += _problems(entry)
  for key in ("columns", "skipped"):
    notes = [line for e in report["splits"] for line in e.get(key, ())]
    lines += ["", *dict.fromkeys(notes)] if notes else []
  for shared in report["duplicates"]:
    if shared["count"]:
      first, second = shared["splits"]
      lines.append(f"\n{first} and {second} share {shared['count']:,} files:")
      lines += _some([f"{a} = {b}" for a, b in shared["pairs"]])
  lines += ["", "clean" if report["clean"] else "NOT clean: see above"]
  return "\n".join(lines)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
  start = (entry["role"], f"{entry['data']} {entry['split']}")
  problems = f"{len(entry['problems']):,}"
  if "kind" not in entry:  # the split could not be opened
    return (*start, *["-"] * 6, problems)
  counts = list(entry["per_class"].values())
  return (
    *start,
    f"{entry['examples']:,}",
    f"{entry['classes']:,}",
    f"{min(counts):,} to {max(counts):,}" if counts else "-",
    *(_size(entry[key]) for key in ("smallest", "largest")),
    f"{entry['repeated']:,}",
    problems,
  )


def _size(size: tuple[int, int] | None) -> str:
  return " x ".join(map(str, size)) if size else "-"


def _kinds(entry: dict[str, Any]) -> list[str]:
  if not entry.get("kinds"):
    return []
  kinds = ", ".join(f"{n:,} {kind}" for kind, n in entry["kinds"].items())
  turned = entry["turned"]
  exif = f"; {turned:,} turned, as EXIF says" * bool(turned)
  return [f"\n{entry['role']}: {kinds}{exif}"]


def _balanced(entry: dict[str, Any]) -> list[str]:
  """Return text lines: images per class or label, and any imbalance warning."""
  balance = entry.get("balance")
  if not balance:
    return []
  (least, few), (greatest, many) = balance["fewest"], balance["most"]
  kind = KINDS[entry["kind"]]
  lines = [
    f"{entry['role']}: images per {kind.noun} from {few:,} ({least}) to "
    f"{many:,} ({greatest}), ratio {balance['ratio']:.1f}"
  ]
  if balance["imbalanced"] and kind.one_is_right:
    lines.append(
      f"{entry['role']}: WARNING: the classes are imbalanced (ratio "
      f"{audit.IMBALANCED:g} or more). Accuracy is not the whole "
      f"story: always predicting {greatest!r} is right for "
      f"{100 * balance['share']:.1f} % of the images. Look at "
      "test_per_class in result.json; --config.optim.class_weights=balanced "
      "gives all classes equal weight."
    )
  return lines


def _values(entry: dict[str, Any]) -> list[str]:
  """Return text lines: range, mean and standard deviation of each target."""
  statistics = entry.get("values") or {}
  lines = [
    f"{name}: {shown['min']} to {shown['max']}, mean {shown['mean']}, standard "
    f"deviation {shown['std']}"
    for name, v in statistics.items()
    for shown in [{key: messages.number(x) for key, x in v.items()}]
  ]
  return [f"{entry['role']}: values", *_some(lines)] if lines else []


def _problems(entry: dict[str, Any]) -> list[str]:
  """Return text lines: the problems of a split, grouped by kind of problem."""
  lines = []
  for kind in dict.fromkeys(p["kind"] for p in entry["problems"]):
    group = [p for p in entry["problems"] if p["kind"] == kind]
    lines.append(f"\n{entry['role']}: {kind}: {len(group):,}")
    lines += _some([": ".join(filter(None, (p["where"], p["detail"])))
                    for p in group])  # fmt: skip
  return lines


def _some(lines: Sequence[str]) -> list[str]:
  more = len(lines) - _SHOWN
  shown = [f"  {escaped(line)}" for line in lines[:_SHOWN]]
  return shown + ([f"  and {more:,} more, see --json"] if more > 0 else [])
