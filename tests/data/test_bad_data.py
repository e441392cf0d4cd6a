"""Broken records and pictures: named, left out where that is allowed."""

import dataclasses
import itertools
import json
import logging
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import types

import fake_data
import faults
import google_crc32c
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import ROOT, tiny_backbone
from fake_data import broken_source, flip_bit, numbered_source, record_start
from PIL import Image

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.config import DataConfig
from memory_vit.data import batching, tfrecord, watchdog
from memory_vit.data import tfds as data_tfds
from memory_vit.data.batching import eval_batches, train_batches
from memory_vit.data.datasets import open_split
from memory_vit.data.graph_source import GraphSource
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.evaluation import evaluate
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import processes
from memory_vit.train import run, summary

PLAIN = EvalPreprocessing(image_size=8)
# Seconds after which something hangs, on a machine that has much else to do.
PATIENCE = 600
FEATURES = tfds.features.FeaturesDict(
  {
    "image": tfds.features.Image(shape=(None, None, 3)),
    "label": tfds.features.ClassLabel(num_classes=12),
  }
)


@pytest.fixture(autouse=True)
def never_a_hang():
  def ring(*args):
    raise TimeoutError("this test hangs")

  before = signal.signal(signal.SIGALRM, ring)
  signal.alarm(PATIENCE + 60)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


@pytest.fixture
def log(caplog, monkeypatch):
  """What the package logs, whoever set its logger up before."""
  logger = logging.getLogger("memory_vit")
  monkeypatch.setattr(logger, "propagate", True)
  caplog.set_level(logging.WARNING, "memory_vit")
  return caplog


def concatenate(batches):
  batches = list(batches)
  return {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }


def trained_on(source, *, steps, **options):
  defaults = {"image_size": 8, "batch_size": 4, "seed": 0}
  batches = train_batches(source, DataConfig(), **(defaults | options))
  return concatenate(itertools.islice(batches, steps))


def assert_same(first, second):
  assert first.keys() == second.keys()
  for key in first:
    np.testing.assert_array_equal(first[key], second[key])


# --- the records of a file ----------------------------------------------------


@pytest.fixture
def shard(tmp_path):
  """Ten records of different lengths."""
  path = tmp_path / "x.tfrecord"
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i in range(10):
      writer.write(bytes([i]) * (5 + i))
  return tfrecord.Shard(str(path), 0, 10, 10)


def lost(shard):
  """{record: why it is lost}; the others are as they were written."""
  found = list(tfrecord.read(shard))
  assert len(found) == shard.take
  reasons = {}
  for i, record in enumerate(found, shard.skip):
    if isinstance(record, tfrecord.CorruptRecord):
      reasons[i] = record.reason
    else:
      assert record == bytes([i]) * (5 + i)
  return reasons


def test_undamaged_file_loses_no_record(shard):
  assert lost(shard) == {}
  assert lost(dataclasses.replace(shard, skip=3, take=4)) == {}


@pytest.mark.fault("corrupt-record")
def test_every_flipped_bit_costs_a_record_and_no_more(shard):
  path = pathlib.Path(shard.path)
  whole = path.read_bytes()
  begin, end = record_start(path, 4), record_start(path, 5)
  for position in range(begin, end):
    flip_bit(path, position)
    reasons = lost(shard)
    if position < begin + 12:  # the length and its checksum
      assert set(reasons) == {4, 5, 6, 7, 8, 9}
      assert "the record's length is corrupt" in reasons[4]
    else:
      assert set(reasons) == {4}
      assert "its checksum is wrong" in reasons[4]
    assert "last good record: 3" in reasons[4]
    path.write_bytes(whole)


@pytest.mark.fault("damaged-shard")
def test_every_cut_is_noticed(shard):
  path = pathlib.Path(shard.path)
  whole, begin = path.read_bytes(), record_start(path, 4)
  for size in range(begin, record_start(path, 5)):
    path.write_bytes(whole[:size])
    assert set(lost(shard)) == {4, 5, 6, 7, 8, 9}
  path.write_bytes(b"")
  assert "ends before this record; last good record: none" in lost(shard)[0]
  path.unlink()
  reasons = lost(shard)
  assert len(reasons) == 10
  assert "NotFoundError" in reasons[9]


# --- TFDS ---------------------------------------------------------------------


