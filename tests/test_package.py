"""What can be said of the package from outside."""

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import typing
import venv
import zipfile

import checked
import fake_data
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import memory_vit as mv
from memory_vit.__main__ import COMMANDS
from memory_vit.commands import console
from memory_vit.kinds import class_sums
from memory_vit.model import vit
from memory_vit.runtime import messages
from memory_vit.tasks import image_check

HEAVY = ("tensorflow", "tensorflow_datasets", "clu", "ml_collections", "orbax",
         "pooch", "matplotlib", "sklearn")  # fmt: skip


@pytest.mark.parametrize(
  ("loaded", "heavy"),
  [
    ("from memory_vit.train import step", HEAVY),
    ("from memory_vit.serving import app", (*HEAVY, "optax", "scipy")),
  ],
  ids=["training", "serving"],
)
def test_core_imports_nothing_heavy(loaded, heavy):
  code = (
    f"import sys, json, memory_vit; {loaded}; "
    f"print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True,
    cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""},
  )  # fmt: skip
  assert json.loads(done.stdout.splitlines()[-1]) == []


def test_shapes_are_checked_at_every_call():
  """By the import hook of conftest.py, in the subpackages that compute."""
  head = {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}
  calls = [
    lambda: vit.head_logits(jnp.zeros(4), head),
    lambda: image_check.begin(np.zeros(3, int)),
    # Labels (b, 1) would be broadcast against (b, c) without a word.
    lambda: class_sums.batch_sums(
      jnp.zeros((2, 2)), jnp.zeros((2, 1), int), jnp.ones(2)
    ),
  ]
  for call in calls:
    with pytest.raises(jaxtyping.TypeCheckError):
      call()
  with pytest.raises(ValueError, match="rank_promotion"):
    jax.jit(jnp.add)(jnp.zeros((2, 2)), jnp.zeros(2))


def test_functions_excluded_from_shape_checks_exist():
  for module, names in checked.DOORS.items():
    assert module in checked.MODULES
    for name in names:
      assert callable(getattr(importlib.import_module(module), name))


def test_all_subpackages_are_in_a_wheel():
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


def project():
  with (ROOT / "pyproject.toml").open("rb") as file:
    return tomllib.load(file)["project"]


def requirements(lines):
  """Requirements without their comments."""
  found = (line.partition("#")[0].strip() for line in lines)
  return {Requirement(line) for line in found if line}


def test_requirements_equal_those_of_core_and_training():
  """`requirements.txt` and pyproject.toml cannot drift apart."""
  core = requirements(project()["dependencies"])
  train = requirements(project()["optional-dependencies"]["train"])
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  assert requirements(lines) == core | train
  names = [canonicalize_name(one.name) for one in (*core, *train)]
  assert len(set(names)) == len(names)
  # pip would put both into the same folder.
  assert "tensorflow" in names
  assert "tensorflow-cpu" not in names
  lowest = subprocess.run(
    [sys.executable, ROOT / ".ci" / "lowest"],
    check=True, capture_output=True, text=True,
  ).stdout.split()  # fmt: skip
  assert [line.partition("==")[0] for line in lowest] == [
    Requirement(line.partition("#")[0]).name
    for extra in (
      project()["dependencies"],
      project()["optional-dependencies"]["train"],
      project()["optional-dependencies"]["serve"],
    )
    for line in extra
  ]


def test_modules_of_training_are_required_by_its_extra():
  """What a command names that finds one missing."""
  brought = importlib.metadata.packages_distributions()
  train = requirements(project()["optional-dependencies"]["train"])
  names = {canonicalize_name(one.name) for one in train}
  for module in console.TRAIN_MODULES - {"google_crc32c"}:
    # A build of TensorFlow for one kind of machine has a longer name.
    known = {canonicalize_name(n).removesuffix("-cpu") for n in brought[module]}
    assert known & names, module
  assert len(console.TRAIN_MODULES) == len(names)


