"""Images are prepared as timm and transformers prepare them, to the bit."""

import json

import library_models  # noqa: F401  (makes torchvision importable)
import numpy as np
import pytest
import timm.data
import transformers
from fake_data import noise
from PIL import Image

import memory_vit as mv
from memory_vit.backbones import image_processor

SHAPES = [
  (64, 64), (70, 70), (40, 61), (61, 40), (90, 64), (64, 97), (131, 90),
  (33, 200), (300, 211),
]  # fmt: skip
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def levels_of(evaluation, pixels):
  return np.round((mv.preprocess(pixels, evaluation) + 1) * 127.5)


@pytest.mark.parametrize("share", [0.9, 0.875, 0.95, 1.0])
def test_images_are_those_of_timm(share):
  stated = {
    "input_size": (3, 64, 64), "interpolation": "bicubic", "crop_pct": share,
    **HALF,
  }  # fmt: skip
  evaluation = image_processor.of_timm(stated, "here").evaluation
  theirs = timm.data.create_transform(**stated, normalize=False)
  for seed, shape in enumerate(SHAPES):
    pixels = noise(seed, *shape)
    expected = theirs(Image.fromarray(pixels)).numpy().transpose(1, 2, 0)
    np.testing.assert_array_equal(levels_of(evaluation, pixels), expected)


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
  evaluation = image_processor.of_transformers(stated, "here").evaluation
  for seed, shape in enumerate(SHAPES):
    pixels = noise(seed, *shape)
    (image,) = processor(Image.fromarray(pixels))["pixel_values"]
    expected = np.asarray(image).transpose(1, 2, 0)
    np.testing.assert_array_equal(levels_of(evaluation, pixels), expected)
