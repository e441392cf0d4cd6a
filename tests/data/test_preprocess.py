"""Pictures: decoded, cropped and scaled; and `mv.preprocess`."""

import dataclasses

import fake_data
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from conftest import random_task, tiny_backbone
from fake_data import encode, every_kind, noise
from PIL import Image

import memory_vit as mv
from memory_vit.config import DataConfig
from memory_vit.data import crop_sizes, image_ops, random_decisions
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.images import decoding, preparation
from memory_vit.model.task import EvalPreprocessing

decode_in_graph = tf.function(
  image_ops.decode, input_signature=[tf.TensorSpec((), tf.string)]
)


@pytest.mark.fault("odd-image")
def test_every_kind_of_picture_decodes_to_what_pillow_gives(tmp_path):
  for name, encoded in every_kind().items():
    image = decode_in_graph(encoded).numpy()
    (tmp_path / name).write_bytes(encoded)
    with Image.open(tmp_path / name) as file:
      expected = np.asarray(file.convert("RGB"))
    assert image.dtype == np.uint8
    assert image.shape == expected.shape, name
    # Decoders of JPEG may differ by rounding.
    tolerance = 6 if name.startswith("jpeg") else 0
    difference = np.abs(image.astype(int) - expected.astype(int)).max()
    assert difference <= tolerance, name


