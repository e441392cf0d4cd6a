"""Load the .npz files of SigLIP: an image tower beside a text tower."""

import jax
import numpy as np
import pytest

import memory_vit as mv
from memory_vit.backbones import inspect_backbone
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import init_backbone
from memory_vit.model.vit_config import ViTConfig

CONFIG = ViTConfig(
  width=8,
  depth=2,
  mlp_dim=12,
  num_heads=2,
  patch_size=2,
  image_size=8,
  class_tokens=0,
  pooling="map",
)
BLOCK = "Transformer/encoderblock"
POSITIONS = "Transformer/posembed_input/pos_embedding"


@pytest.fixture(scope="module")
def backbone():
  return init_backbone(CONFIG, jax.random.key(3))


def published(backbone, *, stacked):
  """The arrays of a file of big_vision, in its own names."""
  flat = {k: np.asarray(v) for k, v in trees.flatten(backbone.params).items()}
  flat["pos_embedding"] = flat.pop(POSITIONS)
  if stacked:
    first = [name for name in flat if name.startswith(f"{BLOCK}_0/")]
    for name in first:
      blocks = [flat.pop(name.replace("_0", f"_{i}", 1)) for i in range(2)]
      flat[name.replace(f"{BLOCK}_0", BLOCK)] = np.stack(blocks)
  beside = {
    "params/txt/head/bias": np.ones(4, np.float32),
    "params/t": np.ones(1, np.float32),
    "params/b": np.ones(1, np.float32),
  }
  return beside | {f"params/img/{name}": a for name, a in flat.items()}


@pytest.mark.parametrize(
  "stacked",
  [pytest.param(True, marks=pytest.mark.slow), False],
  ids=["stacked", "apart"],
)
def test_the_image_tower_is_read_to_the_bit(backbone, stacked, tmp_path):
  path = tmp_path / "siglip.npz"
  np.savez(path, **published(backbone, stacked=stacked))
  loaded = mv.load_backbone(path)
  assert loaded.config == CONFIG
  ours, theirs = trees.flatten(loaded.params), trees.flatten(backbone.params)
  assert ours.keys() == theirs.keys()
  assert all((ours[name] == theirs[name]).all() for name in ours)
  assert inspect_backbone(str(path)).arrays.keys() == ours.keys()


def test_positions_without_a_class_token_are_resized(backbone, tmp_path):
  path = tmp_path / "siglip.npz"
  np.savez(path, **published(backbone, stacked=True))
  larger = mv.load_backbone(path, image_size=12)
  positions = larger.params["Transformer"]["posembed_input"]["pos_embedding"]
  assert positions.shape == (1, 36, 8)
  before = np.asarray(trees.flatten(backbone.params)[POSITIONS])
  corners = np.array([0, 3, 12, 15]), np.array([0, 5, 30, 35])
  np.testing.assert_array_equal(positions[:, corners[1]], before[:, corners[0]])


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("img/MAPHead_0/probe", "missing: MAPHead_0/probe (1, 1, 8)"),
    ("img/pos_embedding", f"missing: {POSITIONS}"),
  ],
)
def test_a_missing_array_of_the_tower_is_named(
  backbone, tmp_path, name, message
):
  arrays = published(backbone, stacked=True)
  del arrays[f"params/{name}"]
  np.savez(tmp_path / "siglip.npz", **arrays)
  with pytest.raises(BackboneError) as refusal:
    mv.load_backbone(tmp_path / "siglip.npz")
  assert message in str(refusal.value)


def test_more_than_two_towers_are_refused(backbone, tmp_path):
  arrays = published(backbone, stacked=True)
  arrays["params/aud/head/bias"] = np.ones(4, np.float32)
  np.savez(tmp_path / "siglip.npz", **arrays)
  with pytest.raises(BackboneError, match="exactly the weights of a ViT"):
    mv.load_backbone(tmp_path / "siglip.npz")