@pytest.mark.fault("lying-record")
@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1])
def test_record_longer_than_its_file_is_refused(tmp_path, length):
  """Its length is sealed; whoever believes it takes as much memory."""
  directory = write_own(tmp_path)
  (file,) = directory.glob("*train*")
  start, content = fake_data.record_start(file, 11), file.read_bytes()
  header = struct.pack("<Q", length)
  checksum = google_crc32c.value(header)
  masked = (checksum >> 15 | checksum << 17) + 0xA282EAD8  # of TFRecord files
  header += struct.pack("<I", masked & 0xFFFFFFFF)
  file.write_bytes(content[:start] + header + content[start + 12 :])
  with pytest.raises(BrokenDataError, match=f"this record of {length:,} bytes"):
    open_split("own", "train", str(tmp_path))
  assert open_split("own", "train", str(tmp_path), max_bad=1).size == 12


@pytest.mark.fault("lying-record")
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("count", [10**6, 10**15])
def test_more_examples_than_files_can_hold_are_refused(
  tmp_path, file_format, count
):
  info = write_own(tmp_path, file_format) / "dataset_info.json"
  content = json.loads(info.read_text())
  for entry in content["splits"]:
    entry["shardLengths"] = [str(count)]
  info.write_text(json.dumps(content))
  with pytest.raises(BrokenDataError, match=f"{count:,} examples, but the fil"):
    open_split("own", "train", str(tmp_path), max_bad=2**62)


@pytest.mark.fault("special-file")
def test_shard_that_is_a_pipe_is_refused(tmp_path):
  (file,) = write_own(tmp_path).glob("*train*")
  file.unlink()
  os.mkfifo(file)
  with pytest.raises(BrokenDataError, match="is not a regular file"):
    open_split("own", "train", str(tmp_path))


def write_own(directory, file_format="tfrecord", count=12):
  """A data set in which no two labels are equal."""
  labels = {"train": range(count), "test": [0, 1]}
  return fake_data.write_adhoc(directory, "own", FEATURES, labels, file_format)


def labels_of(source):
  batch = concatenate(eval_batches(source, PLAIN, batch_size=4))
  return [
    int(label) if mask else None
    for label, mask in zip(batch["label"], batch["mask"], strict=True)
  ][: source.size]


def damage(file, how):
  content = file.read_bytes()
  if how == "payload":
    flip_bit(file, record_start(file, 2) + 20)
  elif how == "length":
    flip_bit(file, record_start(file, 2) + 3)
  elif how == "missing":
    file.unlink()
  else:
    keep = {"empty": 0, "half": len(content) // 2, "last byte": -1}[how]
    file.write_bytes(content[:keep])


@pytest.mark.fault("corrupt-record", "damaged-shard")
@pytest.mark.parametrize(
  ("how", "record", "last_good"),
  [
    ("payload", 2, "1"), ("length", 2, "1"), ("empty", 0, "none"),
    ("half", 2, "1"), ("last byte", 3, "2"), ("missing", 0, "none"),
  ],
)  # fmt: skip
def test_broken_shard_is_named_with_its_last_good_record(
  tmp_path, how, record, last_good
):
  directory = write_own(tmp_path)
  fake_data.reshard(directory, "train", [4, 4, 4])
  damage(directory / "own-train.tfrecord-00001-of-00003", how)
  with pytest.raises(BrokenDataError) as error:
    open_split("own", "train", str(tmp_path))
  text = str(error.value)
  assert f"example {4 + record} (" in text
  assert f"train.tfrecord-00001-of-00003, record {record} of 4) cannot" in text
  assert f"last good record: {last_good}" in text
  assert "check_data" in text
  # What does not touch the shard can be used.
  assert open_split("own", "train[:4]", str(tmp_path)).size == 4
  assert open_split("own", "test", str(tmp_path)).size == 2


@pytest.mark.fault("corrupt-record")
@pytest.mark.slow
def test_corrupt_records_are_left_out(tmp_path, log):
  directory = write_own(tmp_path)
  fake_data.reshard(directory, "train", [5, 7])
  whole = open_split("own", "train", str(tmp_path))  # is in memory
  clean = labels_of(whole)
  for i, record in ((0, 0), (1, 3)):
    file = directory / f"own-train.tfrecord-0000{i}-of-00002"
    flip_bit(file, record_start(file, record) + 30)
  with pytest.raises(BrokenDataError, match="2 examples cannot.*max_bad"):
    open_split("own", "train", str(tmp_path), max_bad=1)
  log.clear()
  source = open_split("own", "train", str(tmp_path), max_bad=2)
  assert set(source.unreadable) == {0, 5 + 3}
  assert len(log.records) == 2
  assert "00001-of-00002, record 3 of 7" in log.records[1].getMessage()
  expected = [None if i in (0, 8) else label for i, label in enumerate(clean)]
  assert labels_of(source) == expected
  # A part of a split counts what lies in it.
  part = open_split("own", "train[6:10]+test", str(tmp_path), max_bad=1)
  assert set(part.unreadable) == {2}
  assert labels_of(part)[:4] == [clean[6], clean[7], None, clean[9]]
  # In training, the next stands in for one.
  next_to = {clean[0]: clean[1], clean[8]: clean[9]}
  expected = trained_on(whole, steps=1, batch_size=12)["label"]
  found = trained_on(source, steps=1, batch_size=12)["label"]
  assert list(found) == [next_to.get(label, label) for label in expected]


@pytest.mark.fault("corrupt-record")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["payload", "empty", "cut", "missing"])
def test_broken_array_record_is_refused_or_left_out(tmp_path, how):
  directory = write_own(tmp_path, "array_record")
  clean = labels_of(open_split("own", "train", str(tmp_path)))
  [file] = directory.glob("*train*")
  content = file.read_bytes()
  if how == "payload":
    starts = [
      i for i in range(len(content)) if content[i : i + 4] == b"\x89PNG"
    ]
    flip_bit(file, starts[3] + 60)
  elif how == "missing":
    file.unlink()
  else:
    file.write_bytes(b"" if how == "empty" else content[:-1])
  if how == "payload":  # is not noticed before it is read
    source = open_split("own", "train", str(tmp_path))
    with pytest.raises(BrokenDataError, match="example 3 .*array_record-00000"):
      labels_of(source)
    source = open_split("own", "train", str(tmp_path), max_bad=1)
    found = labels_of(source)
    assert found == [*clean[:3], None, *clean[4:]]
  else:
    for allowed in (0, 3):
      with pytest.raises(BrokenDataError, match="12 examples cannot be read"):
        open_split("own", "train", str(tmp_path), max_bad=allowed)


