import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import ROOT
from fake_data import numbered_source, write_adhoc, write_folder, write_tfds

from memory_vit import glyphs
from memory_vit.config import DataConfig
from memory_vit.data import datasets, pipeline
from memory_vit.data.batching import eval_batches, train_batches
from memory_vit.data.datasets import open_split
from memory_vit.data.split_ref import SplitRef
from memory_vit.data.tfds_labels import find_keys
from memory_vit.errors import ConfigError, DataError
from memory_vit.model.task import EvalPreprocessing

PLAIN = EvalPreprocessing(image_size=8)
TFDS = tfds.features
FEATURES = TFDS.FeaturesDict(
  {
    "image": TFDS.Image(shape=(None, None, 3)),
    "label": TFDS.ClassLabel(names=["ant", "bee", "cat"]),
  }
)


def _train(source, *, steps, **options):
  """The first batches of training, each entry concatenated."""
  defaults = {"image_size": 8, "batch_size": 4, "seed": 0}
  batches = train_batches(source, DataConfig(), **(defaults | options))
  return _concatenate(itertools.islice(batches, steps))


def _concatenate(batches):
  batches = list(batches)
  return {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }


def _evaluate(source, **options):
  defaults = {"batch_size": 4}
  return _concatenate(eval_batches(source, PLAIN, **(defaults | options)))


def _assert_same(first, second):
  assert first.keys() == second.keys()
  for key in first:
    np.testing.assert_array_equal(first[key], second[key])


# --- training -----------------------------------------------------------------


def test_each_epoch_is_a_permutation():
  labels = _train(numbered_source(10), steps=10)["label"]
  epochs = labels.reshape(4, 10)  # A batch of 4 holds parts of two epochs.
  for epoch in epochs:
    assert sorted(epoch) == list(range(10))
  assert len(np.unique(epochs, axis=0)) == 4


def test_batches_have_the_promised_form():
  batch = _train(numbered_source(5), steps=1)
  assert batch.keys() == {"image", "label"}
  assert batch["image"].shape == (4, 8, 8, 3)
  assert batch["image"].dtype == np.float32
  assert batch["label"].dtype == np.int32
  assert np.abs(batch["image"]).max() <= 1


@pytest.mark.slow
def test_seed_decides_order_and_crops():
  source = numbered_source(10)
  first = _train(source, steps=5)
  _assert_same(first, _train(source, steps=5))
  other = _train(source, steps=5, seed=1)
  assert np.any(first["label"] != other["label"])
  # The same picture is cropped anew in the next epoch.
  single = numbered_source(1)
  one = _train(single, steps=1)["image"]
  assert len(np.unique(one, axis=0)) == 4
  # So it is with another seed, which changes no order here.
  again = _train(single, steps=1, seed=1)["image"]
  assert len(np.unique(np.concatenate([one, again]), axis=0)) == 8


def test_resuming_equals_not_stopping():
  source = numbered_source(10)
  whole = _train(source, steps=9)
  for steps in (1, 2, 7):
    rest = _train(source, steps=9 - steps, start=steps * 4)
    _assert_same(
      rest, {key: value[steps * 4 :] for key, value in whole.items()}
    )


def test_examples_do_not_depend_on_the_batch_size():
  source = numbered_source(10)
  _assert_same(
    _train(source, steps=6, batch_size=2),
    _train(source, steps=1, batch_size=12),
  )


@pytest.mark.fault("two-processes")
def test_processes_share_the_batches_of_one():
  source = numbered_source(10)
  shares = [
    list(
      itertools.islice(
        train_batches(
          source,
          DataConfig(),
          image_size=8,
          batch_size=8,
          seed=0,
          start=8,
          process_index=index,
          process_count=2,
        ),
        3,
      )
    )
    for index in range(2)
  ]
  joined = _concatenate(
    _concatenate(parts) for parts in zip(*shares, strict=True)
  )
  _assert_same(joined, _train(source, steps=3, batch_size=8, start=8))


@pytest.mark.fault("partial-batch")
def test_source_may_be_smaller_than_a_batch():
  labels = _train(numbered_source(3), steps=1, batch_size=8)["label"]
  assert sorted(labels[:3]) == sorted(labels[3:6]) == [0, 1, 2]


