"""Views of decoded images: as TensorFlow's, or as Pillow's."""

import math
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from fake_data import noise
from PIL import Image

from memory_vit.backbones import image_processor
from memory_vit.data import image_ops
from memory_vit.errors import DataError
from memory_vit.images import view
from memory_vit.model.task import INTERPOLATIONS, EvalPreprocessing

FILTERS = {
  "bicubic": Image.Resampling.BICUBIC,
  "bilinear_antialias": Image.Resampling.BILINEAR,
}


def central(size, resize, interpolation="bilinear", crop="central"):
  return EvalPreprocessing(
    image_size=size, crop=crop, resize=resize, interpolation=interpolation
  )


@pytest.mark.fault("unequal-preprocessing")
@pytest.mark.parametrize("preprocessing", [
  EvalPreprocessing(image_size=16), central(16, 16), central(13, 19),
  central(13, 20, crop="central_rounded"),
])  # fmt: skip
def test_bilinear_views_are_those_of_tensorflow(preprocessing):
  """One pixel, enlarged, reduced, long, square: to the bit of float32."""
  shapes = [(1, 1), (3, 2), (16, 16), (19, 19), (64, 48), (7, 211), (500, 333)]
  for seed, shape in enumerate(shapes):
    pixels = noise(seed, *shape)
    found = view.eval_view(pixels, preprocessing)
    expected = image_ops.eval_view(tf.constant(pixels), preprocessing).numpy()
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    assert np.array_equal(found, expected)


def by_the_formula(pixels, preprocessing):
  """Bilinear without antialiasing, pixel by pixel, in float32."""
  side, half = preprocessing.image_size, np.float32(0.5)
  resized = view.resized_shape(*pixels.shape[:2], preprocessing)
  axes = []
  for old, new in zip(pixels.shape[:2], resized, strict=True):
    numbers = np.float32(np.arange(side) + preprocessing.begin(new))
    at = (numbers + half) * (np.float32(old) / np.float32(new)) - half
    ends = np.clip([np.floor(at), np.ceil(at)], 0, old - 1).astype(int)
    axes.append((ends.T, at - np.floor(at)))
  (rows, down), (columns, right) = axes
  found = np.empty((side, side, 3), np.float32)
  for i, j in np.ndindex(side, side):
    (a, b), (c, d) = np.float32(pixels[np.ix_(rows[i], columns[j])])
    top, bottom = a + (b - a) * right[j], c + (d - c) * right[j]
    found[i, j] = top + (bottom - top) * down[i]
  return (found - np.float32(127.5)) / np.float32(127.5)


@pytest.mark.parametrize("preprocessing", [
  EvalPreprocessing(image_size=16), EvalPreprocessing(image_size=7),
  central(13, 19), central(12, 20, crop="central_rounded"),
])  # fmt: skip
def test_bilinear_views_are_the_plain_formula(preprocessing):
  """To the bit, also where rows are needed twice, or not at all."""
  sides = np.random.default_rng(0).integers(8, 200, (16, 2)).tolist()
  for seed, shape in enumerate([(1, 1), (1, 31), (31, 1), (5, 5), *sides]):
    pixels = noise(seed, *shape)
    expected = by_the_formula(pixels, preprocessing)
    assert np.array_equal(view.eval_view(pixels, preprocessing), expected)
    # Three of four channels: no whole block of memory.
    rgb = np.dstack([pixels, pixels])[:, :, :3]
    assert np.array_equal(view.eval_view(rgb, preprocessing), expected)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS[1:])
def test_graph_views_are_those_of_torch_users(interpolation):
  """Users of timm and transformers: longer side rounded down, then uint8."""
  for shape, resized in [((8, 15), (9, 16)), ((30, 20), (13, 9))]:
    pixels = noise(3, *shape)
    image = Image.fromarray(pixels)
    image = image.resize(resized[::-1], FILTERS[interpolation])
    y, x = (resized[0] - 8) // 2, (resized[1] - 8) // 2
    expected = np.asarray(image)[y : y + 8, x : x + 8] / 127.5 - 1
    found = view.eval_view(pixels, central(8, 9, interpolation))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # The same in tf.data.
    other = image_ops.eval_view(pixels, central(8, 9, interpolation))
    assert np.array_equal(found, other)


@pytest.mark.parametrize("share", [0.9, 0.875, 0.95, 1.0])
def test_the_middle_is_that_of_timm(share):
  """By torchvision, which rounds half a pixel to an even number."""
  preprocessing = image_processor.of_timm(
    {"input_size": [3, 64, 64], "crop_pct": share, "mean": [0.5] * 3,
     "std": [0.5] * 3, "interpolation": "bicubic"}, "config.json",
  ).preprocessing  # fmt: skip
  resize = math.floor(64 / share)
  for seed, shape in enumerate([(40, 61), (90, 64), (64, 97), (70, 70)]):
    pixels = noise(seed, *shape)
    height, width = (resize * n // min(shape) for n in shape)
    image = Image.fromarray(pixels).resize((width, shape[0]), Image.BICUBIC)
    image = image.resize((width, height), Image.BICUBIC)
    y, x = (int(round((n - 64) / 2.0)) for n in (height, width))  # noqa: RUF046
    levels = np.asarray(image)[y : y + 64, x : x + 64].astype(np.float32)
    found = view.eval_view(pixels, preprocessing)
    assert np.array_equal(found, (levels - 127.5) / 127.5)
    assert np.array_equal(found, image_ops.eval_view(pixels, preprocessing))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS[1:])
