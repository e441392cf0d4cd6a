"""Lists the tasks of an owner on the Hugging Face hub.

  memory-vit list OWNER [--backbone=SOURCE] [--json]

--backbone shows which tasks were trained on this backbone. Repositories are
found by the tag of their model cards; private ones need a token of their owner.
Only the header of each task is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import run_command, show
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.tables import table

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.backbones import describe
  from memory_vit.model import task as task_sets
  from memory_vit.tasks import hub_tasks

if TYPE_CHECKING:
  from memory_vit.backbones.describe import BackboneReport
  from memory_vit.model.task import BackboneId
  from memory_vit.tasks.hub_tasks import ListedTask

_DIGITS = 12  # number of digits of a fingerprint to show
_HEADER = ("task", "outputs", "regime", "backbone", "size", "fingerprint")


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return run_command(lambda: _list(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit list",
    description="Lists the tasks of an owner on the Hugging Face hub.",
  )
  parser.add_argument(
    "owner", metavar="OWNER", help="a user or an organization"
  )
  parser.add_argument(
    "--backbone",
    metavar="SOURCE",
    help="say which tasks were trained on this backbone, given as in other "
    "commands",
  )
  parser.switch("--json", "one JSON object")
  return parser


def _list(arguments: argparse.Namespace) -> int:
  source = arguments.backbone
  # Report a wrong backbone before asking the hub for the header of each task.
  backbone = describe.inspect_backbone(source) if source else None
  tasks = hub_tasks.listed(arguments.owner)
  if arguments.json:
    show(_json(arguments, tasks, backbone))
    return 0
  rows = [_row(task, backbone) for task in tasks if task.spec]
  if rows:
    show(table((*_HEADER, *(("fits",) if backbone else ())), rows))
  for task in tasks:
    if task.error:
      show(f"left out: {task.error}", sys.stderr)
  if not tasks:
    show(
      f"{arguments.owner} has no tasks in repositories with the tag "
      f"{hub_tasks.TAG}. Private repositories need a token: `hf auth login`, "
      "or HF_TOKEN."
    )
  return 0


def _fits(wanted: BackboneId, report: BackboneReport) -> bool:
  """Return whether `report` is of backbone `wanted`; image sizes may differ."""
  config = report.config
  return wanted == task_sets.BackboneId(
    fingerprint=report.fingerprint,
    variant=config.variant,
    image_size=wanted.image_size,
    gelu=config.gelu if report.states_config else wanted.gelu,
    layer_norm_epsilon=config.layer_norm_epsilon,
  )


def _row(task: ListedTask, backbone: BackboneReport | None) -> tuple[str, ...]:
  assert task.spec
  wanted = task.spec.backbone
  cells = (
    escaped(task.address),
    f"{task.spec.num_classes} {task.spec.kind.name}",
    task.spec.regime,
    escaped(wanted.variant),
    f"{wanted.image_size} px",
    wanted.fingerprint[:_DIGITS],
  )
  if not backbone:
    return cells
  return (*cells, "yes" if _fits(wanted, backbone) else "no")


def _json(
  arguments: argparse.Namespace,
  tasks: Sequence[ListedTask],
  backbone: BackboneReport | None,
) -> str:
  entries: list[dict[str, Any]] = []
  for task in tasks:
    entry = dataclasses.asdict(task)
    if task.spec and backbone:
      entry["fits"] = _fits(task.spec.backbone, backbone)
    entries.append(entry)
  fingerprint = backbone.fingerprint if backbone else None
  values = {
    "owner": arguments.owner,
    "fingerprint": fingerprint,
    "tasks": entries,
  }
  return json.dumps(values)
