"""Fetch models of the Hugging Face hub, without a network."""

import sys
import types

import published_models as models
import pytest

import memory_vit as mv
from memory_vit.backbones import describe, hub_models, load
from memory_vit.errors import BackboneError

ADDRESS = "hf://google/vit-base-patch16-224"


@pytest.fixture
def hub(monkeypatch, tmp_path):
  """A fake huggingface_hub that records the calls."""
  made = types.ModuleType("huggingface_hub")
  made.asked = []

  def snapshot_download(name, **options):
    made.asked.append((name, options))
    return str(models.write_model(tmp_path / "snapshot"))

  made.snapshot_download = snapshot_download
  monkeypatch.setitem(sys.modules, "huggingface_hub", made)
  hub_models.fetch.cache_clear()
  return made


def test_only_needed_files_are_downloaded(hub, tmp_path):
  backbone = mv.load_backbone(f"{ADDRESS}@refs/pr/1")
  path = tmp_path / "snapshot"
  assert backbone.fingerprint == mv.load_backbone(path).fingerprint
  [(name, options)] = hub.asked
  assert name == "google/vit-base-patch16-224"
  assert options["revision"] == "refs/pr/1"
  # No pickles, and no weights of other libraries.
  assert options["allow_patterns"] == [
    "config.json", "processor_config.json", "preprocessor_config.json",
    "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "README.md",
  ]  # fmt: skip
  assert load.model_source(ADDRESS).source == ADDRESS
  assert hub.asked[1][1]["revision"] is None


def test_inspecting_and_loading_ask_the_hub_once(hub):
  report = describe.inspect_backbone(ADDRESS)
  assert report.source.name == ADDRESS
  assert report.fingerprint == mv.load_backbone(ADDRESS).fingerprint
  assert len(hub.asked) == 1


@pytest.mark.parametrize("address", [
  "hf://", "hf://google", "hf://google/", "hf://a/b/c", "hf://../b",
  "hf://a/b@", "hf://a/b@x y", "hf://a/b\n", "hf:///etc/passwd",
  "hf://a/b@../../x", "hf://a/b@..", "hf://a/b@a/../b", "hf://a/b@/a",
  "hf://a/b@a//b", "hf://a/b@a/", "hf://a/..b", "hf://a/b..c", "hf://a../b",
  f"hf://a/b@{'a/' * 60}a", "hf://a/b@.git/x",
])  # fmt: skip
def test_invalid_hub_addresses_are_refused(hub, address):
  with pytest.raises(BackboneError, match="expected hf://OWNER/NAME"):
    mv.load_backbone(address)
  assert not hub.asked


@pytest.mark.fault("unreachable-hub")
@pytest.mark.parametrize("installed", [True, False])
def test_failed_fetch_says_how_to_get_the_files(hub, monkeypatch, installed):
  def offline(name, **options):
    raise OSError("cannot reach the hub\nand more\x1b[2J")

  hub.snapshot_download = offline
  if not installed:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(BackboneError) as error:
    mv.load_backbone(ADDRESS)
  message = str(error.value)
  reason = (
    "OSError: cannot reach the hub" if installed else "pip install '.[hf]'"
  )
  for said in (ADDRESS, reason, "config.json", ".safetensors", "by hand"):
    assert said in message
  assert "\n" not in message