@pytest.mark.fault("damaged-shard")
def test_array_record_with_wrong_number_of_records_is_refused(tmp_path):
  """A file that was copied over from elsewhere."""
  directory = write_own(tmp_path / "a", "array_record")
  other = write_own(tmp_path / "b", "array_record", count=9)
  [file] = directory.glob("*train*")
  [short] = other.glob("*train*")
  file.write_bytes(short.read_bytes())
  with pytest.raises(
    BrokenDataError, match="has 9 records; there should be 12"
  ):
    open_split("own", "train", str(tmp_path / "a"))
  with pytest.raises(BrokenDataError, match="none of its 12 examples"):
    open_split("own", "train", str(tmp_path / "a"), max_bad=12)


def test_skipped_array_records_are_not_read(tmp_path, monkeypatch):
  """Though something can be: a wrong file holds other examples."""
  write_own(tmp_path, "array_record")
  clean = labels_of(open_split("own", "train", str(tmp_path)))
  monkeypatch.setattr(
    data_tfds, "_bad_array_records", lambda shards: {3: "of another file"}
  )
  source = open_split("own", "train", str(tmp_path), max_bad=1)
  assert labels_of(source) == [*clean[:3], None, *clean[4:]]


@pytest.mark.slow
def test_record_without_an_example_is_refused_or_left_out(tmp_path):
  directory = write_own(tmp_path)
  [file] = directory.glob("*train*")
  clean = labels_of(open_split("own", "train", str(tmp_path)))
  records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
  records[7] = b"whole, and something else"
  with tf.io.TFRecordWriter(str(file)) as writer:
    for record in records:
      writer.write(record)
  with pytest.raises(BrokenDataError, match="example 7 .*record 7 of 12"):
    open_split("own", "train", str(tmp_path))
  source = open_split("own", "train", str(tmp_path), max_bad=1)
  assert labels_of(source) == [*clean[:7], None, *clean[8:]]


@pytest.mark.fault("wrong-label")
def test_wrong_label_names_the_example(tmp_path):
  directory = fake_data.write_adhoc(
    tmp_path, "own", FEATURES, {"train": [0, 1, -1]}
  )
  with pytest.raises(BrokenDataError, match=r"labels -1.*tfrecord-00000.*of 3"):
    open_split("own", "train", str(directory))


# --- left out in training -----------------------------------------------------


@pytest.mark.slow
def test_next_readable_example_takes_the_place():
  broken = (2, 3, 9)  # two in a row, and the last
  clean = trained_on(numbered_source(10), steps=2, batch_size=10)
  found = trained_on(
    broken_source(10, broken, max_bad=3), steps=2, batch_size=10
  )
  stands_for = np.array([{2: 4, 3: 4, 9: 0}.get(i, i) for i in range(10)])
  np.testing.assert_array_equal(found["label"], stands_for[clean["label"]])
  # All others are the same pictures, cropped in the same way, to the bit.
  same = found["label"] == clean["label"]
  np.testing.assert_array_equal(found["image"][same], clean["image"][same])
  assert not np.any(np.all(found["image"] == clean["image"], (1, 2, 3))[~same])


