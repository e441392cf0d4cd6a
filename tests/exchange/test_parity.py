"""Our outputs are those of transformers and timm, on the same weights."""

import numpy as np
import pytest
from library_models import MODELS, perturbed, save, their_outputs

import memory_vit as mv
from memory_vit.errors import BackboneError
from memory_vit.model import trees

# Of the largest value, where 1e-4 is promised: both compute in float32, and a
# wrong kind of GELU shows from 1e-4 on.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Make, perturb and save each model once: (model, directory)."""
  kept = {}

  def get(name):
    if name not in kept:
      directory = tmp_path_factory.mktemp("model")
      model = perturbed(MODELS[name].make())
      for key, array in model.state_dict().items():
        assert array.min() < array.max() or array.numel() == 1, key
      save(MODELS[name], model, directory)
      kept[name] = model, directory
    return kept[name]

  return get


def relative_difference(ours, theirs):
  assert ours.shape == theirs.shape
  return np.abs(ours - theirs).max() / np.abs(theirs).max()


def images_of(size):
  return np.random.default_rng(size).uniform(size=(3, size, size, 3))


@pytest.mark.fault("unequal-model")
@pytest.mark.parametrize(
  "which", [0, 1, 2], ids=["native", "larger", "smaller"]
)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_library(saved, name, which):
  model, directory = saved(name)
  size = MODELS[name].sizes[which]
  images = images_of(size)
  backbone = mv.load_backbone(directory, image_size=size if which else None)
  assert backbone.config.image_size == size
  ours = np.asarray(mv.forward(backbone, [], images * 2 - 1)["backbone"])
  theirs = their_outputs(MODELS[name], model, images)
  assert relative_difference(ours, theirs) <= TOLERANCE


def test_pixels_that_no_patch_covers_are_left_out(tmp_path):
  """SigLIP So400m/14 is published for 384 pixels: 27 patches, and 6 pixels."""
  published = MODELS["siglip vision"]
  model = perturbed(published.make(image_size=60))
  save(published, model, tmp_path)
  backbone = mv.load_backbone(tmp_path)
  assert backbone.config.image_size == 56
  images = images_of(60)
  theirs = their_outputs(published, model, images)
  kept = images[:, :56, :56] * 2 - 1
  ours = np.asarray(mv.forward(backbone, [], kept)["backbone"])
  assert relative_difference(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize(("name", "arguments"), [
  ("timm dinov2", {"img_size": 42}),  # 9 positions, and 5 tokens
  ("timm dinov2", {"img_size": 70, "reg_tokens": 8}),  # 25, and 9
  ("timm vit", {"fc_norm": True}),
  ("dinov2 swiglu", {"hidden_act": "silu"}),
  ("dinov3", {"num_register_tokens": 0}),
])  # fmt: skip
def test_unpublished_variants_equal_the_library(name, arguments, tmp_path):
  published = MODELS[name]
  model = perturbed(published.make(**arguments))
  save(published, model, tmp_path)
  backbone = mv.load_backbone(tmp_path)
  images = images_of(backbone.config.image_size)
  assert images.shape[1] == arguments.get("img_size", published.sizes[0])
  ours = np.asarray(mv.forward(backbone, [], images * 2 - 1)["backbone"])
  theirs = their_outputs(published, model, images)
  assert relative_difference(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("size", [(56, 84), (28, 112), (14, 42), (42, 56)])
def test_images_that_are_no_square_are_refused(size, tmp_path):
  """All but the last have as many positions as a square."""
  published = MODELS["timm vit"]
  save(published, published.make(img_size=size), tmp_path)
  with pytest.raises(
    BackboneError, match=r"img_size is \[.* expected the side"
  ):
    mv.load_backbone(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_our_npz_of_a_model_is_the_same_backbone(saved, name, tmp_path):
  _, directory = saved(name)
  backbone = mv.load_backbone(directory)
  mv.save_backbone(backbone, tmp_path / "converted.npz")
  again = mv.load_backbone(tmp_path / "converted.npz")
  for field in ("config", "fingerprint", "preprocessing"):
    assert getattr(again, field) == getattr(backbone, field)
  ours, theirs = trees.flatten(again.params), trees.flatten(backbone.params)
  assert ours.keys() == theirs.keys()
  assert all((ours[key] == theirs[key]).all() for key in ours)