def test_16_bits_keep_the_upper_8():
  values = np.random.default_rng(0).integers(0, 2**16, (9, 7), np.uint16)
  image = image_ops.decode(encode(values, "PNG")).numpy()
  np.testing.assert_array_equal(image, np.stack([values >> 8] * 3, axis=-1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", ""])
@pytest.mark.parametrize("decode", [image_ops.decode, decode_in_graph])
def test_broken_files_raise(kind, decode):
  whole = encode(noise(0), kind) if kind else b"neither picture nor text"
  for encoded in (whole[: len(whole) // 2], whole[:10], b""):
    with pytest.raises(tf.errors.InvalidArgumentError):
      decode(encoded)


def _views(
  encoded: bytes, data: DataConfig, image_size: int, count: int, seed: int = 0
) -> np.ndarray:
  """The training pictures of the examples 0, 1, ... of a seed."""
  uniforms = random_decisions.uniforms(seed, range(count))
  dataset = tf.data.Dataset.from_tensor_slices(uniforms).map(
    lambda one: image_ops.train_image(
      tf.constant(encoded), one, data=data, image_size=image_size
    )
  )
  return np.stack(list(dataset.as_numpy_iterator()))


def _crop(encoded: bytes, number: int) -> np.ndarray:
  [uniforms] = random_decisions.uniforms(0, [number])
  return image_ops.inception_crop(encoded, tf.constant(uniforms)).numpy()


def test_crop_of_a_jpeg_is_that_of_the_decoded_picture():
  jpeg = encode(noise(0, 60, 90), "JPEG")
  png = encode(image_ops.decode(jpeg).numpy(), "PNG")
  for seed in range(20):
    part, cut = _crop(jpeg, seed), _crop(png, seed)
    assert part.shape == cut.shape
    # At the rim, the colours of a JPEG depend on the pixels that are not read.
    np.testing.assert_array_equal(part[1:-1, 1:-1], cut[1:-1, 1:-1])


@pytest.mark.slow
def test_inception_crop_takes_the_promised_parts():
  # Each pixel holds its coordinates, so a crop can be found again.
  side, count = 200, 1000
  y, x = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
  picture = np.stack([y, x, np.zeros_like(x)], axis=-1).astype(np.uint8)
  encoded = tf.constant(encode(picture, "PNG"))

  def corners(uniforms):
    crop = image_ops.inception_crop(encoded, uniforms)
    ends = tf.stack([crop[0, 0, :2], crop[-1, -1, :2]])
    return tf.cast(ends, tf.int32), tf.shape(crop)[:2]

  uniforms = random_decisions.uniforms(0, range(count))
  examples = tf.data.Dataset.from_tensor_slices(uniforms)
  crops = examples.map(corners, num_parallel_calls=2).as_numpy_iterator()
  first, last, shape = zip(
    *((*ends, shape) for ends, shape in crops), strict=True
  )
  shape = np.array(shape)
  assert np.array_equal(np.array(last) - np.array(first) + 1, shape)
  height, width = shape.T
  # A pixel more or less by rounding.
  assert np.all((width + 1) / (height - 1) > 3 / 4)
  assert np.all((width - 1) / (height + 1) < 4 / 3)
  area, rounded = height * width / side**2, 1 / 40
  # One in a hundred is at most a twentieth and a bit.
  assert 0.05 * (1 - rounded) ** 2 < area.min() < 0.06
  assert 0.95 < area.max() <= 1.0
  # All over the picture: some begin at each end of it.
  assert np.all(np.array(first).min(0) == 0)
  assert np.all(np.array(last).max(0) == side - 1)


@pytest.mark.slow
@pytest.mark.parametrize("crop", ["inception", "small"])
def test_training_picture_is_a_function_of_the_seed(crop):
  data = DataConfig(train_crop=crop)
  encoded = encode(noise(0, 40, 60), "JPEG")

  views = _views(encoded, data, image_size=16, count=10)
  assert views.shape == (10, 16, 16, 3)
  assert views.dtype == np.float32
  assert -1 <= views.min() < -0.5
  assert 0.5 < views.max() <= 1
  assert len(np.unique(views, axis=0)) == 10
  np.testing.assert_array_equal(views, _views(encoded, data, 16, 10))
  assert np.all(
    np.any(views != _views(encoded, data, 16, 10, seed=1), (1, 2, 3))
  )


@pytest.mark.parametrize("flip", [True, False])
def test_half_of_the_training_pictures_are_mirrored(flip):
  # With as many pixels as the crop takes, mirroring is all that is random.
  data = DataConfig(train_crop="small", resize=16, flip=flip)
  encoded = encode(noise(0, 16, 16), "PNG")
  plain = image_ops.eval_image(encoded, EvalPreprocessing(image_size=16))
  views = _views(encoded, data, image_size=16, count=100)
  is_plain = np.all(views == plain, axis=(1, 2, 3))
  is_mirrored = np.all(views == plain[:, ::-1], axis=(1, 2, 3))
  assert np.all(is_plain ^ is_mirrored)
  assert 30 <= is_mirrored.sum() <= 70 if flip else not is_mirrored.any()


@pytest.mark.parametrize(
  "crop", [pytest.param("inception", marks=pytest.mark.slow), "small"]
)
def test_mirroring_does_not_depend_on_the_crop(crop):
  """Neither on where a picture is cut nor on how large."""
  data = DataConfig(train_crop=crop, resize=24)
  ramps = np.meshgrid(np.arange(24), np.arange(24), indexing="ij")
  picture = 10 * np.stack([*ramps, ramps[0]], axis=-1).astype(np.uint8)
  views = _views(encode(picture, "PNG"), data, image_size=8, count=600)
  # Red grows downwards, green to the right unless it is mirrored.
  mirrored = views[:, 0, -1, 1] < views[:, 0, 0, 1]
  assert 0.4 < mirrored.mean() < 0.6
  ends = np.stack([views[:, 0, :, 1].min(1), views[:, 0, :, 1].max(1),
                   views[:, 0, 0, 0], views[:, -1, 0, 0]])  # fmt: skip
  found = np.corrcoef(np.vstack([mirrored, ends]))[0, 1:]
  # Five standard deviations of what chance gives.
  assert np.abs(found).max() < 5 / np.sqrt(len(views))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
  "interpolation", ["bilinear", "bilinear_antialias", "bicubic"]
)
def test_a_squeezed_training_picture_is_that_of_evaluation(kind, interpolation):
  data = DataConfig(train_crop="resize", flip=False, resize=30)
  encoded = encode(noise(0, 21, 40), kind)
  plain = EvalPreprocessing(image_size=16, interpolation=interpolation)
  expected = image_ops.eval_image(encoded, plain).numpy()

  def views(data):
    return [
      image_ops.train_image(
        tf.constant(encoded),
        tf.constant(uniforms),
        data=data,
        image_size=16,
        interpolation=interpolation,
      ).numpy()
      for uniforms in random_decisions.uniforms(0, range(12))
    ]

  for view in views(data):
    np.testing.assert_array_equal(view, expected)
  mirrored = views(DataConfig(train_crop="resize"))
  both = np.unique(np.stack([expected, expected[:, ::-1]]), axis=0)
  np.testing.assert_array_equal(np.unique(mirrored, axis=0), both)


def test_small_crop_moves_over_the_whole_picture():
  data = DataConfig(train_crop="small", resize=12, flip=False)
  ramp = np.tile(np.arange(12, dtype=np.uint8)[:, None, None], (1, 12, 3))
  views = _views(encode(ramp, "PNG"), data, image_size=8, count=60)
  tops = np.unique(views[:, 0, 0, 0])
  expected = image_ops.scale(tf.range(5)).numpy()
  np.testing.assert_allclose(tops, expected, atol=1e-6)


def test_resize_is_bilinear_without_antialiasing():
  image = noise(0, 16, 16)
  # At a quarter of the size, the centre of a pixel lies between the four in the
  # middle of the sixteen that it stands for. Antialiasing would read them all.
  blocks = image.reshape(4, 4, 4, 4, 3).astype(np.float32)
  expected = blocks[:, 1:3, :, 1:3].mean(axis=(1, 3))
  resized = image_ops.resize(image, 4).numpy()
  np.testing.assert_allclose(resized, expected, rtol=1e-6)


def test_a_picture_may_be_resized_to_more_than_a_model_takes():
  image = tf.zeros((2, 2, 3), tf.uint8)
  assert image_ops.resize_shorter(image, 3000).shape == (3000, 3000, 3)


def test_scale_spans_minus_one_to_one():
  image = tf.constant([0, 127, 128, 255], tf.uint8)
  scaled = image_ops.scale(image).numpy()
  np.testing.assert_allclose(scaled, [-1, -1 / 255, 1 / 255, 1], rtol=1e-6)


def test_evaluation_resize_shows_the_whole_picture():
  columns = np.arange(60, dtype=np.uint8)
  image = np.tile(columns[None, :, None], (20, 1, 3))
  view = image_ops.eval_image(
    encode(image, "PNG"), EvalPreprocessing(image_size=20)
  )
  # Every third column.
  expected = image_ops.scale(np.arange(1, 60, 3)).numpy()
  np.testing.assert_allclose(view[7, :, 1], expected, atol=1e-6)


@pytest.mark.parametrize("tall", [True, False])
def test_evaluation_central_takes_the_middle(tall):
  image = np.tile(np.arange(60, dtype=np.uint8)[:, None, None], (1, 20, 3))
  image = image if tall else image.transpose(1, 0, 2)
  preprocessing = EvalPreprocessing(image_size=12, crop="central", resize=20)
  view = image_ops.eval_image(encode(image, "PNG"), preprocessing).numpy()
  along = view[:, 5, 0] if tall else view[5, :, 0]
  expected = image_ops.scale(np.arange(24, 36)).numpy()
  np.testing.assert_allclose(along, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 30), (30, 1), (3, 2)])
def test_tiny_pictures_are_usable(shape):
  encoded = encode(fake_data.noise(0, *shape), "PNG")
  central = EvalPreprocessing(image_size=8, crop="central", resize=9)
  for image in (
    image_ops.eval_image(encoded, EvalPreprocessing(image_size=8)),
    image_ops.eval_image(encoded, central),
    image_ops.train_image(
      encoded,
      tf.constant(random_decisions.uniforms(0, [0])[0]),
      data=DataConfig(),
      image_size=8,
    ),
  ):
    assert image.shape == (8, 8, 3)


def test_line_image_is_refused_before_it_is_enlarged():
  encoded = encode(noise(0, 1, 5000), "PNG")
  image_ops.eval_image(encoded, EvalPreprocessing(image_size=8))
  central = EvalPreprocessing(image_size=8, crop="central", resize=8)
  with pytest.raises(tf.errors.InvalidArgumentError, match="32 times"):
    image_ops.eval_image(encoded, central)


@pytest.mark.fault("slow-image")
@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_image_beyond_the_memory_once_resized_is_refused(eager):
  """32 x 1 pixels, whose shorter side shall have 4,096: 6.4 GB."""
  encoded = encode(noise(0, 1, 32), "PNG")

  def prepare(side):
    central = EvalPreprocessing(image_size=8, crop="central", resize=side)
    return image_ops.eval_image(encoded, central)

  run = prepare if eager else tf.function(prepare)
  assert run(1024).shape == (8, 8, 3)  # just as much as may be
  for side in (1025, 4096):
    with pytest.raises(tf.errors.InvalidArgumentError, match="too long"):
      run(side)


def test_configuration_decides_the_evaluation_crop():
  plain = crop_sizes.preprocessing_of("resize", 256, 224)
  assert plain == EvalPreprocessing(image_size=224)
  central = crop_sizes.preprocessing_of("central", 0, 224)
  assert (central.crop, central.resize) == ("central", 256)
  rounded = crop_sizes.preprocessing_of("central_rounded", 0, 224)
  assert rounded == dataclasses.replace(central, crop="central_rounded")
  with pytest.raises(ConfigError, match="resize is 200"):
    crop_sizes.preprocessing_of("central", 200, 224)
  with pytest.raises(TaskError, match="middle"):
    crop_sizes.preprocessing_of("middle", 0, 224)


CENTRAL = EvalPreprocessing(image_size=8, crop="central", resize=11)
PLAIN = EvalPreprocessing(image_size=8)


@pytest.mark.parametrize("preprocessing", [PLAIN, CENTRAL])
def test_pixels_are_prepared_as_a_file_that_holds_them(preprocessing):
  grey = noise(1, 21, 30)[:, :, 0]
  rgba = np.dstack([noise(2, 21, 30), grey])
  pixels = [noise(0, 21, 30), grey, rgba]
  found = mv.preprocess(pixels, preprocessing)
  assert (found.dtype, found.shape) == (np.float32, (3, 8, 8, 3))
  files = mv.preprocess([encode(p, "PNG") for p in pixels], preprocessing)
  assert np.array_equal(found, files)
  one = mv.preprocess(grey[:, :, None], preprocessing)
  assert np.array_equal(one, found[1])
  assert np.array_equal(
    mv.preprocess(jnp.asarray(pixels[0]), preprocessing), found[0]
  )


def test_preprocess_uses_the_preprocessing_of_tasks():
  backbone = tiny_backbone(depth=1)
  task = random_task(backbone, "a", preprocessing=CENTRAL)
  other = random_task(backbone, "b")
  pixels = noise(0)
  expected = mv.preprocess(pixels, CENTRAL)
  assert not np.array_equal(mv.preprocess(pixels, PLAIN), expected)
  for form in (task, [task], {"a": task}, mv.fill_slots(backbone, task)):
    assert np.array_equal(mv.preprocess(pixels, form), expected)
  # One that reads another, which is not there: its pictures are known.
  child = random_task(backbone, "c", attends_to=["a"], preprocessing=CENTRAL)
  assert np.array_equal(mv.preprocess(pixels, child), expected)
  with pytest.raises(TaskError, match="'a' and 'b' need .* differently"):
    mv.preprocess(pixels, [task, other])
  for none, message in [([], "no task"), (8, "type int, expected a Task")]:
    with pytest.raises(TaskError, match=message):
      mv.preprocess(pixels, none)


@pytest.mark.parametrize(
  ("pictures", "message"),
  [
    ("no\n.jpg", r"image 'no\\n\.jpg': No such file"),
    ([noise(0), b"no picture"], "image 1, of 10 bytes: not a JPEG"),
    (np.zeros((4, 4, 3)), r"image float64 \(4, 4, 3\): expected uint8"),
    (np.zeros((4, 4, 2), np.uint8), r"\(4, 4, 2\): expected uint8"),
    (np.zeros((1, 2, 4, 4, 3), np.uint8), "or a list of such arrays"),
    (np.zeros((0, 4, 3), np.uint8), r"\(0, 4, 3\): expected uint8"),
    (np.zeros((1, 400, 3), np.uint8), "more than 32 times the other"),
    (None, "of type NoneType: expected a path, the bytes"),
    (Image.new("P", (8, 8)), r"of type Image: .*convert\('RGB'\)"),
    ([], "there is no image"),
    ({"a.jpg": 1}, "a dictionary, expected"),
  ],
)
def test_unusable_images_are_named(pictures, message):
  with pytest.raises(DataError, match=message) as error:
    mv.preprocess(pictures, CENTRAL)
  assert "\n" not in str(error.value)


def test_large_pictures_are_refused_as_predict_does(tmp_path, monkeypatch):
  (tmp_path / "a.png").write_bytes(encode(noise(0, 9, 9), "PNG"))
  monkeypatch.setattr(decoding, "decode", None)  # nothing is decoded
  monkeypatch.setattr(decoding, "MAX_PIXELS", 80)
  for picture in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
    with pytest.raises(DataError, match="9 x 9 pixels, more than"):
      mv.preprocess(picture, PLAIN)
  monkeypatch.setattr(preparation, "MAX_FILE_BYTES", 20)
  with pytest.raises(DataError, match="a.png': the file has more than"):
    mv.preprocess(tmp_path / "a.png", PLAIN)


def test_prepared_pixels_stay_between_minus_one_and_one():
  """Bilinear weights do not overshoot, and [-1, 1] is reached and kept."""
  for seed, (height, width) in enumerate([(5, 7), (8, 8), (40, 23), (9, 90)]):
    pixels = np.where(noise(seed, height, width) > 127, 255, 0).astype("u1")
    for preprocessing in (
      EvalPreprocessing(image_size=61),
      EvalPreprocessing(image_size=48, crop="central", resize=61),
    ):
      prepared = mv.preprocess(pixels, preprocessing)
      assert (prepared.min(), prepared.max()) == (-1, 1)
