"""The benchmark of accuracies, in a few steps."""

import library_models  # noqa: F401  (makes torchvision importable)
import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.compared import lora
from memory_vit.config import OptimConfig
from memory_vit.train.optim import make_schedule

# PEFT asks transformers for a name that has another one now.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*is_gradient_checkpointing:FutureWarning"
)


def test_every_row_learns(tmp_path, monkeypatch):
  """Better than guessing, 0.8 %, after 30 steps; most images are left out."""
  monkeypatch.setattr(
    accuracy, "_SPLITS",
    {"train": "train[:50%]", "validation": "train[95%:]", "test": "test[:20%]"},
  )  # fmt: skip
  page = tmp_path / "page.md"
  page.write_text("above\n<!-- accuracy -->\nold\n<!-- end of accuracy -->\n")
  result = accuracy.main([
    "--rows", "head", "side_masked", "lora4", "--seeds=1", "--steps=30",
    "--rates", "0.3", f"--page={page}",
  ])  # fmt: skip
  assert {*result["rows"]} == {"head", "side_masked", "lora4"}
  for found in result["rows"].values():
    assert found["accuracies"][0] > 0.03
  assert result["rows"]["head"]["parameters"] == 0
  # A layer has six matrices, of which two are four times as wide on one side.
  each = 4 * (4 * (64 + 64) + 2 * (64 + 256))
  assert result["rows"]["lora4"]["parameters"] == 6 * each
  assert "difference" not in result["rows"]["side_masked"]
  said = page.read_text()
  assert "old" not in said
  assert "| LoRA of rank 4, PEFT | 27,648 |" in said


def test_lora_is_trained_by_our_schedule():
  ours = make_schedule(OptimConfig(), 0.3, 500)
  expected = [float(ours(step)) for step in range(500)]
  np.testing.assert_allclose(lora._rates(0.3, 500), expected, atol=1e-7)


def test_every_image_comes_before_any_comes_twice():
  order = lora._order(10, 4, seed=0)
  first = np.concatenate([next(order) for _ in range(5)])
  assert sorted(first[:10]) == sorted(first[10:]) == [*range(10)]
