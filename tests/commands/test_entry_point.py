"""`memory-vit COMMAND` is `python -m memory_vit COMMAND`."""

import importlib.metadata
import os
import sys

import pytest
from conftest import ROOT

import memory_vit as mv
from memory_vit.__main__ import COMMANDS, main


@pytest.fixture(autouse=True)
def own_argv(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["memory-vit"])


def test_entry_point_has_every_command():
  files = (ROOT / "memory_vit" / "commands").glob("*.py")
  runs = "\ndef main("
  assert sorted(COMMANDS) == sorted(
    f.stem for f in files if runs in f.read_text(encoding="utf-8")
  )


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(argv, capsys):
  assert main(argv) == 0
  said = capsys.readouterr().out
  for name in COMMANDS:
    assert f"\n  {name} " in said
  assert "Trains (or resumes), evaluates and exports a task." in said


def test_version_is_printed(capsys):
  assert main(["--version"]) == 0
  assert capsys.readouterr().out == f"{mv.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_closed_pipe_is_no_error(argv, monkeypatch, capfd):
  """As in `memory-vit --help | true`."""
  reads, writes = os.pipe()
  os.close(reads)
  with os.fdopen(writes, "w", encoding="utf-8") as pipe:
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(argv) == 0
    monkeypatch.undo()
  assert capfd.readouterr().err == ""


def test_unknown_command_is_refused(capsys):
  assert main(["pretict", "a.png"]) == 2
  found = capsys.readouterr()
  assert found.out == ""
  assert found.err.count("\n") == 1
  assert "'pretict', expected one of: check_data, train," in found.err


@pytest.mark.parametrize(
  ("argv", "status", "said"),
  [
    (["inspect", "--help"], 0, "usage: memory-vit inspect"),
    (["predict"], 2, "--backbone, --task"),
    (["train", "--help"], 0, "memory-vit train --config="),
  ],
)
def test_a_command_runs(argv, status, said, capsys):
  try:
    found = main(argv)
  except SystemExit as end:
    found = end.code or 0
  assert found == status
  found = capsys.readouterr()
  assert said in (found.err if status else found.out)


def test_entry_point_is_installed():
  (script,) = importlib.metadata.entry_points(
    group="console_scripts", name="memory-vit"
  )
  assert script.load() is main