@pytest.mark.slow
def test_leaving_out_depends_on_the_number_alone():
  def source():
    return broken_source(16, (2, 3), max_bad=2)

  whole = trained_on(source(), steps=3, batch_size=8)
  rest = trained_on(source(), steps=2, batch_size=8, start=8)
  assert_same(rest, {key: v[8:] for key, v in whole.items()})
  assert_same(trained_on(source(), steps=1, batch_size=24), whole)
  shares = [
    train_batches(
      source(), DataConfig(), image_size=8, batch_size=8, seed=0,
      process_index=index, process_count=2,
    )
    for index in range(2)
  ]  # fmt: skip
  joined = [
    concatenate(parts)
    for parts in itertools.islice(zip(*shares, strict=True), 3)
  ]
  assert_same(concatenate(joined), whole)


@pytest.mark.slow
def test_unreadable_example_is_logged_once_with_its_reason(log):
  source = broken_source(6, (1, 4), max_bad=2)
  trained_on(source, steps=2, batch_size=6)  # two epochs
  messages = sorted(record.getMessage() for record in log.records)
  assert len(messages) == len(source.unreadable) == 2
  assert "example 1 cannot be read: not a JPEG" in messages[0]
  assert "example 4 cannot be read" in messages[1]


READS = """if True:
  import sys
  from memory_vit import config
  from memory_vit.data import batching
  from memory_vit.data.datasets import open_split
  from memory_vit.model.task import EvalPreprocessing

  split = open_split("folder", "train", sys.argv[1], max_bad=9)
  batches = batching.train_batches(
    split, config.DataConfig(), image_size=8, batch_size=8, seed=0
  )
  for _ in range(12):  # epochs of two steps
    next(batches)
  for _ in range(2):
    plain = EvalPreprocessing(image_size=8)
    list(batching.eval_batches(split, plain, batch_size=8))
"""


@pytest.mark.fault("broken-image")
@pytest.mark.processes
def test_a_broken_image_is_one_line_of_the_log(tmp_path):
  """Whatever decoders and TensorFlow would say in every epoch."""
  jpeg, png, webp = (
    fake_data.encode(fake_data.noise(1, 40, 40), kind)
    for kind in ("JPEG", "PNG", "WEBP")
  )
  files = {
    f"{i}.png": fake_data.encode(fake_data.noise(i), "PNG") for i in range(11)
  }
  broken = {
    "text.jpg": b"no picture", "empty.png": b"", "cut.jpg": jpeg[:700],
    "cut.png": png[:700], "cut.webp": webp[:60],
  }  # fmt: skip
  for folder in "ab":
    (tmp_path / "train" / folder).mkdir(parents=True)
  (tmp_path / "train/b/0.png").write_bytes(png)
  for name, content in (files | broken).items():
    (tmp_path / "train/a" / name).write_bytes(content)
  environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
  done = subprocess.run(
    [sys.executable, "-c", READS, str(tmp_path)], cwd=ROOT, env=environ,
    timeout=PATIENCE, check=True, capture_output=True, text=True,
  )  # fmt: skip
  lines = done.stderr.splitlines()
  assert len(lines) == len(broken), done.stderr
  for name in broken:
    assert (
      sum(f"/{name}) cannot be read: not a " in line for line in lines) == 1
    )


@pytest.mark.fault("broken-image")
@pytest.mark.slow
def test_exceeding_max_bad_lists_unreadable_examples():
  with pytest.raises(BrokenDataError) as error:
    trained_on(broken_source(6, (1, 3, 4), max_bad=2), steps=2)
  text = str(error.value)
  assert text.startswith("3 examples cannot be read.")
  assert "config.data.max_bad (2)" in text
  for index in (1, 3, 4):
    assert f"\n  data set 'numbered', split 'train', example {index} c" in text


@pytest.mark.fault("broken-image")
def test_unreadable_example_is_an_error_by_default():
  with pytest.raises(BrokenDataError, match="example 1 cannot be read"):
    trained_on(broken_source(6, (1,)), steps=3)
  with pytest.raises(BrokenDataError, match="example 1 cannot be read"):
    list(eval_batches(broken_source(6, (1,)), PLAIN, batch_size=4))


@pytest.mark.slow
def test_source_without_a_readable_example_ends():
  with pytest.raises(BrokenDataError, match="none of its 3 examples"):
    trained_on(broken_source(3, (0, 1, 2), max_bad=5), steps=1)