def test_modules_of_the_server_are_required_by_its_extra():
  """What `serve` names that finds one missing."""
  brought = importlib.metadata.packages_distributions()
  serve = requirements(project()["optional-dependencies"]["serve"])
  names = {canonicalize_name(one.name) for one in serve}
  found = {
    canonicalize_name(name)
    for module in console.SERVE_MODULES & brought.keys()
    for name in brought[module]
  }
  assert names <= found
  assert not console.SERVE_MODULES & console.TRAIN_MODULES


def copied(folder):
  """This checkout again: setuptools writes beside what it builds."""
  source = folder / "source"
  shutil.copytree(ROOT / "memory_vit", source / "memory_vit")
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  return source


def made(folder, *arguments, **variables):
  """What make does in a checkout in which nothing was made."""
  for name in ("Makefile", "pyproject.toml", "requirements.txt"):
    shutil.copy(ROOT / name, folder)
  # `make test PYTHON=...`, which may run this test, would pass its choice on.
  inherited = {
    name: value for name, value in os.environ.items()
    if name not in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON")
  }  # fmt: skip
  return subprocess.run(
    ["make", *arguments], cwd=folder, capture_output=True, text=True,
    env={**inherited, **variables},
  )  # fmt: skip


def test_quickstart_installs_only_the_extra_of_training(tmp_path):
  """The tests add the rest to the same environment."""
  of_quickstart = made(tmp_path, "--dry-run", "quickstart").stdout
  of_tests = made(tmp_path, "--dry-run", "test").stdout
  installed = r"pip install --quiet --editable '\.\[(.*)\]'"
  assert re.findall(installed, of_quickstart) == ["train"]
  first, second = re.findall(installed, of_tests)
  assert first == "train"
  assert set(second.split(",")) > {"train", "serve", "hf", "test"}


def test_unsupported_python_is_refused_before_pip(tmp_path):
  least, most = re.findall(r"3, (\d+)", (ROOT / "Makefile").read_text())
  assert project()["requires-python"] == f">=3.{least},<3.{most}"
  for minor in (int(least) - 1, int(most)):
    customized = tmp_path / f"3.{minor}"  # bytecode of each has its own place
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(
      f"import sys; sys.version_info = (3, {minor}, 0, 'final', 0)"
    )
    done = made(tmp_path, "quickstart", PYTHONPATH=str(customized))
    assert done.returncode
    assert f"needs Python 3.{least} to 3.{int(most) - 1}" in done.stderr
    assert f"python3 is 3.{minor}: add PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.processes
def test_installation_advice_of_errors_works(tmp_path):
  """Without an index, where a stranger may have our name."""
  extras = project()["optional-dependencies"]
  assert {*typing.get_args(messages.Extra)} < extras.keys()
  place, command = messages.installation("train").split(", ")
  assert place == "in the checkout"
  done = subprocess.run(
    [sys.executable, "-m", *shlex.split(command), "--dry-run", "--no-index",
     "--no-build-isolation"],
    cwd=copied(tmp_path), capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "does not provide the extra" not in done.stderr
  assert f"Would install memory_vit-{mv.__version__}" in done.stdout


def build_wheel(folder):
  """The wheel of this checkout."""
  source = copied(folder)
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
     "--wheel-dir", folder, source],
    check=True, cwd=folder,
  )  # fmt: skip
  (wheel,) = folder.glob("*.whl")
  return wheel


def installed(wheel, folder):
  """An environment with a wheel alone: its python and its packages."""
  venv.create(folder)
  (packages,) = folder.glob("lib/python*/site-packages")
  with zipfile.ZipFile(wheel) as file:
    file.extractall(packages)
  return folder / "bin" / "python", packages


def run(python, *arguments):
  """Run a python away from the checkout."""
  environment = {**os.environ, "XLA_FLAGS": ""}
  environment.pop("PYTHONPATH", None)
  return subprocess.run(
    [python, *map(str, arguments)], cwd=python.parent, env=environment,
    capture_output=True, text=True,
  )  # fmt: skip


GOLDEN = ROOT / "tests" / "golden" / "format_2"