def test_impossible_batches_and_crops_are_refused_at_once():
  source = numbered_source(3)
  options = {"image_size": 8, "seed": 0}
  with pytest.raises(ConfigError, match="3 does not divide among 2"):
    train_batches(
      source, DataConfig(), batch_size=3, process_count=2, **options
    )
  with pytest.raises(ConfigError, match="process 2"):
    eval_batches(source, PLAIN, batch_size=4, process_index=2, process_count=2)
  small = DataConfig(train_crop="small", resize=7)
  with pytest.raises(ConfigError, match="resize is 7"):
    train_batches(source, small, batch_size=3, **options)


# --- evaluation ---------------------------------------------------------------


@pytest.mark.fault("partial-batch")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 8])
def test_evaluation_counts_every_example_once(size, count):
  source = numbered_source(size)
  shares = [
    list(
      eval_batches(
        source, PLAIN, batch_size=4, process_index=i, process_count=count
      )
    )
    for i in range(count)
  ]
  assert {len(share) for share in shares} == {-(-size // 4)}
  joined = _concatenate(
    _concatenate(parts) for parts in zip(*shares, strict=True)
  )
  assert joined["mask"].dtype == np.float32
  assert len(joined["mask"]) % 4 == 0
  real = joined["mask"] == 1
  np.testing.assert_array_equal(joined["label"][real], np.arange(size))
  assert np.all(joined["mask"][~real] == 0)
  assert np.all(np.isfinite(joined["image"]))


# --- broken input -------------------------------------------------------------


@pytest.mark.parametrize(
  ("damage", "words"),
  [
    pytest.param(
      lambda file: file.write_bytes(b"\x89PNG\r\n\x1a\n and no more"),
      "cannot",
      marks=pytest.mark.slow,
    ),
    (lambda file: file.write_text("no picture"), "cannot.*not a JPEG, PNG"),
    pytest.param(pathlib.Path.unlink, "cannot be read", marks=pytest.mark.slow),
  ],
  ids=["broken", "no picture", "gone"],
)
def test_unreadable_picture_is_named(tmp_path, damage, words):
  files = [f"{i}.png" for i in range(6)]
  write_folder(tmp_path, {"train/a": files, "train/b": files})
  reader = open_split("folder", "train", str(tmp_path))
  damage(tmp_path / "train/b/3.png")
  index = [reader.file_name(i)[-7:] for i in range(12)].index("b/3.png")
  what = rf"'folder {tmp_path.name}', split 'train', example {index}"
  pattern = rf"{what} \(.*b/3.png\) {words}"
  with pytest.raises(DataError, match=pattern):
    _evaluate(reader)
  with pytest.raises(DataError, match=pattern):
    _train(reader, steps=3, start=12)


@pytest.mark.fault("control-characters")
def test_file_names_that_are_not_utf_8_are_escaped(tmp_path):
  write_folder(tmp_path, {"train/a": ["0.png", "1.png"]})
  odd = tmp_path / "train/a" / os.fsdecode(b"\xff\xfe.png")
  (tmp_path / "train/a/1.png").rename(odd)
  reader = open_split("folder", "train", str(tmp_path))
  assert _evaluate(reader)["mask"].sum() == 2
  names = {reader.file_name(i) for i in range(2)}
  assert f"{tmp_path}/train/a/\\xff\\xfe.png" in names
  odd.unlink()
  with pytest.raises(DataError, match=r"/a/\\xff\\xfe.png\) cannot be read"):
    _evaluate(reader)
  (tmp_path / "train" / os.fsdecode(b"b\xff")).mkdir()
  with pytest.raises(DataError, match=r"train/b\\xff is not UTF-8"):
    open_split("folder", "train", str(tmp_path))


# --- the end of the program ---------------------------------------------------


def test_open_batches_are_closed_at_exit():
  batches = train_batches(
    numbered_source(3), DataConfig(), image_size=8, batch_size=4, seed=0
  )
  next(batches)
  pipeline.close_batches()
  with pytest.raises(StopIteration):
    next(batches)


@pytest.mark.processes
def test_program_ends_while_batches_are_being_made(tmp_path):
  write_adhoc(tmp_path, "own", FEATURES, {"train": [0, 1, 2]}, "array_record")
  program = f"""if True:
    from memory_vit import config, data
    source = data.open_split("own", "train", {str(tmp_path)!r})
    batches = data.train_batches(
      source, config.DataConfig(), image_size=64, batch_size=64, seed=0
    )
    next(batches)
  """
  subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, timeout=600, check=True
  )


# --- folders ------------------------------------------------------------------


def test_folder_has_classes_and_all_pictures(tmp_path):
  write_folder(
    tmp_path,
    {
      "train/b": ["0.jpg", "1.JPEG", "2.png"],
      "train/a": ["0.webp", "1.BMP"],
      "test/a": ["0.jpg"],
      ".hidden/c": ["0.jpg"],
    },
  )
  (tmp_path / "train/a/notes.txt").write_text("no picture")
  reader = open_split("folder", "train", str(tmp_path))
  assert reader.class_names == ("a", "b")
  assert reader.size == 5
  batch = _evaluate(reader)
  for i in range(5):
    path = pathlib.Path(reader.file_name(i))
    assert reader.class_names[batch["label"][i]] == path.parent.name
    grey = round(float(batch["image"][i].mean()) * 127.5 + 127.5)
    assert abs(grey - int(path.stem)) <= 1
  assert len({reader.file_name(i) for i in range(5)}) == 5
  test = open_split("folder", "test", str(tmp_path))
  assert (test.size, test.class_names) == (1, ("a", "b"))
  assert open_split("folder", "train+test", str(tmp_path)).size == 6


def test_images_of_deeper_folders_belong_to_the_class(tmp_path):
  """Of folders within folders, of links, and of GIF files, too."""
  write_folder(
    tmp_path,
    {
      "train/a": ["0.png"],
      "train/a/deep/er": ["1.png", "2.gif"],
      "elsewhere": ["3.png"],
    },
  )
  (tmp_path / "train/b").symlink_to("../elsewhere")
  (tmp_path / "train/b/loop").symlink_to("../train")
  reader = open_split("folder", "train", str(tmp_path))
  found = {
    os.path.relpath(reader.file_name(i), tmp_path): int(label)
    for i, label in enumerate(_evaluate(reader)["label"][: reader.size])
  }
  assert found == {
    "train/a/0.png": 0, "train/a/deep/er/1.png": 0, "train/a/deep/er/2.gif": 0,
    "train/b/3.png": 1,
  }  # fmt: skip


@pytest.mark.fault("broken-image")
def test_skipped_files_are_counted_and_named(tmp_path):
  write_folder(
    tmp_path,
    {"train/a": ["0.png", ".1.png"], "train/b": ["0.png"], "other/c": []},
  )
  (tmp_path / "train/a/sub").symlink_to("..")
  for name in ("train/stray.png", "train/a/x.txt", "train/b/y.csv"):
    (tmp_path / name).write_text("")
  reader = open_split("folder", "train[:1]", str(tmp_path))
  [line] = reader.skipped
  assert line == (
    f"{tmp_path}/train: skipped 1 hidden (a/.1.png), 2 with other suffixes "
    "(a/x.txt, b/y.csv), 1 linked to a folder that is read elsewhere "
    "(a/sub), 1 outside of class folders (stray.png)"
  )


@pytest.mark.fault("broken-image")
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_that_cannot_be_listed_is_an_error(
  tmp_path, monkeypatch, split
):
  write_folder(tmp_path, {"train/a/deep": ["0.png"], "test/a/deep": ["0.png"]})
  listed = os.scandir

  def scandir(path):
    if str(path) == closed:
      raise PermissionError(13, "Permission denied")
    return listed(path)

  monkeypatch.setattr(os, "scandir", scandir)
  for name in ("", f"/{split}", f"/{split}/a", f"/{split}/a/deep"):
    closed = f"{tmp_path}{name}"
    with pytest.raises(DataError, match=rf"{closed} cannot be read \(Perm"):
      open_split("folder", split, str(tmp_path))
  # What is not asked for may be anything.
  closed = f"{tmp_path}/test/a"
  assert open_split("folder", "train", str(tmp_path)).size == 1


@pytest.mark.parametrize(
  ("name", "directory", "words"),
  [
    ("", "", "config.data.name"),
    ("folder", "", "config.data.dir"),
    ("folder", "not/there", "config.data.dir"),
    ("folder", "/proc", "'/proc' has no train/"),
    ("glyphs", "", "expected 'glyphs:inverted'"),
    ("glyphs:rotation", "", "expected 'glyphs:inverted'"),
    ("digits:7", "", "'digits:0-4'"),
    ("digits:5-4", "", "'digits:0-4'"),
    ("digits:0-10", "", "'digits:0-4'"),
    ("i_naturalist2021", "{tmp}", "lacks a file of labels"),
    ("no_such_set", "{tmp}", "cannot provide data set 'no_such_set'"),
  ],
)
def test_data_sets_that_do_not_exist_are_refused(
  tmp_path, name, directory, words
):
  with pytest.raises(DataError, match=words):
    open_split(name, "train", directory.format(tmp=tmp_path))


def test_slices_of_a_folder_are_fair_and_disjoint(tmp_path):
  names = [f"{i}.bmp" for i in range(50)]
  write_folder(tmp_path, {"train/a": names, "train/b": names})

  def files(split):
    reader = open_split("folder", split, str(tmp_path))
    return {reader.file_name(i) for i in range(reader.size)}

  first, second = files("train[:50%]"), files("train[50%:]")
  assert len(first) == len(second) == 50
  assert first | second == files("train")
  assert 15 < sum("/a/" in file for file in first) < 35


@pytest.mark.parametrize(
  ("tree", "split", "message"),
  [
    ({"train/a": ["0.png"], "test/z": ["0.png"]}, "test", r"have: \['z'\]"),
    ({"train/a": ["0.png"], "train/b": []}, "train", r"classes \['b'\]"),
    ({"test/a": ["0.png"]}, "test", "no train/"),
    ({"train/a": ["0.png"]}, "val", r"no split 'val'.*\{'train': 1\}"),
    ({"train/a": ["0.png"]}, "train[90%:]", "is empty"),
    ({"train/a": ["0.png"]}, "train[:9]", "incompatible with 1"),
    ({"train/a": ["0.png"]}, "train[:", "no split 'train"),
    ({"train/a": ["0.png"]}, "test", r"add --config\.data\.test='' to a run"),
    ({"train/a": []}, "train", "is empty"),
  ],
)
def test_unusable_folders_are_refused(tmp_path, tree, split, message):
  write_folder(tmp_path, tree)
  with pytest.raises(DataError, match=message):
    open_split("folder", split, str(tmp_path))


# --- digits and glyphs --------------------------------------------------------


def test_digits_are_split_by_class():
  train = open_split("digits", "train")
  test = open_split("digits", "test")
  assert train.size + test.size == 1797
  assert train.class_names == tuple("0123456789")
  labels = _evaluate(test, batch_size=test.size)["label"]
  counts = np.bincount(labels)
  assert counts.min() >= 34
  assert counts.max() <= 37


def test_range_of_digits_is_labelled_from_zero():
  source = open_split("digits:5-9", "test")
  assert source.class_names == tuple("56789")
  batch = _evaluate(source, batch_size=source.size)
  assert set(batch["label"]) == set(range(5))
  # The same pictures as in the whole set.
  whole = open_split("digits", "test")
  whole = _evaluate(whole, batch_size=whole.size)
  chosen = whole["label"] >= 5
  np.testing.assert_array_equal(batch["image"], whole["image"][chosen])
  np.testing.assert_array_equal(batch["label"], whole["label"][chosen] - 5)


def test_glyphs_come_with_the_package():
  """Classes in equal numbers, as pixels that no encoding has changed."""
  with np.load(glyphs.INVERTED) as arrays:
    for split, each in (("train", 30), ("test", 15)):
      source = open_split("glyphs:inverted", split)
      counts = np.bincount(source.labels, minlength=120)
      assert counts.tolist() == [each] * 120
      for i in (0, 1_000):
        encoded, label = source.source.read(i)
        image = tf.io.decode_image(encoded).numpy()
        np.testing.assert_array_equal(image, arrays[f"{split}_images"][i])
        assert label == arrays[f"{split}_labels"][i]
  assert len(set(source.class_names)) == 120
  assert open_split("glyphs:inverted", "train[90%:]").size == 360


# --- TFDS ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "labels", "unlabelled"),
  [
    ("cifar100", {"train": [0, 99, 7], "test": [3, 4]}, None),
    (
      "sun397/tfds",
      {"train": [0, 396], "validation": [1], "test": [2, 200]},
      None,
    ),
    (
      "places365_small",
      {"train": [0, 364, 3], "validation": [1], "test": [-1, -1]},
      "test",
    ),
    (
      "i_naturalist2017",
      {"train": [0, 5088, 9], "validation": [1], "test": [-1]},
      "test",
    ),
  ],
)
def test_data_sets_of_the_paper(tmp_path, name, labels, unlabelled):
  write_tfds(tmp_path, name, labels, "array_record")
  for split, expected in labels.items():
    if split == unlabelled:
      with pytest.raises(
        DataError, match="labels -1: an unlabelled test split"
      ):
        open_split(name, split, str(tmp_path))
      continue
    source = open_split(name, split, str(tmp_path))
    assert source.size == len(expected)
    assert source.num_classes == {
      "cifar100": 100,
      "sun397/tfds": 397,
      "places365_small": 365,
      "i_naturalist2017": 5089,
    }[name]  # fmt: skip
    batch = _evaluate(source)
    found = batch["label"][batch["mask"] == 1]
    assert sorted(found) == sorted(expected)
    # The picture belongs to the label.
    grey = np.round(batch["image"][:, 4, 4, 0] * 127.5 + 127.5)
    np.testing.assert_allclose(grey, batch["label"] % 256, atol=2)