@pytest.mark.slow
def test_transient_read_error_is_retried(log):
  """A file system that is away for a moment changes no batch."""
  plain, failures = numbered_source(6), []

  def sometimes(index):
    if index == 3 and not failures:
      failures.append(index)
      raise OSError("the network is away")
    return index

  def fetch(index):
    index = tf.ensure_shape(tf.numpy_function(sometimes, [index], tf.int64), ())
    return plain.source.fetch(index)

  source = dataclasses.replace(plain, source=GraphSource(fetch))
  assert_same(trained_on(source, steps=6), trained_on(plain, steps=6))
  assert len(failures) == 1
  assert source.unreadable == {}
  [record] = log.records
  assert "second attempt" in record.getMessage()
  assert "network is away" in record.getMessage()


@pytest.mark.slow
def test_examples_left_out_by_other_processes_count(monkeypatch):
  source = broken_source(16, (2, 9), max_bad=2)
  trained_on(source, steps=4)
  monkeypatch.setattr(
    processes, "union_over_processes", lambda numbers: sorted({*numbers, 2, 5})
  )
  assert set(source.unreadable) == {2, 9}
  with pytest.raises(BrokenDataError, match="example 5 .* another process"):
    source.sync_unreadable()
  source = broken_source(16, (9,), max_bad=3)
  trained_on(source, steps=4)
  assert source.sync_unreadable() == [2, 5, 9] == sorted(source.unreadable)
  # Nothing is said where none may be left out.
  assert numbered_source(16).sync_unreadable() == []


@pytest.mark.slow
def test_messages_name_what_takes_the_place():
  source = broken_source(8, (2, 3), max_bad=2)
  batch = trained_on(source, steps=1, batch_size=8)
  names = batching.train_examples(source, seed=0, batch_size=8, step=1)
  assert [int(name) for name in names] == list(batch["label"])


# --- left out in evaluation ---------------------------------------------------


@pytest.mark.parametrize(
  ("count", "broken"), [(1, (0, 6)), (2, (1,)), (2, (5, 6))]
)
def test_evaluation_counts_every_readable_example_once(count, broken):
  shares = [
    eval_batches(
      broken_source(7, broken, max_bad=2), PLAIN, batch_size=4,
      process_index=index, process_count=count,
    )
    for index in range(count)
  ]  # fmt: skip
  joined = concatenate(
    concatenate(parts) for parts in zip(*shares, strict=True)
  )
  counted = joined["label"][joined["mask"] == 1]
  assert list(counted) == [i for i in range(7) if i not in broken]
  assert set(joined["mask"]) == {0, 1}
  assert joined["mask"].dtype == np.float32


@pytest.mark.fault("broken-image")
@pytest.mark.slow
def test_result_says_how_many_were_skipped(mesh):
  def predict(images):
    return {"x": jnp.zeros((len(images), 7)).at[:, 0].set(1)}

  results = [
    evaluate.evaluate_source(
      predict,
      broken_source(7, broken, max_bad=2),
      PLAIN,
      batch_size=8,
      mesh=mesh,
    )["x"].scores
    for broken in ((), (0, 3))
  ]
  assert [r.examples for r in results] == [7, 5]
  assert [r.skipped for r in results] == [0, 2]
  assert results[0].accuracy == pytest.approx(1 / 7)
  assert results[1].accuracy == 0  # its only hit is one of those


# --- odd pictures -------------------------------------------------------------


def odd_pictures():
  """{name: a file that can be used}."""
  rgb = Image.fromarray(fake_data.noise(0))
  deep = np.random.default_rng(0).integers(0, 2**16, (9, 7), np.uint16)
  turned = Image.Exif()
  turned[0x0112] = 6
  encode = fake_data.encode
  return {
    "cmyk.jpg": encode(rgb.convert("CMYK"), "JPEG"),
    "grey.jpg": encode(rgb.convert("L"), "JPEG"),
    "turned.jpg": encode(rgb, "JPEG", exif=turned),
    "alpha.png": encode(rgb.convert("RGBA"), "PNG"),
    "grey-alpha.png": encode(rgb.convert("LA"), "PNG"),
    "palette.png": encode(rgb.convert("P"), "PNG"),
    "one-bit.png": encode(rgb.convert("1"), "PNG"),
    "16-bit.png": encode(deep, "PNG"),
    "one-pixel.png": encode(fake_data.noise(0, 1, 1), "PNG"),
    "line.png": encode(fake_data.noise(0, 1, 5000), "PNG"),
    "line.jpg": encode(fake_data.noise(0, 5000, 1), "JPEG"),
    "alpha.webp": encode(rgb.convert("RGBA"), "WEBP"),
    # Not what its name says.
    "png.jpg": encode(rgb, "PNG"),
  }


