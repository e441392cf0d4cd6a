"""Saved tasks are loaded by later versions, and compute the same."""

import jax
import numpy as np
import pytest
from kinds_of_tasks import LABELS, VALUES
from make_golden import DATA

import memory_vit as mv
from memory_vit.kinds import CLASSES
from memory_vit.tasks.manifest import FORMAT_VERSION

pytestmark = pytest.mark.versions

FORMATS = sorted(path.name for path in DATA.glob("format_*"))


@pytest.mark.fault("old-files")
def test_the_current_format_has_files():
  assert f"format_{FORMAT_VERSION}" in FORMATS


def test_stored_files_are_small():
  sizes = [f.stat().st_size for f in DATA.rglob("*") if f.is_file()]
  assert sum(sizes) < 300_000 * len(FORMATS)


@pytest.mark.fault("old-files")
@pytest.mark.parametrize("name", FORMATS)
def test_stored_files_give_the_stored_logits(name):
  backbone = mv.load_backbone(DATA / name / "backbone.npz")
  tasks = mv.load_tasks(DATA / name / "tasks", backbone)
  assert [task.name for task in tasks] == ["birds", "pets", "size", "tags"]
  assert tasks[1].spec.class_names == ("cat", "dog", "日")
  kinds = [task.spec.kind for task in tasks]
  assert kinds == [CLASSES, CLASSES, VALUES, LABELS]
  expected = dict(np.load(DATA / name / "expected.npz", allow_pickle=False))
  with jax.default_matmul_precision("highest"):
    # Their pictures are normal numbers.
    found = mv.forward(backbone, tasks, expected.pop("images"), check=False)
  assert found.keys() == expected.keys() == {
    "backbone", "pets", "birds", "size", "tags"
  }  # fmt: skip
  for key, logits in expected.items():
    assert np.abs(logits).max() > 0.1
    np.testing.assert_allclose(found[key], logits, rtol=1e-5, atol=1e-5)
