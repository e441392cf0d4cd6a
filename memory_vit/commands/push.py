"""Pushes tasks to the Hugging Face hub.

  memory-vit push TASK OWNER/NAME [--public] [--message=TEXT] [--card]

Each task becomes a .safetensors file with its name; a model card is written if
there is none. The token is taken from `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from etils import epy

from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import run_command, show

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.exports import push
  from memory_vit.tasks import find, store


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return run_command(lambda: _push(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit push",
    description="Pushes tasks to the Hugging Face hub, in one commit.",
  )
  parser.add_argument(
    "task", metavar="TASK", help="a task, or a directory of tasks"
  )
  parser.add_argument(
    "repository",
    metavar="OWNER/NAME",
    help="the repository, which is created if it does not exist",
  )
  parser.switch(
    "--public", "make a new repository public; by default it is private"
  )
  parser.add_argument("--message", metavar="TEXT", help="message of the commit")
  parser.switch(
    "--card", "replace README.md; by default one that exists is left as it is"
  )
  return parser


def _push(arguments: argparse.Namespace) -> int:
  manifests = find.find_tasks([arguments.task])
  tasks = [store.read_task(path, manifest) for path, manifest in manifests]
  address = push.push_task(
    tasks,
    arguments.repository,
    public=arguments.public,
    message=arguments.message,
    card=arguments.card,
  )
  show(address)
  return 0