BROKEN = {
  "empty.jpg": b"",
  "text.png": b"<html>404 Not Found</html>",
  "half.jpg": fake_data.encode(fake_data.noise(1), "JPEG")[:400],
  "half.png": fake_data.encode(fake_data.noise(1), "PNG")[:400],
}


def write_pictures(folder, pictures):
  folder.mkdir(parents=True)
  for name, content in pictures.items():
    (folder / name).write_bytes(content)


@pytest.mark.fault("odd-image")
@pytest.mark.slow
def test_odd_pictures_are_used(tmp_path):
  pictures = odd_pictures()
  write_pictures(tmp_path / "train" / "a", pictures)
  source = open_split("folder", "train", str(tmp_path))
  for batch in (
    trained_on(source, steps=10, batch_size=len(pictures)),
    concatenate(eval_batches(source, PLAIN, batch_size=len(pictures))),
  ):
    assert batch["image"].shape[1:] == (8, 8, 3)
    assert np.isfinite(batch["image"]).all()
    assert np.abs(batch["image"]).max() <= 1


@pytest.mark.fault("broken-image")
@pytest.mark.slow
def test_broken_pictures_are_all_named(tmp_path):
  write_pictures(tmp_path / "train" / "a", odd_pictures() | BROKEN)
  reader = open_split("folder", "train", str(tmp_path), max_bad=len(BROKEN))
  batch = concatenate(eval_batches(reader, PLAIN, batch_size=4))
  assert batch["mask"].sum() == len(odd_pictures())
  names = {pathlib.Path(reader.file_name(i)).name for i in reader.unreadable}
  assert names == set(BROKEN)


@pytest.fixture
def irregular(tmp_path):
  """Two pictures of a class, and six things that only have such names."""
  folder = tmp_path / "train" / "a"
  content = fake_data.encode(fake_data.noise(0, 9, 9), "PNG")
  write_pictures(folder, {"0.png": content, "1.png": content})
  os.mkfifo(folder / "pipe.png")
  (folder / "device.png").symlink_to("/dev/zero")
  (folder / "gone.png").symlink_to("nowhere")
  (folder / "loop.png").symlink_to("loop.png")
  (folder / "folder.png").mkdir()  # walked as any other
  with socket.socket(socket.AF_UNIX) as opened:
    opened.bind(str(folder / "socket.png"))
  return tmp_path


@pytest.mark.fault("broken-image", "special-file")
def test_special_files_in_a_folder_are_never_read(irregular):
  with pytest.raises(BrokenDataError) as error:
    open_split("folder", "train", str(irregular))
  for name, kind in (
    ("pipe", "a pipe"), ("device", "a device"), ("socket", "a socket"),
    ("gone", "a link whose target cannot be found"),
    ("loop", "a link whose target cannot be found"),
  ):  # fmt: skip
    line = f"{name}.png) cannot be read: not a regular file, but {kind}"
    assert line in str(error.value)
  source = open_split("folder", "train", str(irregular), max_bad=5)
  assert len(source.unreadable) == 5
  batches = eval_batches(source, PLAIN, batch_size=4)
  assert sum(batch["mask"].sum() for batch in batches) == 2


@pytest.mark.fault("odd-image")
def test_line_image_beyond_the_memory_is_named(tmp_path):
  write_pictures(tmp_path / "train" / "a", odd_pictures())
  source = open_split("folder", "train", str(tmp_path))
  central = EvalPreprocessing(image_size=8, crop="central", resize=9)
  with pytest.raises(BrokenDataError, match="line.png|line.jpg.*32 times"):
    list(eval_batches(source, central, batch_size=16))


# --- a whole run --------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
  """Two classes of pictures, in every split one that is broken."""
  for split, count in (("train", 12), ("validation", 5), ("test", 6)):
    for label in ("a", "b"):
      seed = 100 * len(split) + ord(label)
      pictures = {
        f"{i}.png": fake_data.encode(fake_data.noise(seed + i, 9, 9), "PNG")
        for i in range(count)
      }
      write_pictures(tmp_path / "data" / split / label, pictures)
    (tmp_path / "data" / split / "a" / "0.png").write_bytes(b"no picture")
  mv.save_backbone(tiny_backbone(), tmp_path / "tiny.npz")
  values = digits.get_config()
  values.upstream.name = ""
  values.backbone = str(tmp_path / "tiny.npz")
  values.batch_size, values.batch_size_eval = 16, 8
  values.total_steps, values.log_every = 2, 2
  values.eval_every, values.checkpoint_every = 2, 2
  values.data.name, values.data.dir = "folder", str(tmp_path / "data")
  values.data.train, values.data.validation = "train", "validation"
  values.data.max_bad, values.stall_timeout = 1, 300.0
  values.task.name = "pets"
  return config_lib.from_dict(values.to_dict())