@pytest.mark.slow
def test_both_file_formats_give_the_same_stream(tmp_path):
  labels = {"train": [0, 1, 2] * 7, "test": [0]}
  streams = []
  for file_format in ("tfrecord", "array_record"):
    directory = tmp_path / file_format
    write_adhoc(directory, "own", FEATURES, labels, file_format)
    source = open_split("own", "train[10%:]+test", str(directory))
    assert source.class_names == ("ant", "bee", "cat")
    streams.append((_train(source, steps=8), _evaluate(source)))
  for first, second in zip(*streams, strict=True):
    _assert_same(first, second)


def test_directory_may_be_that_of_the_data_set(tmp_path):
  directory = write_adhoc(tmp_path, "own", FEATURES, {"train": [0, 1]})
  by_name = open_split("own", "train", str(tmp_path))
  by_place = open_split("own", "train", str(directory))
  _assert_same(_evaluate(by_name), _evaluate(by_place))


def test_large_split_without_random_access_is_refused(tmp_path):
  directory = write_adhoc(tmp_path, "own", FEATURES, {"train": [0] * 10})
  [file] = directory.glob("*train*")
  gib = file.stat().st_size / 2**30
  for split, needed in (("train", gib), ("train[:50%]", gib / 2)):
    open_split("own", split, str(tmp_path), cache_gib=1.1 * needed)
    with pytest.raises(DataError, match="cache_gib.*tfds convert_format"):
      open_split("own", split, str(tmp_path), cache_gib=0.5 * needed)


