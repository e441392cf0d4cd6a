"""Flags that a page names in its sentences exist.

Whole commands, in blocks, are parsed in `test_blocks.py`.
"""

import contextlib
import functools
import importlib
import io
import re
from pathlib import Path

import pytest
from conftest import ROOT
from doc_blocks import PAGES
from markdown_it import MarkdownIt

from memory_vit.__main__ import COMMANDS

# Flags of other programs.
FOREIGN = {
  "--aa": "train.py of timm",
  "--build-arg": "docker",
  "--mixup": "train.py of timm",
  "--editable": "pip",
  "--gpus-per-task": "srun",
  "--timeout_keep_alive": "uvicorn",
  "--xla_cpu_enable_concurrency_optimized_scheduler": "XLA_FLAGS",
}
OURS = ("benchmarks", "studies", "colab", "release", "tests")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(rf"(?:memory-vit )?({'|'.join(COMMANDS)}) (?:.* )?--")


def inline_code(page: Path) -> list[str]:
  """The texts between backticks; blocks are not among them."""
  tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
  children = [child for token in tokens for child in token.children or ()]
  return [child.content for child in children if child.type == "code_inline"]


@functools.cache
def flags_of(command: str) -> frozenset[str]:
  """What `memory-vit COMMAND --help` lists."""
  module = importlib.import_module(f"memory_vit.commands.{command}")
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    module.main(["--help"])
  return frozenset(_FLAG.findall(printed.getvalue())) | {"--help"}


@functools.cache
def flags_of_scripts() -> frozenset[str]:
  """Flags in the source of programs beside the package."""
  sources = [path for top in OURS for path in (ROOT / top).rglob("*.py")]
  quoted = re.compile(r"""["'](--[a-z][\w-]*)""")
  return frozenset(
    flag for path in sources for flag in quoted.findall(path.read_text("utf-8"))
  )


def test_help_lists_flags():
  assert {"--verify", "--report"} <= flags_of("evaluate")
  assert "--config" in flags_of("train")
  assert all(flags_of(command) for command in COMMANDS)
  assert {"--processes", "--seeds"} <= flags_of_scripts()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_sentences_exist(page):
  anywhere = flags_of_scripts().union(*map(flags_of, COMMANDS), FOREIGN)
  for text in inline_code(page):
    command = _COMMAND.match(text)
    expected = flags_of(command[1]) if command else anywhere
    assert set(_FLAG.findall(text)) <= expected, text


def test_flags_of_other_programs_are_named():
  """An exception goes when the last page with it does."""
  texts = " ".join(text for page in PAGES for text in inline_code(page))
  assert set(_FLAG.findall(texts)) >= FOREIGN.keys()
