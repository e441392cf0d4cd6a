"""The benchmark beside other libraries, on the smallest models."""

import re

import library_models  # noqa: F401  (makes torchvision importable)
import peft
import pytest
import transformers
from conftest import ROOT

from benchmarks import comparison


@pytest.fixture(scope="module")
def measured():
  sizes = ["--variant=Micro/16", "--image_size=32", "--batch=2", "--classes=7"]
  once = ["--rounds=1", "--processes=1"]
  result = comparison.main([*sizes, "--tasks", "1", "2", *once])
  return {one["name"].split(",")[0]: one for one in result["libraries"]}


def test_every_library_is_measured(measured):
  assert set(measured) == {"memory_vit", "PEFT", "vit-pytorch"}
  for one in measured.values():
    timed = {"forward", "train", "train_all_weights", "infer_1", "infer_2"}
    assert set(one["ratios"]) >= timed
    assert all(low <= mid <= up for low, mid, up in one["ratios"].values())
    assert one["parameters"] * 4 < one["file_bytes"] < 1_000_000


def test_outputs_that_are_compared_depend_on_the_image(measured):
  """A head of zeros would make all outputs equal."""
  for one in measured.values():
    assert one["outputs_spread"] > 1e-3, one["name"]


def test_the_original_outputs_are_the_same_bits_here(measured):
  assert measured["memory_vit"]["original_difference"] == 0


def test_a_task_in_slots_of_one_size_has_the_same_bits_here(measured):
  assert measured["memory_vit"]["task_difference_same_slots"] == 0
  assert measured["memory_vit"]["task_difference"] < 1e-5


# PEFT asks transformers for a name that has another one now.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_takes_what_the_page_on_it_shows():
  page = (ROOT / "docs/reference/migrating.md").read_text(encoding="utf-8")
  (shown,) = re.findall(r"`(LoraConfig\(.*?\))`", page)
  model = transformers.ViTForImageClassification(
    transformers.ViTConfig(
      image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=2,
      num_attention_heads=2, intermediate_size=8,
    )
  )  # fmt: skip
  adapted = peft.get_peft_model(model, eval(shown, vars(peft)))
  learned = [n for n, p in adapted.named_parameters() if p.requires_grad]
  for layer in range(2):
    for part in ("q_proj.lora_A", "q_proj.lora_B", "v_proj.lora_A"):
      assert any(f".{layer}." in n and part in n for n in learned), part
  assert any("classifier.modules_to_save" in name for name in learned)


def test_peft_has_the_same_model(measured):
  assert measured["PEFT"]["converted_difference"] < 1e-5