@pytest.mark.fault("wrong-label")
def test_wrong_label_is_found_on_the_way(tmp_path):
  labels = [0, 1, -1, 2, 0, 1]
  write_adhoc(tmp_path / "a", "own", FEATURES, {"train": labels})
  with pytest.raises(DataError, match="labels -1"):
    open_split("own", "train", str(tmp_path / "a"))
  # With random access the labels are not known before they are read.
  write_adhoc(
    tmp_path / "b", "own", FEATURES, {"train": labels}, "array_record"
  )
  source = open_split("own", "train", str(tmp_path / "b"))
  with pytest.raises(DataError, match="labels -1"):
    _evaluate(source, batch_size=2)
  with pytest.raises(DataError, match="labels -1"):
    _train(source, steps=3)


def test_unknown_split_lists_the_splits(tmp_path):
  write_adhoc(tmp_path, "own", FEATURES, {"train": [0, 1], "val": [2]})
  with pytest.raises(DataError, match=r"\{'train': 2, 'val': 1\}"):
    open_split("own", "test", str(tmp_path))


@pytest.mark.fault("damaged-shard")
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_missing_file_is_refused(tmp_path, file_format):
  directory = write_adhoc(
    tmp_path, "own", FEATURES, {"train": [0, 1]}, file_format
  )
  for file in directory.glob("*train*"):
    file.unlink()
  with pytest.raises(DataError, match="'own', split 'train'.* cannot be read"):
    open_split("own", "train", str(tmp_path))