@pytest.mark.fault("broken-image")
@pytest.mark.slow
def test_run_reports_examples_left_out(config, tmp_path):
  workdir = tmp_path / "run"
  result = run.train_and_evaluate(config, workdir)
  assert len(result.left_out) == 3
  for split, line in zip(
    ("train", "validation", "test"), result.left_out, strict=True
  ):
    assert f"'{split}', example" in line
    assert f"{split}/a/0.png)" in line
  (task,) = result.tasks
  assert (task.test.examples, task.test.skipped) == (11, 1)
  assert task.majority == 6 / 11  # the broken one does not count
  assert "left out because they could not be read:" in summary.summary(
    result, workdir
  )
  # Started again, with nothing left to do, it has not forgotten what training
  # left out; and fewer may not be allowed than there are.
  again = run.train_and_evaluate(config, workdir)
  assert again.left_out == result.left_out
  strict = dataclasses.replace(config.data, max_bad=0)
  with pytest.raises(BrokenDataError, match="train/a/0.png"):
    run.train_and_evaluate(dataclasses.replace(config, data=strict), workdir)


# --- a stalled input ----------------------------------------------------------


class Clock:
  """Limits that are over when a test says so, however fast the machine is.

  Attributes:
    running: the limits that run now.
    ended: (seconds, what) of those that would have ended the process.
  """

  def __init__(self, monkeypatch):
    self.running, self.ended = [], []
    self.changed = threading.Condition()
    clock = self

    class Timer:
      def __init__(self, seconds, end, arguments):
        assert end is watchdog.end_process
        self.seconds, self.arguments = seconds, arguments

      def start(self):
        with clock.changed:
          clock.running.append(self)
          clock.changed.notify_all()

      def cancel(self):
        with clock.changed:
          if self in clock.running:
            clock.running.remove(self)

    only = types.SimpleNamespace(Timer=Timer)
    monkeypatch.setattr(watchdog, "threading", only)

  def wait_and_end(self, what):
    """Waits until a limit of that name runs; then its time is over."""
    with self.changed:
      assert self.changed.wait_for(lambda: self._named(what), PATIENCE)
      for timer in self._named(what):
        self.running.remove(timer)
        self.ended.append(tuple(timer.arguments))

  def _named(self, what):
    return [timer for timer in self.running if what in timer.arguments[1]]


@pytest.fixture
def clock(monkeypatch):
  return Clock(monkeypatch)


def waiting_source(wait, stall_timeout=0.4):
  """Examples in front of each of which something is done, given its number."""
  plain = numbered_source(16)

  def waits(index):
    wait(int(index))
    return index

  def fetch(index):
    index = tf.ensure_shape(tf.numpy_function(waits, [index], tf.int64), ())
    return plain.source.fetch(index)

  source = dataclasses.replace(plain, source=GraphSource(fetch))
  return dataclasses.replace(source, stall_timeout=stall_timeout)


@pytest.mark.fault("stalled-input")
def test_stalled_batch_is_noticed(clock):
  """It comes once its time is over."""

  def wait(index):
    if index == 12:
      clock.wait_and_end("from example 12 on")

  batches = eval_batches(waiting_source(wait), PLAIN, batch_size=4)
  next(batches)
  assert clock.ended == []
  assert len(list(batches)) == 3
  ((seconds, what),) = clock.ended
  assert seconds == 0.4
  assert "'numbered', split 'train', from example 12 on" in what


def test_read_that_stalls_at_the_end_is_noticed(clock):
  """Whoever lets go of a pipeline waits for its threads."""
  began = threading.Event()

  def wait(index):
    if index == 4:
      began.set()
      clock.wait_and_end("from example 0 on")

  # Nothing is read ahead while the first batch is waited for.
  first = threading.Event()
  batches = eval_batches(
    waiting_source(lambda i: (i < 4 or first.wait(PATIENCE)) and wait(i)),
    PLAIN,
    batch_size=4,
  )
  next(batches)
  first.set()
  assert began.wait(PATIENCE)
  assert clock.ended == []
  batches.close()
  assert [seconds for seconds, _ in clock.ended] == [0.4]


