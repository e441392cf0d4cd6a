"""Every command and every block of Python in the docs is executed, offline.

A page is worked through from its top, in a workspace of its own: what a block
leaves is there for the next one.
"""

import shutil
import socket
import sys
import types
from pathlib import Path

import doc_workspace
import published_models
import pytest
from conftest import ROOT
from doc_blocks import CONFIGS, PAGES, Block, blocks_of
from doc_shell import Shell
from doc_substitutes import (
  CONTINUES,
  GIVEN,
  LEFT_OUT_PYTHON,
  PARSED_ONLY,
  RESULTS,
  substituted,
)

from memory_vit.backbones import hub_models

# Pages with a command that is a process, or starts one.
PROCESSES = {"README.md", "export.md", "reliability.md", "scale.md",
             "serve.md"}  # fmt: skip


def executed(page: Path) -> list[Block]:
  """The blocks of a page that are executed."""
  return [block for block in blocks_of(page) if block.kind != "shown"]


def parameters():
  for page in (*PAGES, *CONFIGS):
    if executed(page) and page.name not in PARSED_ONLY:
      starts = page.name in PROCESSES
      marks = (pytest.mark.processes,) if starts else (pytest.mark.slow,)
      yield pytest.param(page, id=page.name, marks=marks)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
  return doc_workspace.make(tmp_path_factory.mktemp("docs") / "workspace")


@pytest.fixture
def workspace(made, tmp_path, monkeypatch):
  """A workspace, in which the process is, and nothing that is elsewhere."""
  copied = tmp_path / "workspace"
  shutil.copytree(made, copied, symlinks=True)
  monkeypatch.chdir(copied)
  monkeypatch.setenv("MEMORY_VIT_CACHE", str(copied / "cache"))
  stand_in = types.ModuleType("huggingface_hub")
  stand_in.snapshot_download = lambda *_, **__: str(
    published_models.write_model(copied / "snapshot")
  )
  monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
  hub_models.fetch.cache_clear()
  asked = socket.getaddrinfo

  def only_here(host, *arguments, **options):
    assert host in ("127.0.0.1", "localhost"), f"{host} is asked"
    return asked(host, *arguments, **options)

  monkeypatch.setattr(socket, "getaddrinfo", only_here)
  return copied


def execute(block: Block, shell: Shell, names: dict) -> None:
  address = {"server": shell.server.address} if shell.server else {}
  text = substituted(block, **address)
  if block.kind == "shell":
    shell.run(text)
    return
  key = block.page.name, block.text.partition("\n")[0]
  if key not in LEFT_OUT_PYTHON:
    # Errors name the file and the line.
    code = "\n" * (block.line - 1) + text
    exec(compile(code, str(block.page), "exec"), names)


@pytest.mark.parametrize("page", [*parameters()])
def test_blocks_of_a_page_can_be_executed(page, workspace, subtests):
  shell = Shell(workspace)
  names = {"__name__": "__main__"}
  try:
    exec(GIVEN.get(page.name, ""), names)
    if "make quickstart" in page.read_text(encoding="utf-8"):
      shutil.rmtree(workspace / "runs/quickstart")  # it is made here
    if page.name in CONTINUES:
      for block in executed(ROOT / CONTINUES[page.name]):
        if block.kind == "python":
          execute(block, shell, names)
    for block in executed(page):
      with subtests.test(msg=block.name):
        assert block.kind, f"unknown language {block.language!r}"
        execute(block, shell, names)
    for result in RESULTS.get(page.name, ()):
      assert eval(result, names), result
  finally:
    shell.close()
