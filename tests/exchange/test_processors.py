"""Images are prepared as timm and transformers prepare them, to the bit."""

import json

import library_models  # makes torchvision importable
import numpy as np
import pytest
import timm.data
import torch
import transformers
from fake_data import noise
from library_models import MODELS
from PIL import Image
from safetensors.torch import load_file, save_file

import memory_vit as mv
from memory_vit.backbones import image_processor

SHAPES = [
  (64, 64), (70, 70), (40, 61), (61, 40), (90, 64), (64, 97), (131, 90),
  (33, 200), (300, 211),
]  # fmt: skip
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def levels_of(preprocessing, pixels):
  return np.round((mv.preprocess(pixels, preprocessing) + 1) * 127.5)


@pytest.mark.parametrize("share", [0.9, 0.875, 0.95, 1.0])
def test_images_are_those_of_timm(share):
  stated = {
    "input_size": (3, 64, 64), "interpolation": "bicubic", "crop_pct": share,
    **HALF,
  }  # fmt: skip
  preprocessing = image_processor.of_timm(stated, "here").preprocessing
  theirs = timm.data.create_transform(**stated, normalize=False)
  for seed, shape in enumerate(SHAPES):
    pixels = noise(seed, *shape)
    expected = theirs(Image.fromarray(pixels)).numpy().transpose(1, 2, 0)
    np.testing.assert_array_equal(levels_of(preprocessing, pixels), expected)


@pytest.mark.parametrize("resize", [71, 73, 67, 64])
def test_images_are_those_of_transformers(resize):
  processor = transformers.CLIPImageProcessorPil(
    size={"shortest_edge": resize}, crop_size=64, do_normalize=False,
    do_rescale=False,
  )  # fmt: skip
  stated = {
    **json.loads(processor.to_json_string()), "do_rescale": True,
    "do_normalize": True, "image_mean": HALF["mean"], "image_std": HALF["std"],
  }  # fmt: skip
  found = image_processor.of_transformers(stated, "here", "clip")
  preprocessing = found.preprocessing
  for seed, shape in enumerate(SHAPES):
    pixels = noise(seed, *shape)
    (image,) = processor(Image.fromarray(pixels))["pixel_values"]
    expected = np.asarray(image).transpose(1, 2, 0)
    np.testing.assert_array_equal(levels_of(preprocessing, pixels), expected)


VIT = library_models._transformers(
  "ViTModel", library_models._pooler, **library_models.WITH_MLP
)
SQUARE = {"size": {"height": 56, "width": 56}}
CROPPED = {"size": {"shortest_edge": 64}, "crop_size": 56}
# Of a model: the class of its image processor, its arguments, and what an older
# or edited file has instead; None leaves a field out.
SAVED = {
  "vit": ("ViT", SQUARE, {}),
  "vit in [0, 1]": ("ViT", SQUARE, {"do_normalize": False}),
  "vit, one mean": ("ViT", SQUARE, {"image_mean": 0.4}),
  "vit, size as a list": ("ViT", SQUARE, {"size": [56, 56]}),
  "vit cropped": ("ViT", SQUARE, {"do_center_crop": True, **CROPPED}),
  "vit of a feature extractor": (
    "ViT", SQUARE,
    {"image_processor_type": None, "size": 56, "resample": None,
     "feature_extractor_type": "ViTFeatureExtractor"},
  ),
  "vit of Beit": ("Beit", SQUARE, {"resample": None}),
  "vit of DeiT": ("DeiT", {"size": 56, "crop_size": 56}, {}),
  "dinov2": ("Bit", CROPPED, {}),
  "dinov2 without a class": (
    "Bit", CROPPED,
    {"image_processor_type": None, "resample": None, "do_center_crop": None},
  ),
  "ijepa": ("ViT", SQUARE, {}),
  "siglip": ("Siglip", SQUARE, {}),
  "siglip classifier": (
    "Siglip", SQUARE, {"image_processor_type": None, "resample": None},
  ),
  "clip": ("CLIP", CROPPED, {}),
  "clip projection": ("CLIP", CROPPED, {"size": 64, "resample": None}),
}  # fmt: skip
NESTED = ("siglip", "clip")


def write_processor(name, directory):
  """Save it as transformers 5 does: nested beside a tokenizer, or alone."""
  kind, arguments, changes = SAVED[name]
  saved = getattr(transformers, f"{kind}ImageProcessor")(
    **arguments, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3]
  )
  if name in NESTED:
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(
      str(directory / "vocab.json"), str(directory / "merges.txt")
    )
    kind = getattr(transformers, f"{kind}Processor")
    kind(image_processor=saved, tokenizer=tokenizer).save_pretrained(directory)
    assert not (directory / "preprocessor_config.json").exists()
    return
  saved.save_pretrained(directory)
  file = directory / "preprocessor_config.json"
  values = {**json.loads(file.read_text()), **changes}
  known = {key: value for key, value in values.items() if value is not None}
  file.write_text(json.dumps(known))


def difference(directory, pixels, theirs):
  backbone = mv.load_backbone(directory)
  image = mv.preprocess(pixels, backbone.preprocessing)
  ours = np.asarray(mv.forward(backbone, [], image[None])["backbone"])
  return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.fault("unequal-model")
@pytest.mark.parametrize("name", SAVED)
def test_outputs_for_an_image_are_those_of_transformers(name, tmp_path):
  published = MODELS.get(name) or MODELS.get(name.split()[0]) or VIT
  model = library_models.perturbed(published.make())
  model.save_pretrained(tmp_path)
  write_processor(name, tmp_path)
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, backend="pil"
  )
  pixels = noise(0, 70, 97)
  images = processor(images=Image.fromarray(pixels), return_tensors="pt")
  with torch.no_grad():
    theirs = published.outputs(model, images["pixel_values"]).numpy()
  assert difference(tmp_path, pixels, theirs) < 1e-5


@pytest.mark.parametrize("prefix", ["", "timm_model."])
@pytest.mark.parametrize("kind", ["Model", "ForImageClassification"])
def test_a_model_of_timm_that_transformers_saved(kind, prefix, tmp_path):
  """Version 4 wrote the prefix."""
  made = library_models.perturbed(MODELS["timm deit"].make())
  library_models.save(MODELS["timm deit"], made, tmp_path / "timm")
  file = tmp_path / "timm" / "config.json"
  config = json.loads(file.read_text())
  for name in ("num_classes", "in_chans"):  # given twice otherwise
    del config["model_args"][name]
  file.write_text(json.dumps(config))
  wrapper = getattr(transformers, f"TimmWrapper{kind}")
  model = wrapper.from_pretrained(tmp_path / "timm").eval()
  path = tmp_path / "wrapped"
  model.save_pretrained(path)
  arrays = load_file(path / "model.safetensors")
  named = {
    f"{prefix}{name.removeprefix('timm_model.')}": array
    for name, array in arrays.items()
  }
  save_file(named, path / "model.safetensors", {"format": "pt"})
  pixels = noise(0, 70, 97)
  processor = transformers.AutoImageProcessor.from_pretrained(path)
  with torch.no_grad():
    found = model(**processor(Image.fromarray(pixels)))
  theirs = found.logits if "Image" in kind else found.pooler_output
  assert difference(path, pixels, theirs.numpy()) < 1e-5