@pytest.mark.parametrize(
  ("name", "advice"),
  [
    ("sun397", "SUN397.tar.gz.* into {dir}/downloads/manual"),
    ("sun397/tfds:4.0.0", "Partitions.zip"),
    ("places365_small", "{dir}/downloads/manual"),
    ("i_naturalist2017", "--config=folder"),
    ("cifar100", "no network"),
  ],
)
def test_failed_download_says_what_to_do(tmp_path, monkeypatch, name, advice):
  def fail(*args, **kwargs):
    raise ConnectionError("no network\nand more lines")

  monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
  with pytest.raises(DataError, match=advice.format(dir=tmp_path)) as error:
    open_split(name, "train", str(tmp_path))
  assert "ConnectionError: no network" in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.fault("damaged-shard")
@pytest.mark.parametrize("how", ["a dry run", "a distributed run"])
def test_unprepared_data_are_not_downloaded_by(tmp_path, monkeypatch, how):
  """The size and the command are said; what is prepared is read."""
  prepared = []
  place = tmp_path / "my data"
  write_tfds(place, "cifar10", {"train": [3, 1]})
  monkeypatch.setattr(
    tfds.core.DatasetBuilder,
    "download_and_prepare",
    lambda builder, **options: prepared.append((builder, options)),
  )

  def read(name):
    return open_split(name, "train", str(place))

  ask = read
  if how == "a dry run":

    def ask(name):
      datasets.require_prepared(SplitRef(name, str(place), "train"))

  else:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  with pytest.raises(DataError) as error:
    ask("i_naturalist2017")
  text = str(error.value)
  assert "237.35 GiB" in text
  assert f"{how} downloads nothing" in text
  assert not prepared
  assert not (place / "i_naturalist2017").exists()
  python, flag, program = shlex.split(re.search("`(.*?)`", text)[1])
  assert (python, flag) == ("python", "-c")
  exec(program)
  [(builder, options)] = prepared
  assert builder.data_dir.startswith(f"{place}/i_naturalist2017/")
  assert options == {"file_format": "array_record"}
  ask("cifar10")
  assert read("cifar10").size == 2


