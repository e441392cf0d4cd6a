"""What can be said of the package from outside."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile

import checked
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from conftest import ROOT

import memory_vit as mv
from memory_vit.evaluation import metrics
from memory_vit.model import vit
from memory_vit.tasks import image_check

# Of docs/reliability.md: a test, as pytest takes it from within tests/.
_TEST = r"`((?:\w+/)?test_\w+\.py::[^`]*)`"
COMMANDS = ("main", "paper", "evaluate", "predict", "inspect", "check_data")
HEAVY = ("tensorflow", "tensorflow_datasets", "clu", "ml_collections", "orbax",
         "pooch", "matplotlib", "sklearn")  # fmt: skip


def test_the_core_imports_nothing_heavy():
  code = (
    "import sys, json, memory_vit; from memory_vit.training import step; "
    f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True,
    cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""},
  )  # fmt: skip
  assert json.loads(done.stdout.splitlines()[-1]) == []


def test_every_call_is_checked():
  """By the import hook of conftest.py, in the wings that compute."""
  head = {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}
  calls = [
    lambda: vit.head_logits(jnp.zeros(4), head),
    lambda: image_check.begin(np.zeros(3, int)),
    # Labels (b, 1) would be broadcast against (b, c) without a word.
    lambda: metrics.batch_sums(
      jnp.zeros((2, 2)), jnp.zeros((2, 1), int), jnp.ones(2)
    ),
  ]
  for call in calls:
    with pytest.raises(jaxtyping.TypeCheckError):
      call()
  with pytest.raises(ValueError, match="rank_promotion"):
    jax.jit(jnp.add)(jnp.zeros((2, 2)), jnp.zeros(2))


def test_what_is_not_checked_is_there():
  for module, names in checked.DOORS.items():
    for name in names:
      assert callable(getattr(importlib.import_module(module), name))


def test_all_wings_are_in_a_wheel():
  """An editable installation would not show that one is missing."""
  with (ROOT / "pyproject.toml").open("rb") as file:
    find = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]
  assert find == {"include": ["memory_vit*"]}
  folders = {path.parent for path in (ROOT / "memory_vit").rglob("*.py")}
  assert len(folders) >= 10
  assert [f for f in folders if not (f / "__init__.py").is_file()] == []
  # A link: the files stay where they were, and are packed with the others.
  configs = ROOT / "memory_vit" / "configs"
  assert configs.resolve() == ROOT / "configs"


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path):
  """Import, every command, and a task that is loaded and run."""
  source = tmp_path / "source"  # setuptools writes beside what it builds
  shutil.copytree(ROOT / "memory_vit", source / "memory_vit")
  for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
     "--wheel-dir", tmp_path, source],
    check=True, cwd=tmp_path,
  )  # fmt: skip
  (wheel,) = tmp_path.glob("*.whl")
  venv.create(tmp_path / "venv")
  (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
  with zipfile.ZipFile(wheel) as file:
    file.extractall(packages)
  # All but this package, whose editable installation is not followed from here.
  (packages / "rest.pth").write_text(sysconfig.get_path("purelib"))
  golden = ROOT / "tests" / "golden" / "format_4"
  code = f"""if True:
    import memory_vit as mv, numpy as np
    backbone = mv.load_backbone({str(golden / "backbone.npz")!r})
    tasks = mv.load_tasks({str(golden / "tasks")!r}, backbone)
    out = mv.forward(backbone, tasks, np.zeros((1, 8, 8, 3), np.float32))
    print(mv.__file__, sorted(out))
  """
  python = tmp_path / "venv" / "bin" / "python"
  environment = {**os.environ, "XLA_FLAGS": ""}

  def output(*arguments):
    return subprocess.run(
      [python, *arguments], check=True, cwd=tmp_path, env=environment,
      capture_output=True, text=True,
    ).stdout  # fmt: skip

  expected = f"{packages / 'memory_vit' / '__init__.py'} "
  assert output("-c", code) == f"{expected}['backbone', 'birds', 'pets']\n"
  for name in COMMANDS:
    assert f"memory_vit.{name}" in output("-m", f"memory_vit.{name}", "--help")


def test_public_names():
  for name in mv.__all__:
    assert getattr(mv, name).__doc__, name


def test_every_fault_has_tests_that_are_there():
  """In the table of docs/reliability.md, by file.py::function."""
  text = (ROOT / "docs" / "reliability.md").read_text()
  assert not re.findall(r"@\w+@", text)  # nothing is left to be filled in
  rows = re.findall(r"^\| (\d+) \|(.*)$", text, re.M)
  assert [int(number) for number, _ in rows] == list(range(1, 75))
  for number, row in rows:
    assert re.search(_TEST, row), f"fault {number} has no test"
  for name in re.findall(_TEST, text):
    file, _, function = name.partition("::")
    path = ROOT / "tests" / file
    assert path.is_file(), name
    if function:
      assert f"\ndef {function}(" in path.read_text(), name
  # None is named in another way, which would not be checked.
  assert text.count("::") == len(re.findall(_TEST, text))