@pytest.mark.nightly  # `make release` tries one as well
@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path):
  """Import, every command, a configuration by name, and a task that runs."""
  python, packages = installed(build_wheel(tmp_path), tmp_path / "venv")
  # All but this package, whose editable installation is not followed from here.
  (packages / "rest.pth").write_text(sysconfig.get_path("purelib"))
  code = f"""if True:
    import memory_vit as mv, numpy as np
    backbone = mv.load_backbone({str(GOLDEN / "backbone.npz")!r})
    tasks = mv.load_tasks({str(GOLDEN / "tasks")!r}, backbone)
    out = mv.forward(backbone, tasks, np.zeros((1, 8, 8, 3), np.float32))
    print(mv.__file__, sorted(out))
  """
  expected = f"{packages / 'memory_vit' / '__init__.py'} "
  assert run(python, "-c", code).stdout == (
    f"{expected}['backbone', 'birds', 'pets', 'size', 'tags']\n"
  )
  for name in COMMANDS:
    shown = run(python, "-m", "memory_vit", name, "--help").stdout
    assert f"memory-vit {name}" in shown
  for config in ROOT.glob("configs/*.py"):
    packed = packages / "memory_vit" / "configs" / config.name
    assert packed.read_bytes() == config.read_bytes()
  # An option that is refused only once the configuration has been read.
  done = run(
    python, "-m", "memory_vit.main", "--config=sun397",
    f"--workdir={tmp_path / 'run'}", "--config.total_steps=0",
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr.startswith("error: config.total_steps is 0")


def core_distributions():
  """The names of what the core requires, and of what that requires."""
  found, todo = set(), requirements(project()["dependencies"])
  while todo:
    one = todo.pop()
    name = canonicalize_name(one.name)
    extras = one.extras or {""}
    if (name, *extras) in found:
      continue
    found.add((name, *extras))
    for line in importlib.metadata.requires(name) or ():
      needed = Requirement(line)
      if not needed.marker or any(
        needed.marker.evaluate({"extra": extra}) for extra in extras
      ):
        todo.add(needed)
  return {name for name, *_ in found}


@pytest.mark.fault("missing-library")
@pytest.mark.slow
def test_wheel_works_with_the_core_alone(tmp_path):
  """It loads, predicts, and says in a line what training needs.

  What the core requires is linked into an environment, and nothing else is
  there: no TensorFlow, for which it would not matter who has asked.
  """
  python, packages = installed(build_wheel(tmp_path), tmp_path / "venv")
  names = core_distributions()
  assert not names & {"tensorflow", "tensorflow-cpu", "clu", "matplotlib"}
  for name in names:
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()}:
      if top not in ("..", "__pycache__") and not (packages / top).exists():
        (packages / top).symlink_to(distribution.locate_file(top))
  (tmp_path / "a.png").write_bytes(fake_data.encode(fake_data.noise(0), "PNG"))
  (tmp_path / "a.jpg").write_bytes(fake_data.encode(fake_data.noise(0), "JPEG"))
  done = run(
    python, "-m", "memory_vit", "predict", "--json", "--original",
    f"--backbone={GOLDEN / 'backbone.npz'}", f"--task={GOLDEN / 'tasks'}",
    tmp_path / "a.png", tmp_path / "a.jpg",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  # A line if compiling takes over two seconds.
  assert re.fullmatch("(.* predicting: .*\n)?", done.stderr)
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  tasks = ["birds", "pets", "size", "tags"]
  assert [sorted(line["tasks"]) for line in lines] == [tasks] * 2
  names = f"import memory_vit as mv; [getattr(mv, n) for n in {mv.__all__}]"
  assert run(python, "-c", names).returncode == 0
  for command, *arguments in [
    ("train", "--config=digits", f"--workdir={tmp_path / 'run'}"),
    ("check_data", "--config=folder", f"--config.data.dir={tmp_path}"),
    ("evaluate", f"--backbone={GOLDEN / 'backbone.npz'}",
     f"--task={GOLDEN / 'tasks'}", "--data=digits:0-4", "--split=train"),
  ]:  # fmt: skip
    done = run(python, "-m", "memory_vit", command, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # The one before says that TensorFlow is imported.
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: this command needs ")
    assert messages.installation("train") in last
    assert "Traceback" not in done.stderr


def test_public_names_have_docstrings():
  for name in mv.__all__:
    assert getattr(mv, name).__doc__, name
