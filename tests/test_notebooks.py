"""The notebooks: stored clean, installing only what is missing, and running."""

import ast
import builtins
import importlib.util
import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import nbformat
import numpy as np
import published_models
import pytest
import quick
from conftest import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from PIL import Image

import memory_vit as mv
from memory_vit import glyphs

COLAB = ROOT / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
# What is longer belongs into the package.
LONGEST_HELPER = 10

each_notebook = pytest.mark.parametrize(
  "path", NOTEBOOKS, ids=lambda path: path.stem
)


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


def functions(cell):
  """The functions that a cell defines."""
  kinds = (ast.FunctionDef, ast.Lambda)
  return [n for n in ast.walk(ast.parse(python(cell))) if isinstance(n, kinds)]


@pytest.fixture(scope="module")
def shared_cells():
  """The script in colab/, as a module."""
  spec = importlib.util.spec_from_file_location(
    "shared_cells", COLAB / "shared_cells.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


# As they are stored.


def test_every_notebook_exists():
  assert {path.stem for path in NOTEBOOKS} == {
    "many_tasks", "memory_attention", "quickstart", "sweep", "your_backbone",
  }  # fmt: skip


@each_notebook
def test_notebook_is_valid_and_stripped(path):
  stored = json.loads(path.read_text(encoding="utf-8"))
  notebook = nbformat.from_dict(stored)
  nbformat.validate(notebook)
  assert (stored["nbformat"], stored["nbformat_minor"]) >= (4, 5)  # cell ids
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
  assert notebook.metadata.kernelspec.name == "python3"
  for cell in code_cells(notebook):
    assert cell.outputs == []
    assert cell.execution_count is None


@each_notebook
def test_cells_compile_and_their_functions_are_short(path):
  cells = code_cells(nbformat.read(path, as_version=4))
  assert len(cells) > 3
  for cell in cells:
    compile(python(cell), cell.id, "exec")
    for function in functions(cell):
      lines = function.end_lineno - function.lineno + 1
      assert lines <= LONGEST_HELPER, (cell.id, lines)


@each_notebook
def test_stored_steps_are_the_default(path):
  """A notebook that was tried in a few steps is not stored so."""
  parameters = {}
  notebook = nbformat.read(path, as_version=4)
  exec(python(tagged(notebook, "parameters")), parameters)
  assert parameters["WORKDIR"] == f"runs/{path.stem}"
  assert parameters.get("PRETRAIN_STEPS") is None
  steps = parameters["TOTAL_STEPS"]
  assert steps == (300 if path.stem == "your_backbone" else None)


@each_notebook
def test_badge_and_set_up_equal_the_shared_cells(path, shared_cells):
  source = shared_cells.read(shared_cells.SOURCE)
  stored = shared_cells.read(path)
  expected = shared_cells.with_shared(shared_cells.read(path), path, source)
  assert stored == expected, "run colab/shared_cells.py"
  tag = f"v{mv.__version__}"
  repository = shared_cells.repository_of(stored)
  badge = shared_cells.cells(stored).get("badge", [])
  assert len(badge) == bool(repository)
  for line in badge:
    assert f"/github/{repository}/blob/{tag}/colab/{path.name})" in line
  assert shared_cells.cells(stored)["set-up"][1].startswith(f'TAG = "{tag}"')
  # Only the shared cell installs anything.
  installing = [
    cell.id
    for cell in code_cells(nbformat.read(path, as_version=4))
    if re.search(r"run_line_magic\('pip'|system\(", python(cell))
  ]
  assert installing == ["set-up"]


@each_notebook
def test_pages_and_notebooks_named_in_the_text_exist(path):
  """Pages and notebooks, by name: relative links lead nowhere on Colab."""
  notebook = nbformat.read(path, as_version=4)
  text = "\n".join(
    cell.source for cell in notebook.cells if cell.cell_type == "markdown"
  )
  named = re.findall(r"`((?:docs/)?\w+\.(?:md|ipynb))`", text)
  assert named
  for name in named:
    folder = COLAB if name.endswith(".ipynb") else ROOT
    assert (folder / name).is_file(), name
  for link in re.findall(r"\]\(([^)]+)\)", text):
    assert link.startswith("https://"), link


@each_notebook
def test_page_shows_its_notebook(path):
  """`make notebooks` writes a page, and its pictures, anew."""
  page = ROOT / "docs" / "notebooks" / f"{path.stem}.md"
  text = page.read_text(encoding="utf-8")
  notebook = nbformat.read(path, as_version=4)
  shown = [cell for cell in notebook.cells if not cell.id.startswith("set-up")]
  old = [cell.id for cell in shown if cell.source not in text]
  assert old == [], "older than the notebook: make notebooks"
  pictures = re.findall(r"^!\[.*\]\((.*)\)$", text, re.M)
  assert bool(pictures) == (path.stem != "your_backbone")  # not executed
  for name in pictures:
    assert (page.parent / name).stat().st_size < 80_000, name


@each_notebook
def test_cells_use_no_names_of_the_set_up(path):
  """Who has the package leaves it out."""
  notebook = nbformat.read(path, as_version=4)
  cells = [ast.walk(ast.parse(python(c))) for c in code_cells(notebook)
           if c.id != "set-up"]  # fmt: skip
  nodes = [node for cell in cells for node in cell]
  names = [node for node in nodes if isinstance(node, ast.Name)]
  imported = [
    alias.asname or alias.name.partition(".")[0]
    for node in nodes
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
  ]
  bound = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
  bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
  bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
  read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
  given = {*dir(builtins), "display", "get_ipython"}
  assert read - bound - {*imported} - given == set()


def test_address_is_written_to_every_notebook(
  shared_cells, tmp_path, monkeypatch
):
  """Twice in each: in the set-up, and in a badge that is not there before."""
  for path in NOTEBOOKS:
    (tmp_path / path.name).write_bytes(path.read_bytes())
  monkeypatch.setattr(shared_cells, "DIRECTORY", tmp_path)
  monkeypatch.setattr(shared_cells, "SOURCE", tmp_path / "quickstart.ipynb")

  def written():
    return [(tmp_path / path.name).read_bytes() for path in NOTEBOOKS]

  def check(repository, tag):
    for path in NOTEBOOKS:
      text = (tmp_path / path.name).read_text(encoding="utf-8")
      assert text.count(repository) == 2
      assert f"/github/{repository}/blob/{tag}/colab/{path.name})" in text

  stored = written()
  shared_cells.main([])
  assert written() == stored
  shared_cells.main(["--repository=somebody/some.where"])
  check("somebody/some.where", shared_cells.tag())
  shared_cells.main(["--repository=a.b/another-one"])
  check("a.b/another-one", shared_cells.tag())
  version = tmp_path / "__init__.py"
  version.write_text('__version__ = "9.9.9"\n')
  monkeypatch.setattr(shared_cells, "VERSION", version)
  shared_cells.main([])
  check("a.b/another-one", "v9.9.9")
  for wrong in ("https://github.com/a/b", 'a/b"', "a/..", ""):
    with pytest.raises(SystemExit):
      shared_cells.main([f"--repository={wrong}"])


# The set-up.


class Runtime:
  """A machine on which pip installs nothing, and git clones nothing.

  Both do as if: of a clone there is the folder.
  """

  def __init__(self, monkeypatch, **versions):
    self.lines = []
    # What pip makes of it, and what there is before.
    self.installs = {"memory_vit": "0.1.0"}
    self.versions = versions
    monkeypatch.setattr(
      metadata, "distributions", lambda name: self._found(name)
    )

  def _found(self, name):
    version = self.versions.get(name)
    return [SimpleNamespace(version=version)] if version else []

  def run(self, repository="somebody/memory_vit"):
    """Runs the cell, for a repository; returns what git and pip were told."""
    names = {"get_ipython": lambda: self}
    self.system = lambda line: self._git(line.format_map(names))
    self.run_line_magic = lambda name, line: self._pip(
      f"{name} {line.format_map(names)}"
    )
    notebook = nbformat.read(COLAB / "quickstart.ipynb", as_version=4)
    source = python(tagged(notebook, "set-up"))
    names_it = f'REPOSITORY = "{repository}"'
    exec(re.sub(r'^REPOSITORY = ".*"', names_it, source, flags=re.M), names)
    return self.lines

  def _git(self, line):
    self.lines.append(line)
    package = Path(line.split()[-1]) / "memory_vit"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

  def _pip(self, line):
    self.lines.append(line)
    self.versions.update(self.installs)


@pytest.fixture
def nothing_else(monkeypatch, tmp_path):
  """A directory without a checkout, on a machine without an accelerator."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("shutil.which", lambda name: None)


CLONE = (
  f"git clone -q --depth 1 --branch v{mv.__version__} "
  "https://github.com/somebody/memory_vit memory_vit"
)


def installation(checkout):
  return f'pip install -q "{checkout}[train,hf]" "tensorflow-metadata<1.21"'


def test_without_a_checkout_and_an_address_nothing_is_installed(
  monkeypatch, nothing_else
):
  """A package index is not asked: the name there may be a stranger's."""
  runtime = Runtime(monkeypatch)
  with pytest.raises(RuntimeError, match="set REPOSITORY, above"):
    runtime.run(repository="")
  assert runtime.lines == []


def test_installed_package_is_not_installed_again(monkeypatch, nothing_else):
  assert Runtime(monkeypatch, memory_vit="0.1.0", jax="0.7.2").run() == []


@pytest.mark.parametrize("accelerator", ["cpu", "gpu", "tpu"])
def test_jax_of_the_runtime_is_not_replaced(
  monkeypatch, nothing_else, tmp_path, accelerator
):
  """With its plug-in, as long as pip has not replaced it."""
  present = {"jax": "0.7.2"} | ({"libtpu": "1"} if accelerator == "tpu" else {})
  runtime = Runtime(monkeypatch, **present)
  if accelerator == "gpu":
    monkeypatch.setattr("shutil.which", lambda name: name)
  place = tmp_path / "memory_vit"
  assert runtime.run() == [CLONE, installation(place)]


@pytest.mark.parametrize("before", [{}, {"jax": "0.6.0"}])
@pytest.mark.parametrize(
  ("accelerator", "plug_in"), [("cpu", None), ("gpu", "cuda12"), ("tpu", "tpu")]
)
def test_new_jax_gets_its_plug_in(
  monkeypatch, nothing_else, tmp_path, before, accelerator, plug_in
):
  present = before | ({"libtpu": "1"} if accelerator == "tpu" else {})
  runtime = Runtime(monkeypatch, **present)
  runtime.installs["jax"] = "0.9.1"
  if accelerator == "gpu":
    monkeypatch.setattr(
      "shutil.which", lambda name: name if name == "nvidia-smi" else None
    )
  clone, first, *others = runtime.run()
  assert [clone, first] == [CLONE, installation(tmp_path / "memory_vit")]
  expected = f'pip install -q "jax[{plug_in}]==0.9.1"'
  assert others == ([expected] if plug_in else [])


@pytest.mark.parametrize("address", ["", "somebody/memory_vit"])
@pytest.mark.parametrize("place", [".", "colab", "docs/notebooks", "uploaded"])
def test_existing_checkout_is_installed(
  monkeypatch, nothing_else, tmp_path, place, address
):
  """Around the notebook, which needs no address then."""
  checkout = ROOT
  if place == "uploaded":
    checkout = tmp_path / "memory_vit"
    checkout.symlink_to(ROOT)
  else:
    monkeypatch.chdir(ROOT / place)
  lines = Runtime(monkeypatch).run(repository=address)
  assert lines == [installation(checkout)]


def test_failing_pip_is_an_error(monkeypatch, nothing_else):
  """Its magic does not raise anything by itself."""
  runtime = Runtime(monkeypatch)
  runtime.installs = {}
  with pytest.raises(RuntimeError, match=r"\[train,hf\] cannot be installed"):
    runtime.run()


# Executed, in a few steps.


class Executed:
  """A notebook that has run.

  Attributes:
    shown: {name: value} of what was asked for at its end.
    log: what went to the standard error.
    figures: {cell: how many pictures are under it}.
  """

  def __init__(self, notebook):
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    self.log = "".join(o.text for o in outputs if o.get("name") == "stderr")
    self.figures = {
      cell.id: sum("image/png" in o.get("data", {}) for o in cell.outputs)
      for cell in code_cells(notebook)
      if any("image/png" in o.get("data", {}) for o in cell.outputs)
    }
    assert tagged(notebook, "set-up").outputs == []
    self.shown = json.loads(notebook.cells[-1].outputs[0].text)


@pytest.fixture
def execute(tmp_path, monkeypatch):
  """Runs a notebook of colab/, with other parameters, in a fresh kernel."""
  # No start-up files of whoever runs this.
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  # As on Colab: the eight devices of these tests can starve on few cores.
  monkeypatch.setenv("XLA_FLAGS", quick.XLA_FLAGS)

  def run(name, show, **parameters):
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    cell = tagged(notebook, "parameters")
    known = {}
    exec(python(cell), known)
    assert set(parameters) <= set(known)  # nothing is set that nothing reads
    parameters.setdefault("WORKDIR", str(tmp_path / "run"))
    lines = [f"{key} = {value!r}" for key, value in parameters.items()]
    cell.source = "\n".join([cell.source, *lines])
    values = ", ".join(f"{key!r}: {value}" for key, value in show.items())
    last = f"import json\nprint(json.dumps({{{values}}}))"
    notebook.cells.append(nbformat.v4.new_code_cell(last))
    NotebookClient(
      notebook,
      timeout=600,
      kernel_name="python3",
      resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    return Executed(notebook)

  return run


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
  """An untrained ViT for the digits, as an .npz file."""
  path = tmp_path_factory.mktemp("micro") / "micro.npz"
  backbone = mv.random_backbone(
    "Micro/2", image_size=8, num_classes=5, key=jax.random.key(0)
  )
  mv.save_backbone(backbone, path)
  return str(path)


QUICKSTART = {
  "bits_equal": "bits_equal",
  "same_answers": "bool(same_answers)",
  "task_dir": "str(task_dir)",
  "task_bytes": "task_bytes",
  "answers": "[out['backbone'].shape, out[name].shape]",
  "upstream": "result.backbone.outputs_bit_equal",
}


@pytest.mark.slow
def test_quickstart_runs_on_glyphs(execute, tmp_path):
  regimes = {"regimes": "sorted({t.regime for t in result.tasks})"}
  done = execute("quickstart", QUICKSTART | regimes, TOTAL_STEPS=20)
  task_dir = Path(done.shown["task_dir"])
  assert task_dir.parent == tmp_path / "run" / "tasks"
  assert done.shown["regimes"] == [
    "cls_masked", "head", "memory_masked", "side_masked"
  ]  # fmt: skip
  assert 0 < done.shown["task_bytes"] < glyphs.BACKBONE.stat().st_size / 3
  assert done.shown["bits_equal"] is True
  assert done.shown["upstream"] is True
  assert done.shown["same_answers"] is True
  assert done.shown["answers"] == [[24, 337], [24, 120]]
  assert done.figures == {"pictures": 1, "curves": 1, "predictions": 1}
  assert "6 trials step 20/20" in done.log


@pytest.mark.nightly  # as on glyphs, with other data
@pytest.mark.slow
def test_quickstart_runs_on_own_images(execute, tmp_path, micro):
  data, rng = tmp_path / "pets", np.random.default_rng(0)
  for split, count in (("train", 24), ("test", 5)):
    for kind in ("cat", "dog"):
      (data / split / kind).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 256, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(data / split / kind / f"{i}.jpg")
  done = execute(
    "quickstart", QUICKSTART, DATA=str(data), BACKBONE=micro, TOTAL_STEPS=4
  )
  assert done.shown["task_dir"] == str(tmp_path / "run" / "tasks" / "pets")
  assert done.shown["bits_equal"] is True
  assert done.shown["same_answers"] is True
  assert done.shown["answers"] == [[10, 5], [10, 2]]
  assert done.figures == {"pictures": 1, "curves": 1, "predictions": 1}
  assert "pets step 4/4" in done.log


@pytest.mark.slow
def test_many_tasks_notebook_runs(execute, tmp_path, micro):
  show = {
    "original": "[same_original, same_with_four]",
    "differences": "differences",
    "reads": "list(four[-1].spec.attends_to)",
    "names": "list(mixed)",
    "seconds": "seconds",
  }
  done = execute(
    "many_tasks", show, BACKBONE=micro, TOTAL_STEPS=4,
    TIMED=("Micro/2", 8, 2, 3),
  )  # fmt: skip
  assert done.shown["original"] == [True, True]
  names = ["five-six", "seven-nine", "all-ten"]
  assert list(done.shown["differences"]) == names
  assert max(done.shown["differences"].values()) < 1e-4
  assert done.shown["reads"] == names[:2]
  assert done.shown["names"] == ["backbone", *names, "extended"]
  seconds = list(done.shown["seconds"].values())
  assert len(seconds) == 4
  assert min(seconds) > 0
  assert done.figures == {"together": 1, "extension": 1, "time": 1}


@pytest.mark.slow
def test_sweep_notebook_runs(execute, tmp_path):
  """Its backbone is trained first, by itself."""
  show = {
    "trials": "sorted([t.learning_rate, t.cells] for t in result.tasks)",
    "best": "[best.learning_rate, best.cells]",
    "alone": "[alone.tasks[0].learning_rate, alone.tasks[0].cells]",
    "first": "[[float(one), float(other)] for _, one, other in first]",
    "seconds": "seconds",
    "bits": "result.backbone.outputs_bit_equal",
  }
  done = execute(
    "sweep", show, PRETRAIN_STEPS=5, TOTAL_STEPS=10,
    LEARNING_RATES=(0.1, 0.01), CELLS=(1, 3),
  )  # fmt: skip
  trials = [[0.01, 1], [0.01, 3], [0.1, 1], [0.1, 3]]
  assert done.shown["trials"] == trials
  assert done.shown["best"] in trials
  assert done.shown["alone"] == done.shown["best"]
  np.testing.assert_allclose(*zip(*done.shown["first"], strict=True), rtol=1e-4)
  one, _, all_alone = done.shown["seconds"].values()
  assert all_alone == pytest.approx(4 * one)
  assert done.shown["bits"] is True
  assert done.figures == {"figure": 1, "curves": 1, "time": 1}
  assert (tmp_path / "run" / "backbone" / "low.npz").is_file()


def time_cell(alone, together, passes=1):
  """What the cell on time shows; speeds in images per second."""
  notebook = nbformat.read(COLAB / "sweep.ipynb", as_version=4)
  (cell,) = [cell for cell in notebook.cells if cell.id == "time"]
  shown = []
  # Of the ten steps nine are timed, or none.
  training_seconds = passes * 9 * 64 / together if together else 0.0
  exec(
    python(cell),
    {
      "single": SimpleNamespace(total_steps=10, batch_size=64),
      "alone": SimpleNamespace(images_per_second=alone),
      "result": SimpleNamespace(
        images_per_second=together,
        sweep=SimpleNamespace(
          trials=4, passes=passes, training_seconds=training_seconds
        ),
      ),
      "plots": SimpleNamespace(timing_bars=lambda seconds, title: seconds),
      "display": shown.append,
      "print": shown.append,
    },
  )
  return shown


def test_both_sides_of_a_sweep_take_as_many_steps():
  (seconds,) = time_cell(alone=64.0, together=32.0)
  assert list(seconds.values()) == [10.0, 20.0, 40.0]
  (seconds,) = time_cell(alone=64.0, together=32.0, passes=2)
  assert list(seconds.values()) == [10.0, 40.0, 40.0]


def test_single_step_gives_no_timing():
  (said,) = time_cell(alone=0.0, together=0.0)
  assert "more TOTAL_STEPS" in said


@pytest.mark.slow
def test_your_backbone_notebook_runs(execute, tmp_path):
  """A model in the files of transformers."""
  model = published_models.write_model(tmp_path / "model")
  show = {
    "bits_equal": "bits_equal",
    "difference": "difference",
    "reported": "report.comparison['max_difference']",
    "files": "sorted([*report.files, *card.files])",
    "same_answers": "bool(same_answers)",
    "source": "[backbone.preprocessing.interpolation, task.spec.num_classes]",
  }
  done = execute(
    "your_backbone", show, BACKBONE=str(model), IMAGES=64, TOTAL_STEPS=4
  )
  assert done.shown["bits_equal"] is True
  assert done.shown["same_answers"] is True
  assert done.shown["source"] == ["bicubic", 10]
  assert done.shown["difference"] < 1e-4
  (outputs,) = done.shown["reported"].values()
  assert set(outputs) == {"backbone", "mine"}
  assert max(outputs.values()) < 1e-4
  assert "model.stablehlo" in done.shown["files"]
  assert "mine.safetensors" in done.shown["files"]
  assert done.figures == {"curves": 1, "predictions": 1}


@pytest.mark.slow
def test_memory_attention_notebook_runs(execute, tmp_path, micro):
  show = {
    "sums": "[float(on_many.total.min()), float(on_many.total.max())]",
    "shape": "on_many.memory.shape",
    "tasks": "list(looks)",
    "examples": "removal.examples",
    "lost": "removal.cells.lost.shape",
    "top1": "removal.top1",
    "result": "json.loads((workdir / 'five-nine' / 'result.json')"
    ".read_text())['tasks'][0]['test']['score']",
  }
  done = execute("memory_attention", show, BACKBONE=micro, TOTAL_STEPS=4)
  assert done.shown["sums"] == pytest.approx([1, 1], abs=1e-5)
  assert done.shown["shape"] == [128, 4, 5]
  assert done.shown["tasks"] == ["five-nine", "all-ten"]
  # The test split of the run, with all memory as the run evaluated it.
  assert done.shown["examples"] == 177
  assert done.shown["top1"] == pytest.approx(done.shown["result"], abs=1 / 177)
  assert done.shown["lost"] == [4, 5]
  assert done.figures == {
    "overlays": 1, "shares": 1, "difference": 1, "removal": 1,
  }  # fmt: skip