@pytest.mark.fault("stalled-input")
def test_time_outside_of_reading_is_no_stall(clock):
  """Compiling, an evaluation, a save: the clock runs inside of `next` only."""
  source = dataclasses.replace(numbered_source(16), stall_timeout=100.0)
  asked = 0
  for _ in eval_batches(source, PLAIN, batch_size=8):
    assert clock.running == []
    asked += 1
  assert asked == 2
  with watchdog.limit(0.05, "what comes in time"):
    (timer,) = clock.running
    assert timer.seconds == 0.05
  assert clock.running == []
  never = waiting_source(
    lambda i: clock.running and clock.wait_and_end(""), stall_timeout=0.0
  )
  assert len(list(eval_batches(never, PLAIN, batch_size=8))) == 2
  assert clock.ended == []


@pytest.mark.fault("stalled-input")
@pytest.mark.processes
def test_stalled_process_ends_and_says_where_it_was():
  program = """if True:
    import threading, types
    import tensorflow as tf
    from memory_vit import config
    from memory_vit.data import batching
    from memory_vit.data import watchdog
    from memory_vit.data.graph_source import GraphSource
    from memory_vit.data.split import Split

    hanging = threading.Event()

    class Timer(threading.Timer):
      def run(self):  # the machine may be slow before it hangs
        hanging.wait()
        super().run()

    watchdog.threading = types.SimpleNamespace(Timer=Timer)

    def fetch(index):
      def hang(index):
        if index == 9:
          hanging.set()
          threading.Event().wait()
        return index
      index = tf.numpy_function(hang, [index], tf.int64)
      return tf.constant(b""), tf.cast(tf.ensure_shape(index, ()), tf.int32)

    source = Split(
      name="hangs", split="train", size=20,
      class_names=tuple(map(str, range(20))),
      source=GraphSource(
        lambda i: (tf.io.encode_png(tf.zeros((2, 2, 3), tf.uint8)), fetch(i)[1])
      ),
      stall_timeout=3.0,
    )
    batches = batching.train_batches(
      source, config.DataConfig(), image_size=8, batch_size=4, seed=0
    )
    print("begins", flush=True)
    for batch in batches:
      pass
  """
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, timeout=PATIENCE, check=False,
    capture_output=True, text=True,
  )  # fmt: skip
  assert done.stdout == "begins\n"
  assert done.returncode == watchdog.EXIT_STALLED == 74
  assert "error: no batch of data set 'hangs', split 'train'" in done.stderr
  assert "for 3 s" in done.stderr
  assert "in hang" in done.stderr  # the stack of the thread that hangs
  assert "pipeline.py" in done.stderr  # and of the one that waits


PIPE = """
import os
from memory_vit.data import local
open_folder = local.open_folder
def opens(ref):
  source = open_folder(ref)
  file = f"{ref.dir}/train/b/3.png"
  os.unlink(file)
  os.mkfifo(file)
  local.open_folder = open_folder
  return source
local.open_folder = opens
"""


@pytest.mark.processes
def test_stalled_command_ends(config, tmp_path):
  """A pipe since the data were opened: whoever reads it waits for ever."""
  options = {
    "upstream.name": "", "backbone": config.backbone,
    "batch_size": 16, "batch_size_eval": 8, "total_steps": 9,
    "data.name": "folder", "data.dir": config.data.dir, "data.train": "train",
    "data.validation": "", "data.test": "", "data.max_bad": 1,
    "stall_timeout": 4,
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-c", PIPE + faults.MAIN,
     f"--workdir={tmp_path / 'run'}", "--config=configs/digits.py",
     *(f"--config.{key}={value}" for key, value in options.items())],
    cwd=ROOT, timeout=PATIENCE, check=False, capture_output=True, text=True,
    env={**os.environ, "XLA_FLAGS": quick.XLA_FLAGS},
  )  # fmt: skip
  assert done.returncode == watchdog.EXIT_STALLED, done.stderr
  name = os.path.basename(config.data.dir)
  said = f"error: no batch of data set 'folder {name}', split 'train'"
  assert said in done.stderr
  assert "pipeline.py" in done.stderr  # where it waited


def test_impossible_limits_are_refused(config):
  for changes in ({"stall_timeout": -1.0}, {"stall_timeout": float("nan")}):
    with pytest.raises(ConfigError, match="config.stall_timeout is"):
      dataclasses.replace(config, **changes)
  with pytest.raises(ConfigError, match="config.data.max_bad is -1"):
    dataclasses.replace(
      config, data=dataclasses.replace(config.data, max_bad=-1)
    )


@pytest.mark.fault("broken-image")
def test_names_of_readable_records_in_the_place_of_broken_ones():
  """After the last record comes the first."""
  split = dataclasses.replace(fake_data.numbered_source(5), max_bad=2)
  split.mark_unreadable({3: "cut", 4: "cut"})
  names = batching.names_of(split, [1, 2, 3, 4])
  assert [name.split()[0] for name in names] == ["1", "2", "0", "0"]
