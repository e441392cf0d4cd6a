"""Studies use the package as users do: they import public names only."""

import ast
import importlib
import sys

import pytest
from conftest import ROOT

import memory_vit as mv

FILES = sorted(
  file
  for file in (ROOT / "studies").rglob("*.py")
  if "tests" not in file.parts and file.name != "conftest.py"
)
# All names of these modules are public; subpackages export theirs.
WHOLE = ("memory_vit.config", "memory_vit.errors")
LIBRARIES = {"absl", "jax", "numpy", "studies", *sys.stdlib_module_names}


def problems(source):
  """Imports of names that are not public."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      for name in node.names:
        allowed = name.name.split(".")[0] in LIBRARIES
        if not allowed and (name.name, name.asname) != ("memory_vit", "mv"):
          yield f"import {name.name}"
    elif isinstance(node, ast.ImportFrom):
      names = {name.name for name in node.names}
      if node.module == "memory_vit" and names <= {"plots", *mv.__all__}:
        continue
      if node.module.split(".")[0] in LIBRARIES or node.module in WHOLE:
        continue
      subpackage = importlib.import_module(node.module)
      for name in names - {*getattr(subpackage, "__all__", ())}:
        yield f"from {node.module} import {name}"
    elif isinstance(node, ast.Attribute):
      owner = getattr(node.value, "id", "")
      if owner == "mv" and node.attr not in mv.__all__:
        yield f"mv.{node.attr}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_studies_import_only_public_names(file):
  assert not [*problems(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
  "line",
  [
    "import memory_vit.train", "import tensorflow", "mv.train.run",
    "from memory_vit.train.run import train_and_evaluate",
    "from memory_vit.runtime import files", "from memory_vit import config",
  ],
)  # fmt: skip
def test_imports_of_private_names_are_found(line):
  assert [*problems(line)]
