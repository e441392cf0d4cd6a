"""Which label of a TFDS data set is read, and those of VTAB."""

import dataclasses

import fake_data
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from memory_vit import config as config_lib
from memory_vit.data import datasets
from memory_vit.data.split_ref import SplitRef, configured_splits
from memory_vit.data.tfds_labels import VTAB_LABELS, find_target
from memory_vit.errors import BrokenDataError, DataError

pytestmark = pytest.mark.versions


def write(root, name, examples, file_format="tfrecord"):
  """Examples in a data set with the name and the features of the real one."""
  real = tfds.builder(name, data_dir=root)
  tfds.dataset_builders.store_as_tfds_dataset(
    name=name,
    version=str(real.version),
    features=real.info.features,
    split_datasets={"train": list(enumerate(examples))},
    data_dir=root,
    file_format=file_format,
  )
  return root


def opened(root, name, label):
  ref = SplitRef(name, str(root), "train", label=label, download=False)
  return datasets.open_ref(ref)


def labels_of(reader):
  """All labels, sorted: TFDS shuffles what it writes."""
  return sorted(int(reader.source.read(i)[1]) for i in range(reader.size))


def image_of(reader, index):
  encoded, _ = reader.source.read(index)
  return tf.io.decode_image(encoded).numpy()


def of_features(features, **given):
  """An example whose other features are zeros."""
  example = {}
  for key, feature in features.items():
    if key in given:
      example[key] = given[key]
    elif isinstance(feature, tfds.features.Image):
      shape = [side or 8 for side in feature.shape]
      example[key] = np.zeros(shape, np.uint8)
    elif isinstance(feature, tfds.features.Text):
      example[key] = ""
    elif isinstance(feature, tfds.features.Sequence):
      example[key] = []
    else:
      example[key] = 0
  return example


def objects_of(name, **columns):
  """Objects of an image, as a list of dictionaries."""
  features = tfds.builder(name).info.features["objects"].feature
  count = len(next(iter(columns.values())))
  zeros = {
    key: np.zeros(feature.shape, feature.np_dtype)
    for key, feature in features.items()
  }
  return [
    {**zeros, **{key: column[i] for key, column in columns.items()}}
    for i in range(count)
  ]


def clevr(*depths):
  features = tfds.builder("clevr").info.features
  coords = [np.array([99, 99, depth], np.float32) for depth in depths]
  return of_features(features, objects=objects_of("clevr", pixel_coords=coords))


def kitti(*found):
  """An image with objects of (type, depth)."""
  features = tfds.builder("kitti").info.features
  objects = objects_of(
    "kitti",
    type=[kind for kind, _ in found],
    location=[np.array([0, 0, z], np.float32) for _, z in found],
    bbox=[tfds.features.BBox(0.0, 0.0, 1.0, 1.0)] * len(found),
  )
  return of_features(features, objects=objects)


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_labels_of_clevr(tmp_path, file_format):
  scenes = [
    clevr(20, 7.5, 9), clevr(*[8.2] * 10), clevr(8.5, 9, 11),
    clevr(9.1, 9.9, 20, 30), clevr(9.6, 12, 13), clevr(10.5, 11, 12),
  ]  # fmt: skip
  write(tmp_path, "clevr", scenes, file_format)
  counts = opened(tmp_path, "clevr", "clevr_count")
  assert labels_of(counts) == [0, 0, 0, 0, 1, 7]
  assert counts.class_names == tuple(map(str, range(3, 11)))
  distances = opened(tmp_path, "clevr", "clevr_distance")
  # On a threshold belongs what is below it.
  assert labels_of(distances) == [0, 1, 1, 3, 4, 5]
  assert distances.num_classes == 6
  # They have one image and no class: nothing is guessed.
  with pytest.raises(DataError, match="config.data.label to the name of one"):
    opened(tmp_path, "clevr", "")


def test_a_scene_without_objects_has_no_label(tmp_path):
  """As in the published test split of CLEVR."""
  write(tmp_path, "clevr", [clevr(9, 9, 9), of_features(
    tfds.builder("clevr").info.features)])  # fmt: skip
  for label in ("clevr_count", "clevr_distance"):
    with pytest.raises(BrokenDataError, match="expected 0 to"):
      opened(tmp_path, "clevr", label)


