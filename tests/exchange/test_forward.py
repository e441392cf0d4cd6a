"""The forward pass is timed beside the libraries that are installed."""

import json
import sys

import library_models  # noqa: F401  (makes torchvision importable)
import pytest

from benchmarks import forward

# A library asks another program for the processor; no thread of ours is forked.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def test_every_library_is_a_row(tmp_path):
  file = tmp_path / "forward.json"
  forward.main(
    ["--variant", "Micro/32", "--batch", "2", "--rounds", "1", "--rows"]
    + ["memory_vit", "torch", "onnxruntime", "openvino", f"--json={file}"]
  )
  (found,) = json.loads(file.read_text())
  rows = {"memory_vit, float32", "memory_vit, bfloat16", "timm, float32"}
  rows |= {"timm, bfloat16", "ONNX Runtime, float32"}
  rows |= {"OpenVINO, float32", "OpenVINO, bfloat16"}
  assert found["rows"].keys() == rows
  for row in found["rows"].values():
    low, high = row["quartiles"]
    assert 0 < low <= row["ms"] <= high
    assert row["rounds"] == 1


def test_a_missing_library_is_named(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "openvino", None)
  (found,) = forward.main(
    ["--variant", "Micro/32", "--batch", "1", "--rounds", "1"]
    + ["--rows", "memory_vit", "openvino"]
  )
  assert found["rows"].keys() == {"memory_vit, float32", "memory_vit, bfloat16"}
  assert capsys.readouterr().out.count("openvino is not installed") == 2