def test_a_download_is_announced_with_its_size_and_place(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(
    tfds.core.DatasetBuilder, "download_and_prepare", _announced(caplog)
  )
  with pytest.raises(DataError, match="nothing more to see"):
    open_split("cifar100", "train", str(tmp_path))


def _announced(caplog):
  def prepare(builder, **_):
    [line] = [r.getMessage() for r in caplog.records if "Prepar" in r.msg]
    assert f"in {builder.data_dir}" in line
    assert "160.71 MiB" in line
    raise ConnectionError("nothing more to see")

  return prepare


IMAGE, CLASS = TFDS.Image(), TFDS.ClassLabel(num_classes=3)


@pytest.mark.parametrize(
  ("features", "supervised_keys", "expected"),
  [
    ({"picture": IMAGE, "kind": CLASS}, None, ("picture", "kind")),
    # CIFAR-100 and iNaturalist have two kinds of labels.
    (
      {"image": IMAGE, "coarse": CLASS, "label": CLASS},
      None,
      ("image", "label"),
    ),
    # The data set's own word counts more than a name.
    ({"x": IMAGE, "y": CLASS, "label": CLASS}, ("x", "y"), ("x", "y")),
    # Places365.
    (
      {"image": IMAGE, "label": CLASS, "filename": TFDS.Text()},
      ("image", "label", "filename"),
      ("image", "label"),
    ),
    ({"a": IMAGE, "b": IMAGE, "label": CLASS}, ("b", "label"), ("b", "label")),
    # Of a segmentation, the picture and not the mask.
    (
      {"image": IMAGE, "mask": TFDS.LabeledImage(labels=3), "label": CLASS},
      None,
      ("image", "label"),
    ),
    ({"a": IMAGE, "b": IMAGE, "label": CLASS}, None, None),
    ({"image": IMAGE, "a": CLASS, "b": CLASS}, None, None),
    ({"image": TFDS.Image(dtype=np.uint16), "label": CLASS}, None, None),
    ({"text": TFDS.Text(), "label": CLASS}, ("text", "label"), None),
  ],
)
def test_picture_and_class_are_found(features, supervised_keys, expected):
  if expected is None:
    with pytest.raises(DataError, match="one 8-bit Image and one ClassLabel"):
      find_keys("x", features, supervised_keys)
  else:
    found = find_keys("x", features, supervised_keys)
    assert found == expected


@pytest.mark.slow
def test_real_pictures_are_decoded(data_dir):
  source = open_split("cifar10_small", "test", str(data_dir / "tfds"))
  assert (source.size, source.num_classes) == (2000, 10)
  assert "airplane" in source.class_names
  batch = _train(source, steps=1, batch_size=100)
  assert len(np.unique(batch["label"])) == 10
  assert 0.2 < batch["image"].std() < 0.8


@pytest.mark.slow
def test_position_may_be_very_large():
  """Beyond what 32 bits hold, the examples are those of any other place."""
  source, start = numbered_source(3), 3 * 2**40
  far = _train(source, steps=3, start=start)
  for epoch in far["label"].reshape(4, 3):
    assert sorted(epoch) == [0, 1, 2]
  _assert_same(
    _train(source, steps=1, start=start + 8),
    {key: value[8:] for key, value in far.items()},
  )
  # Where numbers had been cut off, this would be the beginning.
  near = _train(source, steps=3)
  assert not np.array_equal(far["image"], near["image"])
