"""Few examples of a training split: which ones, and what if there are fewer."""

import dataclasses

import fake_data
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from memory_vit import config as config_lib
from memory_vit.data import datasets, subset
from memory_vit.data.graph_source import GraphSource
from memory_vit.data.split_ref import SplitRef, Subset, configured_splits
from memory_vit.errors import BrokenDataError, ConfigError, DataError

FEATURES = tfds.features.FeaturesDict(
  {
    "image": tfds.features.Image(shape=(None, None, 3)),
    "label": tfds.features.ClassLabel(num_classes=3),
  }
)


def graded(size, classes, *, known=True, broken=()):
  """Example i has label i % classes, and a grey picture of its number."""
  pictures = tf.constant(
    [fake_data.encode(fake_data.picture(i), "PNG") for i in range(size)]
  )
  labels = np.arange(size, dtype=np.int32) % classes

  def fetch(index):
    readable = tf.reduce_all(index != tf.constant([-1, *broken], tf.int64))
    with tf.control_dependencies([tf.debugging.Assert(readable, ["broken"])]):
      return tf.gather(pictures, index), tf.gather(tf.constant(labels), index)

  return dataclasses.replace(
    fake_data.numbered_source(size),
    class_names=tuple(f"c{i}" for i in range(classes)),
    source=GraphSource(tf.function(fetch)),
    labels=labels if known else None,
  )


def indices_of(source):
  """The numbers of the chosen examples, seen in their pictures."""
  found = []
  for i in range(source.size):
    encoded, _ = source.source.read(i)
    found.append(int(tf.io.decode_png(encoded)[0, 0, 0]))
  return found


@pytest.mark.parametrize("known", [True, False])
def test_seed_chooses_equally_many_of_each_class(known):
  reader = graded(60, 3, known=known)
  chosen = {}
  for seed in (0, 1):
    source = subset.choose(reader, Subset(per_class=4, seed=seed))
    chosen[seed] = indices_of(source)
    assert len(chosen[seed]) == len({*chosen[seed]}) == source.size == 12
    counts = np.bincount(np.array(chosen[seed]) % 3)
    assert counts.tolist() == [4, 4, 4]
  assert chosen[0] != chosen[1]
  # Whether labels are known beforehand changes nothing, and no further image
  # of a class changes those before: fewer are a part of more.
  again = graded(60, 3, known=not known)
  same = subset.choose(again, Subset(per_class=4, seed=0))
  assert indices_of(same) == chosen[0]
  fewer = subset.choose(reader, Subset(per_class=2, seed=0))
  assert {*indices_of(fewer)} < {*chosen[0]}


def test_chosen_examples_never_change():
  """A run that goes on, perhaps elsewhere, trains on the same ones."""
  source = subset.choose(graded(60, 3), Subset(per_class=2, seed=5))
  assert indices_of(source) == [10, 21, 26, 28, 50, 51]


def test_first_examples_follow_the_order_of_the_seed():
  reader = graded(60, 3)
  chosen = [
    indices_of(subset.choose(reader, Subset(first=20, seed=seed)))
    for seed in (0, 1)
  ]
  assert len({*chosen[0]}) == 20
  assert chosen[0] != chosen[1]
  assert chosen[0] != list(range(20))
  whole = subset.choose(reader, Subset(first=60, seed=0))
  assert indices_of(whole) == list(range(60))


@pytest.mark.fault("wrong-label")
@pytest.mark.parametrize("known", [True, False])
def test_too_few_examples_are_refused_with_their_number(known):
  reader = graded(8, 3, known=known)
  words = r"1 classes.*per_class \(3\): 'c2' has 2"
  with pytest.raises(DataError, match=words):
    subset.choose(reader, Subset(per_class=3))
  with pytest.raises(DataError, match="8 examples.*first is 9"):
    subset.choose(reader, Subset(first=9))