def test_labels_of_kitti(tmp_path):
  # Cars, vans and trucks are 0 to 2; 3 is a pedestrian.
  examples = [
    kitti((0, 7.0), (1, 30.0)), kitti((3, 2.0), (2, 8.5)), kitti((1, 21.0)),
    kitti((3, 2.0), (7, 1.0)), kitti(),
  ]  # fmt: skip
  reader = opened(write(tmp_path, "kitti", examples), "kitti", "kitti_distance")
  assert labels_of(reader) == [0, 1, 2, 3, 3]
  assert reader.class_names[3] == "no vehicle"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_labels_and_pixels_of_dsprites(tmp_path, file_format):
  features = tfds.builder("dsprites").info.features
  mask = np.zeros((64, 64, 1), np.uint8)
  mask[3:9, 4:6] = 1
  places, turns = [0, 1, 2, 31], [0, 2, 3, 39]
  examples = [
    of_features(
      features, image=mask, label_x_position=x, label_orientation=turn,
      label_shape=2,
    )
    for x, turn in zip(places, turns, strict=True)
  ]  # fmt: skip
  write(tmp_path, "dsprites", examples, file_format)
  for label, expected, classes in (
    ("dsprites_x", [0, 0, 1, 15], 16),
    ("dsprites_orientation", [0, 0, 1, 15], 16),
    ("label_orientation", turns, 40), ("label_shape", [2] * 4, 3),
  ):  # fmt: skip
    reader = opened(tmp_path, "dsprites", label)
    assert labels_of(reader) == expected
    assert reader.num_classes == classes
    # White on black, in three channels.
    np.testing.assert_array_equal(
      image_of(reader, 0), np.repeat(255 * mask, 3, axis=2)
    )


def test_all_orientations_in_16_bins():
  """In bins of 2.5: two and three in turn."""
  label = VTAB_LABELS["dsprites_orientation"].label
  bins = [
    int(label({"label_orientation": tf.constant(i, tf.int64)}))
    for i in range(40)
  ]
  assert np.bincount(bins).tolist() == [3, 2] * 8


def test_labels_of_smallnorb(tmp_path):
  """Of a pair of images the first is taken, with its grey values."""
  features = tfds.builder("smallnorb").info.features
  grey = fake_data.noise(0, 96, 96)[:, :, :1]
  example = of_features(
    features, image=grey, label_azimuth=17, label_elevation=8, label_category=3
  )
  write(tmp_path, "smallnorb", [example])
  for label, expected, classes in (
    ("smallnorb_azimuth", 17, 18), ("smallnorb_elevation", 8, 9),
    ("label_category", 3, 5), ("label_lighting", 0, 6),
  ):  # fmt: skip
    reader = opened(tmp_path, "smallnorb", label)
    assert labels_of(reader) == [expected]
    assert reader.num_classes == classes
    np.testing.assert_array_equal(image_of(reader, 0), grey)


IMAGE = tfds.features.Image(shape=(None, None, 3))
CLASS = tfds.features.ClassLabel(num_classes=2)


@pytest.mark.parametrize(
  ("features", "label", "message"),
  [
    ({"image": IMAGE, "a": CLASS}, "b", "label is 'b', expected a ClassLabel"),
    ({"image": IMAGE, "a": CLASS}, "image", "label is 'image', expected"),
    ({"image": IMAGE, "a": CLASS}, "x\x1b[2J", r"'x\\x1b\[2J'"),
    ({"image": IMAGE, "a": CLASS}, "clevr_count", "feature 'objects/size'"),
    ({"image": IMAGE, "label": CLASS}, "dsprites_x", "'label_x_position'"),
    ({"a": CLASS}, "a", "no 8-bit Image"),
    ({"i": IMAGE, "j": IMAGE, "a": CLASS}, "a", "or several"),
    (
      {"image": IMAGE, "objects": tfds.features.Sequence({"type": CLASS})},
      "kitti_distance",
      "feature 'objects/location'",
    ),
  ],
)
def test_missing_features_are_named(features, label, message):
  features = tfds.features.FeaturesDict(features)
  with pytest.raises(DataError, match=message):
    find_target("own", features, None, label)


def test_a_label_is_recorded_and_of_the_task_alone(tmp_path):
  values = config_lib.to_dict(config_lib.Config())
  values["data"] |= {"name": "smallnorb", "label": "smallnorb_azimuth"}
  values["upstream"]["name"] = "cifar10"
  splits = configured_splits(config_lib.from_dict(values))
  labels = {role: ref.label for role, ref in splits.items()}
  own = dict.fromkeys(("train", "validation", "test"), "smallnorb_azimuth")
  assert labels == {**own, "upstream": ""}
  features = tfds.builder("smallnorb").info.features
  write(tmp_path, "smallnorb", [of_features(features)])
  ref = SplitRef("smallnorb", str(tmp_path), "train", label="label_category")
  files = datasets.find_data_files(ref)
  assert files == datasets.open_ref(ref).data_files
  other = datasets.find_data_files(dataclasses.replace(ref, label=""))
  assert files.facts == {**other.facts, "label": "label_category"}


@pytest.mark.parametrize("name", ["folder", "embeddings", "digits:0-4"])
def test_sources_with_one_label_refuse_a_label_name(tmp_path, name):
  ref = SplitRef(name, str(tmp_path), "train", label="a")
  with pytest.raises(DataError, match="offers no choice of labels"):
    datasets.open_ref(ref)
