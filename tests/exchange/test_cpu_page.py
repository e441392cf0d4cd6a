"""The code of docs/cpu.md is executed, and computes what `mv.forward` does."""

import jax
import numpy as np
import pytest
from conftest import ROOT, random_task
from docs.doc_blocks import blocks_of

import memory_vit as mv

pytest.importorskip("jax2onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")
PAGE = ROOT / "docs" / "cpu.md"
# Of the libraries that jax2onnx brings.
pytestmark = pytest.mark.filterwarnings("default")
# Largest difference of an output, relative to the largest output.
CLOSE = {"f32": 1e-4, "bf16": 3e-2}


def blocks(library):
  """The blocks of Python that import a library."""
  return [
    block.text
    for block in blocks_of(PAGE)
    if block.kind == "python" and f"import {library}" in block.text
  ]


def executed(code, images):
  names = {"images": images}
  exec(compile(code, str(PAGE), "exec"), names)
  return names["outputs"]


def require_close(found, expected, most):
  assert found.keys() == expected.keys()
  for name, values in expected.items():
    values = np.asarray(values)
    assert found[name].shape == values.shape
    assert np.abs(found[name] - values).max() <= most * np.abs(values).max()


@pytest.fixture
def model(backbone, tmp_path, monkeypatch):
  """An export where the page says, and the tasks in it."""
  monkeypatch.chdir(tmp_path)
  tasks = [random_task(backbone, "birds"), random_task(backbone, "pets")]
  with jax.numpy_rank_promotion("allow"):  # as users have it
    mv.export_model(backbone, tasks, "served", format="onnx")
  return tasks


@pytest.mark.parametrize("hint", CLOSE)
def test_openvino_computes_what_forward_does(model, backbone, images, hint):
  code = "".join(blocks("openvino"))
  assert '"f32"' in code
  images = np.asarray(images[:1])
  expected = mv.forward(backbone, model, images)
  found = executed(code.replace('"f32"', f'"{hint}"'), images)
  require_close(found, expected, CLOSE[hint])


def test_onnxruntime_computes_what_forward_does(model, backbone, images):
  images = np.asarray(images)
  found = executed("".join(blocks("onnxruntime")), images)
  require_close(found, mv.forward(backbone, model, images), CLOSE["f32"])