def test_unreadable_examples_are_not_chosen():
  broken = [0, 3, 6, 9]
  source = graded(18, 3, known=False, broken=broken)
  found = subset.choose(
    dataclasses.replace(source, max_bad=4), Subset(per_class=2)
  )
  assert {*indices_of(found)}.isdisjoint(broken)
  with pytest.raises(DataError, match="'c0' has 2"):
    subset.choose(dataclasses.replace(source, max_bad=4), Subset(per_class=3))
  with pytest.raises(BrokenDataError, match=r"max_bad \(3\)"):
    subset.choose(dataclasses.replace(source, max_bad=3), Subset(per_class=3))
  known = dataclasses.replace(
    graded(18, 3), unreadable=dict.fromkeys(broken, "gone")
  )
  found = subset.choose(
    dataclasses.replace(known, max_bad=4), Subset(per_class=2)
  )
  assert {*indices_of(found)}.isdisjoint(broken)


def test_reading_a_split_before_changes_no_subset():
  """Each process has read others: a subset that depends on it would differ."""
  split = dataclasses.replace(graded(18, 3), max_bad=4)
  ref = SplitRef("", "", "train", subset=Subset(per_class=2))
  chosen = indices_of(datasets.read_as(ref, split))
  split.mark_unreadable({int(chosen[0]): "gone"})
  assert indices_of(datasets.read_as(ref, split)) == chosen


def test_wrong_labels_are_found_while_choosing():
  source = dataclasses.replace(
    graded(9, 3, known=False), class_names=("c0", "c1")
  )
  with pytest.raises(BrokenDataError, match="labels 2; expected 0 to 1"):
    subset.choose(source, Subset(per_class=3))


def write_sets(root):
  """{data set: what opens it}, each with 4 examples of 3 classes."""
  labels = [0, 1, 2] * 4
  files = [f"{i}.png" for i in range(4)]
  fake_data.write_folder(
    root / "folder", {f"train/{name}": files for name in "abc"}
  )
  lines = [
    f"train/{name}/{file} {'abc'.index(name)}" for name in "abc"
    for file in files
  ]  # fmt: skip
  (root / "folder" / "train.txt").write_text("\n".join(lines))
  for file_format in ("tfrecord", "array_record"):
    fake_data.write_adhoc(
      root / file_format, "own", FEATURES, {"train": labels}, file_format
    )
  folder = str(root / "folder")
  return [
    ("folder", folder), ("list", folder), ("own", str(root / "tfrecord")),
    ("own", str(root / "array_record")), ("digits:5-7", ""),
  ]  # fmt: skip


def test_subsets_of_all_kinds_of_data_sets_are_read(tmp_path):
  for name, directory in write_sets(tmp_path):
    ref = SplitRef(name, directory, "train", subset=Subset(per_class=2, seed=1))
    reader = datasets.open_ref(ref)
    labels = [int(reader.source.read(i)[1]) for i in range(6)]
    assert sorted(labels) == [0, 0, 1, 1, 2, 2], name
    assert reader.split == "train, 2 of each class (seed 1)"
    # What is chosen is recorded, also where nothing is read.
    files = datasets.find_data_files(ref)
    assert files == reader.data_files
    assert files.facts["chosen"] == {"per_class": 2, "first": 0, "seed": 1}


def test_only_training_has_few_examples():
  values = config_lib.to_dict(config_lib.Config())
  values["data"] |= {"name": "digits:5-9", "per_class": 3}
  values["upstream"]["name"] = "digits:0-4"
  config = config_lib.from_dict({**values, "seed": 7})
  splits = configured_splits(config)
  assert splits["train"].subset == Subset(per_class=3, seed=7)
  assert not any(
    splits[role].subset for role in ("validation", "test", "upstream")
  )
  assert datasets.open_ref(splits["train"]).size == 15
  values["data"]["seed"] = 2
  config = config_lib.from_dict({**values, "seed": 7})
  assert configured_splits(config)["train"].subset.seed == 2
  values["data"]["first"] = 4
  with pytest.raises(ConfigError, match="expected one of them to be 0"):
    config_lib.from_dict(values)