def test_a_tall_view_does_not_depend_on_the_version_of_pillow(interpolation):
  """The width is first, though Pillow 13 would begin with the height here."""
  pixels = noise(3, 97, 31)
  resample = FILTERS[interpolation]
  image = Image.fromarray(pixels).resize((64, 97), resample)
  expected = np.asarray(image.resize((64, 64), resample)) / 127.5 - 1
  preprocessing = EvalPreprocessing(image_size=64, interpolation=interpolation)
  np.testing.assert_allclose(
    view.eval_view(pixels, preprocessing), expected, atol=1e-6
  )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS[1:])
def test_tensorflow_antialiases_as_pillow_but_for_rounding(interpolation):
  """In a graph that can be saved: nothing in it calls Python."""
  for preprocessing in (
    EvalPreprocessing(image_size=32, interpolation=interpolation),
    central(32, 37, interpolation),
    central(32, 43, interpolation, "central_rounded"),
  ):
    graph = tf.function(
      lambda pixels, how=preprocessing: image_ops.graph_view(pixels, how),
      input_signature=[tf.TensorSpec((None, None, 3), tf.uint8)],
      autograph=False,
    )
    nodes = graph.get_concrete_function().graph.as_graph_def().node
    assert not any("PyFunc" in node.op for node in nodes)
    levels = []
    for seed, shape in enumerate([(20, 27), (97, 31), (301, 250), (40, 400)]):
      pixels = noise(seed, *shape)
      expected = view.eval_view(pixels, preprocessing)
      levels.append(np.abs(graph(pixels).numpy() - expected) * 127.5)
    assert np.max(levels) < 1.01
    assert np.mean(np.stack(levels) > 0.5) < 0.01
  with pytest.raises(
    tf.errors.InvalidArgumentError, match="more than 32 times"
  ):
    graph(noise(0, 1, 33))
  with pytest.raises(tf.errors.InvalidArgumentError, match="too long"):
    image_ops.graph_view(noise(0, 1, 32), central(8, 1025, interpolation))


def test_antialiasing_looks_at_every_pixel():
  """Stripes become grey; without antialiasing, each pixel is one of theirs."""
  stripes = np.zeros((64, 64, 3), np.uint8)
  stripes[:, ::4] = 255
  for interpolation in INTERPOLATIONS:
    preprocessing = EvalPreprocessing(
      image_size=16, interpolation=interpolation
    )
    seen = view.eval_view(stripes, preprocessing)[4:-4, 4:-4]
    if interpolation == "bilinear":
      assert set(np.unique(seen)) <= {-1.0, 1.0}
    else:
      np.testing.assert_allclose(seen, 63.75 / 127.5 - 1, atol=2 / 127.5)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_view_beyond_the_memory_is_refused(interpolation):
  with pytest.raises(DataError, match="more than 32 times the other"):
    view.eval_view(noise(0, 1, 33), central(8, 9, interpolation))
  with pytest.raises(DataError, match="too long: .* 1025 pixels, the image"):
    view.eval_view(noise(0, 1, 32), central(8, 1025, interpolation))


@pytest.mark.parametrize("shape", [(600, 400), (40, 500), (30, 30)])
@pytest.mark.parametrize("preprocessing", [
  EvalPreprocessing(image_size=200), central(200, 230),
])  # fmt: skip
def test_a_view_takes_the_memory_that_is_set_aside(shape, preprocessing):
  pixels = noise(0, *shape)
  tracemalloc.start()
  view.eval_view(pixels, preprocessing)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  # Indices, and NumPy's own.
  assert peak <= view.view_bytes(*shape, preprocessing) + 2**16


@pytest.mark.parametrize("shape", [(16_384, 16), (16, 16_384)])
def test_memory_is_set_aside_for_the_image_that_pillow_makes_first(shape):
  """It has the new width, and still the old height."""
  preprocessing = EvalPreprocessing(image_size=512, interpolation="bicubic")
  assert view.view_bytes(*shape, preprocessing) > 4 * 512 * 16_384


def test_levels_are_the_pixels_again_and_are_clipped():
  pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
  seen = view.eval_view(pixels, EvalPreprocessing(image_size=16))
  np.testing.assert_array_equal(view.to_levels(seen), pixels)
  outside = np.array([-1.01, 1.01], np.float32).repeat(3).reshape(2, 1, 1, 3)
  assert view.to_levels(outside)[:, 0, 0, 0].tolist() == [0, 255]
