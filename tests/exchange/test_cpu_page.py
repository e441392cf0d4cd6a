"""The code of docs/cpu.md is executed, and computes what `mv.forward` does."""

import jax
import numpy as np
import pytest
from conftest import ROOT, random_task
from docs.doc_blocks import blocks_of

import memory_vit as mv
from memory_vit.runtime import dtypes

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
  """All names, after the code ran with these images."""
  names = {"images": images}
  exec(compile(code, str(PAGE), "exec"), names)
  return names


def require_close(found, expected, most):
  assert found.keys() == expected.keys()
  for name, values in expected.items():
    values = np.asarray(values)
    assert found[name].shape == values.shape
    assert np.abs(found[name] - values).max() <= most * np.abs(values).max()


@pytest.fixture
def exported_tasks(backbone, tmp_path, monkeypatch):
  """Tasks in an export, which is where the page says."""
  monkeypatch.chdir(tmp_path)
  tasks = [random_task(backbone, "birds"), random_task(backbone, "pets")]
  with jax.numpy_rank_promotion("allow"):  # as users have it
    mv.export_model(backbone, tasks, "served", format="onnx")
  return tasks


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("hint", CLOSE)
def test_openvino_computes_what_forward_does(
  exported_tasks, backbone, images, hint, count
):
  code = "".join(blocks("openvino"))
  assert '"f32"' in code
  images = np.asarray(images[:count])
  expected = mv.forward(backbone, exported_tasks, images)
  names = executed(code.replace('"f32"', f'"{hint}"'), images)
  require_close(names["outputs"], expected, CLOSE[hint])
  compiled = names["compiled"]
  assert list(compiled.input().shape) == list(images.shape)
  dtype = compiled.get_property("INFERENCE_PRECISION_HINT")
  if hint == "f32" or dtypes.fastest()[0] == "bfloat16":
    assert dtype.get_type_name() == hint


def test_onnxruntime_computes_what_forward_does(
  exported_tasks, backbone, images
):
  images = np.asarray(images)
  names = executed("".join(blocks("onnxruntime")), images)
  expected = mv.forward(backbone, exported_tasks, images)
  require_close(names["outputs"], expected, CLOSE["f32"])
