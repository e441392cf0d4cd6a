"""The Colab notebook: stored clean, installs only what is missing, and runs."""

import ast
import json
import os
import re
import sys
from importlib import metadata

import nbformat
import pytest
import quick
from conftest import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

NOTEBOOK = ROOT / "colab" / "quickstart.ipynb"


@pytest.fixture
def notebook():
  return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
  (cell,) = [
    cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])
  ]
  return cell


def python(cell):
  """The Python code that IPython makes of a cell."""
  return TransformerManager().transform_cell(cell.source)


def set_up(notebook):
  """The cell that installs; no other may."""
  (cell,) = [
    cell
    for cell in code_cells(notebook)
    if re.search(r"run_line_magic\('pip'|system\(", python(cell))
  ]
  return cell


def test_it_is_valid_and_stripped():
  stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
  notebook = nbformat.from_dict(stored)
  nbformat.validate(notebook)
  assert (stored["nbformat"], stored["nbformat_minor"]) >= (4, 5)  # cell ids
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
  assert notebook.metadata.kernelspec.name == "python3"
  for cell in code_cells(notebook):
    assert cell.outputs == []
    assert cell.execution_count is None


def test_code_cells_compile(notebook):
  for cell in code_cells(notebook):
    compile(python(cell), cell.id, "exec")


def test_parameters_are_as_configured(notebook):
  parameters = {}
  exec(python(tagged(notebook, "parameters")), parameters)
  assert parameters["PRETRAIN_STEPS"] is None
  assert parameters["TOTAL_STEPS"] is None


@pytest.fixture
def installed(notebook, monkeypatch):
  """Runs the set-up cell where nothing is really installed: the pip lines."""
  lines = []

  class Shell:
    def run_line_magic(self, name, line):
      lines.append(f"{name} {line.format_map(names)}")

  names = {"get_ipython": Shell, "REPO_DIR": "."}
  # The cell changes both; afterwards they are as before.
  monkeypatch.chdir(ROOT)
  elsewhere = [path for path in sys.path if path != str(ROOT)]
  monkeypatch.setattr(sys, "path", elsewhere)

  def run(repo_dir="."):
    names["REPO_DIR"] = repo_dir
    exec(python(set_up(notebook)), names)
    return lines

  return run


def absent(*args):
  raise metadata.PackageNotFoundError("memory_vit")


def test_nothing_is_installed_where_everything_is_there(notebook, installed):
  assert installed() == []

  # By reading, too: pip runs where a package was not found, and only there.
  tree = ast.parse(python(set_up(notebook)))
  handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)]
  (handler,) = handlers
  assert ast.unparse(handler.type) == "metadata.PackageNotFoundError"
  assert ast.unparse(tree).count("run_line_magic") == 1
  assert ast.unparse(handler).count("run_line_magic") == 1


@pytest.mark.parametrize(
  ("runtime", "extra"),
  [("cpu", "[train]"), ("tpu", "[train,tpu]"), ("gpu", "[train,cuda]")],
)
def test_the_checkout_is_installed_where_it_is_not(
  installed, monkeypatch, runtime, extra
):
  monkeypatch.setattr(metadata, "distribution", absent)
  monkeypatch.setattr(
    "importlib.util.find_spec",
    lambda name: object() if (runtime, name) == ("tpu", "libtpu") else None,
  )
  monkeypatch.setattr(
    "shutil.which",
    lambda name: name if (runtime, name) == ("gpu", "nvidia-smi") else None,
  )
  assert installed() == [f'pip install -q -e "{ROOT}{extra}"']


@pytest.mark.parametrize("place", ["beside", "colab", "again"])
def test_the_checkout_is_found(installed, monkeypatch, tmp_path, place):
  """In REPO_DIR, from inside of it, and when the cell runs once more."""
  (tmp_path / "here").symlink_to(ROOT)
  if place == "colab":
    monkeypatch.chdir(ROOT / "colab")
    installed("memory_vit")
  else:
    monkeypatch.chdir(tmp_path)
    installed("here")
  if place == "again":
    installed("here")
  assert os.getcwd() == str(ROOT)
  assert sys.path.count(str(ROOT)) == 1


def test_no_checkout(installed, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match="'elsewhere' is no checkout"):
    installed("elsewhere")


@pytest.mark.slow
def test_it_runs(notebook, tmp_path, monkeypatch):
  """From the first cell to the last, in a few steps."""
  workdir = tmp_path / "run"
  tagged(notebook, "parameters").source = "\n".join(
    [
      "REPO_DIR = '.'",
      f"WORKDIR = {str(workdir)!r}",
      "PRETRAIN_STEPS = 20",
      "TOTAL_STEPS = 20",
    ]
  )
  results = nbformat.v4.new_code_cell(
    "print(json.dumps({'bit_equal': bool(bit_equal), "
    "'same_answers': bool(same_answers), 'task_dir': str(task_dir), "
    "'task_bytes': task_bytes, 'backbone_bytes': backbone_bytes, "
    "'answers': [len(old_answers), len(new_answers)]}))"
  )
  notebook.cells.append(results)
  # No start-up files of whoever runs this.
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  # As on Colab: the eight devices of these tests can starve on few cores.
  monkeypatch.setenv("XLA_FLAGS", quick.XLA_FLAGS)
  NotebookClient(
    notebook,
    timeout=600,
    kernel_name="python3",
    resources={"metadata": {"path": str(ROOT)}},
  ).execute()

  assert set_up(notebook).outputs == []
  shown = json.loads(results.outputs[0].text)
  assert shown["bit_equal"] is True
  assert shown["same_answers"] is True
  assert shown["answers"] == [16, 16]
  assert shown["task_bytes"] < shown["backbone_bytes"]
  assert shown["task_dir"] == str(workdir / "tasks" / "digits-5-9")
  assert (workdir / "tasks" / "digits-5-9" / "task.json").is_file()

  outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
  figures = [o for o in outputs if "image/png" in o.get("data", {})]
  assert len(figures) == 3
  log = "".join(o.text for o in outputs if o.get("name") == "stderr")
  assert "pretraining step 20/20" in log
  assert "digits-5-9 step 20/20" in log

  result = json.loads((workdir / "result.json").read_text())
  assert result["tasks"][0]["steps"] == 20
  backbone = result["backbone"]
  assert backbone["outputs_bit_equal"] is True
  assert backbone["accuracy_before"] == backbone["accuracy_after"]
