"""ONNX files, run by onnxruntime; skipped without the converter."""

import json

import jax
import numpy as np
import pytest
from conftest import ROOT, random_task, tiny_backbone
from families import FAMILIES
from kinds_of_tasks import activated, tasks_of_kinds

import memory_vit as mv
from memory_vit.exports import export as exports
from memory_vit.exports import stablehlo
from memory_vit.exports.exported_model import make_model
from memory_vit.exports.image_input import ImageInput

pytest.importorskip("jax2onnx")
onnxruntime = pytest.importorskip("onnxruntime")
# Of the libraries that jax2onnx brings.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def ranks_as_users_have_them():
  """The converter replaces layers, and adds (d,) to (b, d)."""
  with jax.numpy_rank_promotion("allow"):
    yield


def run(file, images):
  session = onnxruntime.InferenceSession(file)
  names = [output.name for output in session.get_outputs()]
  return dict(zip(names, session.run(names, {"images": images}), strict=True))


def require_close(found, expected):
  assert list(found) == list(expected)
  for name, values in expected.items():
    values = np.asarray(values)
    assert found[name].shape == values.shape
    assert np.abs(found[name] - values).max() <= 1e-4 * np.abs(values).max()


@pytest.mark.parametrize("count", [1, 3])
def test_one_file_for_every_batch_under_the_names_of_the_tasks(
  backbone, images, tmp_path, count
):
  tasks = [random_task(backbone, "0-b_", classes=130, cells=9)]
  if count == 3:
    tasks.append(random_task(backbone, "relu", seed=1))
    tasks.append(random_task(backbone, "a", attends_to=[tasks[1]], seed=2))
  mv.export_model(backbone, tasks, tmp_path / "out", format="onnx")
  for batch in (1, 7):
    found = run(tmp_path / "out" / "model.onnx", np.asarray(images[:batch]))
    own = mv.forward(backbone, tasks, images[:batch])
    names = ["backbone", *(task.name for task in tasks)]
    require_close(found, {name: own[name] for name in names})


def test_an_activation_is_part_of_the_file(backbone, images, tmp_path):
  tasks = tasks_of_kinds(backbone)
  mv.export_model(
    backbone, tasks, tmp_path / "out", format="onnx", activation=True
  )
  found = run(tmp_path / "out" / "model.onnx", np.asarray(images[:3]))
  require_close(found, activated(backbone, tasks, images[:3]))


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_of_every_family_computes_the_same(family, images, tmp_path):
  backbone = tiny_backbone(width=16, **FAMILIES[family])
  task = random_task(backbone, "a")
  mv.export_model(backbone, task, tmp_path / "out", format="onnx")
  found = run(tmp_path / "out" / "model.onnx", np.asarray(images[:3]))
  require_close(found, mv.forward(backbone, [task], images[:3]))


def test_large_weights_beside_the_model_can_be_read_by_others(
  backbone, images, tmp_path
):
  task = random_task(backbone, "a", classes=20_000)
  out = tmp_path / "out"
  report = mv.export_model(backbone, task, out, format="onnx")
  assert set(report.files) == {"model.onnx", "model.onnx.data"}
  # The converter's own is its writer's alone.
  assert len({file.stat().st_mode for file in out.iterdir()}) == 1
  found = run(out / "model.onnx", np.asarray(images))
  require_close({"a": found["a"]}, {
    "a": mv.forward(backbone, task, images)["a"]
  })  # fmt: skip


def test_onnx_takes_pixels_of_one_size(backbone, tmp_path):
  preprocessing = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  task = random_task(backbone, "a", preprocessing=preprocessing)
  images = ImageInput(kind="uint8", size=(13, 21))
  out = tmp_path / "out"
  mv.export_model(backbone, task, out, format="onnx", images=images)
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (3, 13, 21, 3)).astype(np.uint8)
  own = mv.forward(backbone, task, mv.preprocess(list(pixels), task))
  require_close(run(out / "model.onnx", pixels), own)
  values = json.loads((out / "manifest.json").read_text())
  inputs = values["signatures"]["serving_default"]["inputs"]
  assert inputs["images"]["shape"] == ["b", 13, 21, 3]
  assert "jax2onnx" in values["versions"]


def test_all_parts_of_a_masked_task(backbone, images, tmp_path):
  tasks = [
    random_task(backbone, "a", regime="cls+memory+norms+layers+side"),
    random_task(backbone, "b", regime="side_masked", cells=0, seed=1),
  ]
  mv.export_model(backbone, tasks, tmp_path / "out", format="onnx")
  for batch in (1, 7):
    found = run(tmp_path / "out" / "model.onnx", np.asarray(images[:batch]))
    own = mv.forward(backbone, tasks, images[:batch])
    require_close(found, {name: own[name] for name in ("backbone", "a", "b")})


@pytest.mark.parametrize("regime", ["full", "memory"])
def test_a_regime_that_composes_with_nothing(images, tmp_path, regime):
  backbone = tiny_backbone()
  cells = 2 if regime == "memory" else 0
  task = random_task(backbone, "a", regime=regime, cells=cells)
  mv.export_model(backbone, task, tmp_path / "out", format="onnx")
  found = run(tmp_path / "out" / "model.onnx", np.asarray(images))
  require_close(found, make_model(backbone, task).call_own(images))


def test_the_example_of_the_docs_runs(backbone, images, tmp_path, monkeypatch):
  task = random_task(backbone, "a")
  mv.export_model(backbone, task, tmp_path / "served", format="onnx")
  text = (ROOT / "docs" / "export.md").read_text()
  (code,) = (
    p for p in text.split("```python\n") if p.startswith("import onnx")
  )
  values = {"images": np.asarray(images)}
  monkeypatch.chdir(tmp_path)
  exec(code.split("```")[0], values)
  require_close(values["outputs"], {
    name: mv.forward(backbone, task, images)[name] for name in ("backbone", "a")
  })  # fmt: skip


def test_converter_errors_are_one_line(backbone, tmp_path, monkeypatch):
  def broken(program, images):
    raise NotImplementedError("no plugin for\nthis primitive")

  monkeypatch.setattr(stablehlo, "with_input", lambda *a: lambda x: broken(*a))
  task = random_task(backbone, "a")
  with pytest.raises(mv.MemoryVitError, match="cannot convert this model: no"):
    exports.export_model(backbone, task, tmp_path / "out", format="onnx")
  assert list(tmp_path.iterdir()) == []
