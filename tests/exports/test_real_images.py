"""Exports of a real backbone, on real images, if they are there."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, random_task

import memory_vit as mv

pytestmark = pytest.mark.slow


def test_exports_compute_the_same_on_200_real_images(data_dir, tmp_path):
  """Two tasks, one of which attends to the other; files as well as arrays."""
  file = data_dir / "vit_ti16_64.npz"
  backbone = mv.load_backbone(file)
  preprocessing = mv.EvalPreprocessing(image_size=64, crop="central", resize=73)
  first = random_task(backbone, "a", classes=30, preprocessing=preprocessing)
  second = random_task(
    backbone,
    "b",
    classes=9,
    attends_to=[first],
    preprocessing=preprocessing,
    seed=1,
  )
  mv.save_tasks([first, second], tmp_path / "tasks")
  found = tmp_path / "found.json"
  subprocess.run(
    [sys.executable, "-m", "benchmarks.exports", f"--backbone={file}",
     f"--task={tmp_path / 'tasks'}",
     f"--data={data_dir / 'tfds' / 'tiny_imagenet_a' / '1.0.0'}",
     "--format", "stablehlo", "saved_model", f"--json={found}"],
    check=True, cwd=ROOT,
    env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  result = json.loads(found.read_text())
  assert set(result["saved_model"]["max_difference"]) == {
    "serving_default", "encoded"
  }  # fmt: skip
  for row in result.values():
    assert row["images"] == 200
    assert 0 <= max(row["max_difference"].values()) < 1e-4
