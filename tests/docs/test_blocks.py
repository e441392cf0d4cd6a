"""Every block in the docs is executed, or says why not."""

import dataclasses
import importlib
import re

import pytest
from conftest import ROOT
from doc_blocks import (
  CONFIGS,
  KINDS,
  PAGES,
  all_blocks,
  blocks_of,
)
from doc_substitutes import (
  CONTINUES,
  EXTRA_FLAGS,
  GIVEN,
  LEFT_OUT,
  LEFT_OUT_PACKAGE,
  LEFT_OUT_PYTHON,
  PARSED_ONLY,
  RESULTS,
  SUBSTITUTES,
  substituted,
)

from configs import base, folder

EXECUTED = [b for b in all_blocks() if b.kind in ("shell", "python")]
IN_CONFIGS = [b for page in CONFIGS for b in blocks_of(page)]
SHELL = [b for b in (*EXECUTED, *IN_CONFIGS) if b.kind == "shell"]


def test_every_block_is_of_a_kind():
  """Nothing is left out because nobody knows what it is."""
  known = ", ".join(sorted(KINDS))
  assert len(EXECUTED) > 50
  for block in all_blocks():
    assert block.kind, f"{block.name}: expected a language of {known}"


def test_the_blocks_are_found():
  """As many as there were when they were counted."""
  commands = [c for b in SHELL for c in b.package_commands()]
  python = [b for b in EXECUTED if b.kind == "python"]
  found = {"shell": len(SHELL), "python": len(python),
           "commands of the package": len(commands)}  # fmt: skip
  print(found)
  assert len(SHELL) >= 45
  assert len(python) >= 14
  assert len(commands) >= 50
  assert {name for name, _ in commands} >= {
    "train", "evaluate", "predict", "inspect", "check_data",
    "convert", "export", "embed", "serve", "attention",
  }  # fmt: skip
  assert all(blocks_of(page) for page in CONFIGS)


def test_folders_are_learned_in_the_regime_that_is_recommended():
  """At a rate of its own: that of the base configuration is the paper's."""
  advised, others = folder.get_config(), base.get_config()
  page = (ROOT / "docs" / "choosing_a_regime.md").read_text(encoding="utf-8")
  row = page.partition("| 3,000 to 9,000 | many in one pass |")[2]
  best = re.findall(r"`(\w+)` [\d.]+", row.partition("\n")[0])
  assert best == [advised.regime] * 3
  assert f"`--config=folder` uses `{advised.regime}`" in " ".join(page.split())
  assert advised.learning_rate > others.learning_rate


def test_blocks_that_are_left_out_still_exist():
  """An exception goes when its command does."""
  text = "\n".join(block.text for block in SHELL)
  for pattern in LEFT_OUT:
    found = re.escape(pattern).replace(r"\*", ".*")
    assert re.search(rf"^{found}( *#| *$)", text, re.M), pattern
  commands = "\n".join(
    f"-m memory_vit {name} {' '.join(argv)}"
    for block in SHELL
    for name, argv in block.package_commands()
  )
  commands += text.replace("\\\n", " ")
  for pattern in (*LEFT_OUT_PACKAGE, *EXTRA_FLAGS):
    # Here nobody is `python` yet, which asks without its own name.
    assert re.search(pattern.replace("^", ""), commands), pattern
  firsts = {(b.page.name, b.text.partition("\n")[0]) for b in EXECUTED}
  assert firsts >= LEFT_OUT_PYTHON.keys()
  assert {page.name for page in CONFIGS} >= PARSED_ONLY.keys()


def test_files_that_execute_left_out_blocks_exist():
  reasons = {**LEFT_OUT, **LEFT_OUT_PACKAGE, **LEFT_OUT_PYTHON, **PARSED_ONLY}
  named = re.findall(
    r"\b(?:docs|tests)/[\w/.]+\.\w+", "\n".join(reasons.values())
  )
  assert len(named) >= 5
  for name in named:
    assert (ROOT / name).is_file(), name


def test_make_has_the_targets_that_are_named():
  targets = {
    name
    for block in SHELL
    for name in re.findall(r"^make (\w+)", block.text, re.M)
  }
  assert targets >= {"quickstart", "test"}
  made = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
  assert targets <= set(made)


@pytest.mark.parametrize("entry", SUBSTITUTES, ids=lambda e: e.pattern)
def test_substituted_text_still_exists(entry):
  assert any(
    re.search(entry.pattern, block.text, re.M)
    for block in (*EXECUTED, *IN_CONFIGS)
    if entry.page in ("", block.page.name)
  )


def test_pages_with_their_own_rules_exist():
  names = {page.name for page in PAGES}
  others = {entry.page for entry in SUBSTITUTES} - {""}
  assert names >= {*CONTINUES, *CONTINUES.values(), *GIVEN, *RESULTS, *others}


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_commands_of_the_package_can_be_parsed(block, monkeypatch):
  """Also where they stand within others, which are not run."""
  monkeypatch.chdir(ROOT)
  # As it stands but for its placeholders.
  for name, argv in dataclasses.replace(
    block, text=substituted(block)
  ).package_commands():
    if name.startswith("studies."):
      study = importlib.import_module(f"{name}.__main__")
      assert study.parse(argv)
      continue
    if any("gs://" in argument for argument in argv):
      pytest.importorskip("gcsfs")
    command = importlib.import_module(f"memory_vit.commands.{name}")
    if hasattr(command, "parse"):
      assert command.parse([name, *argv])
    else:
      assert command._parser().parse_intermixed_args(argv)
