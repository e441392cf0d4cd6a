"""Rows on disk: found by later runs, and computed again if damaged."""

import dataclasses
import errno
import itertools
import logging
import os
import shutil
from pathlib import Path

import fake_data
import jax
import numpy as np
import pytest
from conftest import tiny_backbone
from run_inputs import run_inputs

from memory_vit import config as config_lib
from memory_vit.cache import cache_folder
from memory_vit.data import batching, datasets
from memory_vit.data.data_files import DataFiles
from memory_vit.errors import BrokenDataError, ConfigError, TrainingError
from memory_vit.model import trees
from memory_vit.runtime import lock, processes
from memory_vit.runtime.preemption import PREEMPTED, Interrupted, StopSignal
from memory_vit.train import pack, passes
from memory_vit.train.step import Step, StepMemory

SIZE, BATCH = 23, 4
# Of 8 pixels, which stand for what a frozen pass makes of them.
BYTES, HEADER = 4 * 8 * 8 * 3, 16


@pytest.fixture(scope="module")
def backbone():
  return tiny_backbone(depth=1)


@pytest.fixture
def config(tmp_path):
  return config_of(tmp_path / "cache")


def config_of(folder):
  return config_lib.Config(
    image_size=8,
    batch_size=BATCH,
    total_steps=5,
    data=config_lib.DataConfig(
      name="digits:5-9",
      train=f"train[:{SIZE}]",
      validation="",
      train_crop="resize",
      flip=False,
    ),
    cache=config_lib.CacheConfig(
      what="contexts", where="disk", dir=str(folder)
    ),
  )


def cache_of(config, backbone, prepare=None, stop=None):
  return run_inputs(config, backbone, prepare=prepare, stop=stop).cache


def reader_of(config):
  return datasets.open_split("digits:5-9", config.data.train)


class Pass:
  """Stands for the frozen pass; counts the images that it was given."""

  def __init__(self, after=None):
    self.images, self._after = 0, after

  def __call__(self, images):
    if not isinstance(images, jax.core.Tracer):  # to know the shapes
      self.images += len(images)
      if self._after:
        self._after(self.images)
    return images


def cached_rows(config, backbone, frozen_pass, reader=None, stop=None):
  """All cached rows: images, labels."""
  cache = cache_of(config, backbone, frozen_pass, stop)
  rows = cache.rows("train", reader or reader_of(config))
  places = np.arange(len(rows.labels))
  return np.asarray(rows.take(places)), rows.labels.copy()


@pytest.fixture(scope="module")
def made(backbone, tmp_path_factory):
  """The cache of an earlier run: its folder, images and labels."""
  folder = tmp_path_factory.mktemp("made") / "cache"
  return folder, cached_rows(config_of(folder), backbone, Pass())


@pytest.fixture
def earlier(config, made):
  """The images and labels that an earlier run has cached for this one."""
  folder, rows = made
  shutil.copytree(folder, config.cache.dir)
  return rows


def file_of(config):
  (folder,) = Path(config.cache.dir).iterdir()
  assert (folder / "about.json").is_file()
  return folder / "0.rows"


def test_later_run_finds_cached_rows(config, backbone):
  first, again = Pass(), Pass()
  images, labels = cached_rows(config, backbone, first)
  assert first.images == 24  # six batches
  assert file_of(config).stat().st_size == SIZE * (HEADER + BYTES)
  found, found_labels = cached_rows(config, backbone, again)
  assert again.images == 0
  assert found.tobytes() == images.tobytes()
  assert (found_labels == labels).all()
  in_memory = dataclasses.replace(
    config, cache=config_lib.CacheConfig(what="contexts")
  )
  expected, expected_labels = cached_rows(in_memory, backbone, Pass())
  assert images.tobytes() == expected.tobytes()
  assert (labels == expected_labels).all()


def row(number):
  """Where a row begins in the file."""
  return SIZE * HEADER + number * BYTES


def changed_bytes(change):
  """A damage: what a change of the bytes of a file makes of it."""

  def damage(path):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)

  return damage


def flipped(place):
  def change(data):
    data[place] ^= 1

  return changed_bytes(change)


def exchanged(data):
  """Two headers; each is whole."""
  first, second = data[:HEADER], data[HEADER : 2 * HEADER]
  data[: 2 * HEADER] = second + first


def lost(data):
  """As where a machine lost its power: the header was written, the row not."""
  data[row(9) : row(10)] = bytes(BYTES)


# {damage: what does it, batches that are made again, whether that is said}; of
# a file that is empty or not there nothing was ever written.
DAMAGES = {
  "row": (flipped(row(9) + 5), 1, True),
  "label": (flipped(9 * HEADER + 4), 1, True),
  "mask": (flipped(9 * HEADER + 8), 1, True),
  "headers": (changed_bytes(exchanged), 1, True),
  "lost": (changed_bytes(lost), 1, True),
  "cut": (lambda path: os.truncate(path, row(SIZE) - 2), 1, True),
  "other": (lambda path: path.write_bytes(b"[1, 2]"), 6, True),
  "huge": (lambda path: path.write_bytes(b"ab" * 2**16), 6, True),
  "empty": (lambda path: path.write_bytes(b""), 6, False),
  "gone": (Path.unlink, 6, False),
}


@pytest.mark.fault("cache-damaged")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_computed_again(
  damage, config, earlier, backbone, caplog
):
  images, labels = earlier
  whole = file_of(config).read_bytes()
  apply, batches, is_said = DAMAGES[damage]
  apply(file_of(config))
  again = Pass()
  with caplog.at_level(logging.WARNING):
    found, found_labels = cached_rows(config, backbone, again)
  assert again.images == batches * BATCH
  assert found.tobytes() == images.tobytes()
  assert (found_labels == labels).all()
  assert caplog.text.count("They are recomputed.") == is_said
  assert file_of(config).read_bytes() == whole


@pytest.mark.parametrize(
  ("where", "name", "kind"),
  [("disk", "glyphs:angle", "values"), ("device", "digits:5-9", "labels")],
)
def test_rows_have_the_labels_of_uncached_batches(
  where, name, kind, config, backbone, caplog
):
  split = datasets.open_split(name, f"train[:{SIZE}]", kind=kind)
  options = dataclasses.replace(
    config.cache, where=where, dir=config.cache.dir * (where == "disk")
  )
  config = dataclasses.replace(config, cache=options)
  plain = batching.train_batches(
    split, config.data, image_size=8, batch_size=BATCH, seed=config.seed
  )
  expected = [batch["label"] for batch in itertools.islice(plain, 12)]

  def found():
    cache = cache_of(config, backbone, Pass())
    batches = cache.train_batches(split, 0)
    return [batch["label"] for batch in itertools.islice(batches, 12)]

  np.testing.assert_array_equal(found(), expected)
  if where == "disk":
    np.testing.assert_array_equal(found(), expected)
    flipped(9 * (HEADER - 4 + 4 * split.num_classes) + 5)(file_of(config))
    np.testing.assert_array_equal(found(), expected)
    assert caplog.text.count("damaged rows: 1.") == 1
    # Rows of the same images with another kind of label are others.
    cached_rows(config, backbone, Pass())
    assert len(list(Path(config.cache.dir).iterdir())) == 2
  else:
    cache = cache_of(config, backbone, Pass())
    batches = cache.eval_batches(split)
    for batch, other in zip(
      batches,
      batching.eval_batches(
        split, cache.preprocessing, batch_size=config.batch_size_eval
      ),
      strict=True,
    ):
      np.testing.assert_array_equal(batch["label"], other["label"])


@pytest.mark.fault("cache-damaged")
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_rows_damaged_while_read_are_computed_again(
  damage, config, earlier, backbone, caplog
):
  """They are made again all together, when the first of them is read."""
  runs, passes = [], [Pass(), Pass()]
  for frozen_pass in passes:
    cache = cache_of(config, backbone, frozen_pass)
    batches = cache.train_batches(reader_of(config), 0)
    found = [next(batches)]
    if frozen_pass is passes[1]:
      if damage == "cut":
        os.truncate(file_of(config), row(9))
      else:
        for number in range(0, SIZE, BATCH):
          flipped(row(number))(file_of(config))
    found += itertools.islice(batches, 12)
    runs.append([(np.asarray(b["inputs"]), b["label"]) for b in found])
  for (image, label), (expected, expected_label) in zip(*runs, strict=True):
    np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(label, expected_label)
  assert passes[0].images == 0
  assert passes[1].images in (4 * BATCH, 5 * BATCH, 6 * BATCH)
  assert caplog.text.count("They are recomputed.") == 1


@pytest.mark.fault("cache-damaged")
@pytest.mark.usefixtures("earlier")
def test_unreadable_disk_ends_the_run(config, backbone, monkeypatch):
  def failing(*args):
    raise OSError(errno.EIO, "Input/output error")

  monkeypatch.setattr(os, "preadv", failing)
  with pytest.raises(TrainingError, match=r"0\.rows has rows that are damaged"):
    cached_rows(config, backbone, Pass())


@pytest.mark.fault("cache-damaged-of-two")
def test_one_of_several_processes_computes_no_row_alone(
  config, backbone, monkeypatch
):
  """All rows are compared at the start; what is damaged later ends the run."""
  rows = cache_of(config, backbone, Pass()).rows("train", reader_of(config))
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  rows.open(lambda spans: pytest.fail("the other one knows nothing of it"))
  os.truncate(rows.path, row(9))
  with pytest.raises(TrainingError, match="the same command again"):
    rows.take(np.array([0, 9]))


@pytest.mark.fault("cache-stopped")
def test_batches_written_before_a_signal_are_found(config, backbone):
  def stop_later(images):
    if images == 4 * BATCH:  # it is not written yet
      raise Interrupted(PREEMPTED, "stopped")

  with pytest.raises(Interrupted):
    cached_rows(config, backbone, Pass(stop_later))
  rest = Pass()
  cached_rows(config, backbone, rest)
  assert rest.images == 3 * BATCH


def limited(monkeypatch, room, error):
  """A file to which so many bytes can be written; a call may write fewer."""
  real = os.pwrite

  def pwrite(file, data, offset):
    nonlocal room
    if isinstance(data, bytes):  # of the lock
      return real(file, data, offset)
    if not room:
      raise error
    written = real(file, data[:room], offset)
    room -= written
    return written

  monkeypatch.setattr(os, "pwrite", pwrite)


FULL = OSError(errno.ENOSPC, "No space left on device")
# A batch, and a part of the rows of another one, or of its headers.
WHOLE = BATCH * (BYTES + HEADER)
PARTS = {"rows": WHOLE + BATCH * BYTES - 9, "headers": 2 * WHOLE - 9}


@pytest.mark.fault("cache-stopped")
@pytest.mark.fault("cache-no-room")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=repr)
def test_partly_written_batch_is_computed_again(
  part, error, config, earlier, backbone, monkeypatch
):
  """Another process may fill the disk meanwhile; or this one is killed."""
  whole = file_of(config).read_bytes()
  file_of(config).unlink()
  with monkeypatch.context() as patch:
    limited(patch, PARTS[part], error)
    expected = TrainingError if error is FULL else KeyboardInterrupt
    with pytest.raises(expected) as raised:
      cached_rows(config, backbone, Pass())
  if error is FULL:
    assert "cannot be written: [Errno 28] No space left" in str(raised.value)
    assert "Make room, and give the same command again." in str(raised.value)
  rest = Pass()
  cached_rows(config, backbone, rest)
  assert rest.images == 5 * BATCH
  assert file_of(config).read_bytes() == whole


@pytest.mark.fault("cache-signal")
def test_stop_signal_is_checked_before_every_batch(config, backbone):
  """Several processes hear of a signal where they ask together."""

  class Asked(StopSignal):
    times = 0

    def is_wanted(self):
      self.times += 1
      return self.times > 4

  stopped, rest = Pass(), Pass()
  with pytest.raises(Interrupted) as error:
    cached_rows(config, backbone, stopped, stop=Asked())
  assert error.value.status == PREEMPTED
  assert stopped.images == 4 * BATCH
  cached_rows(config, backbone, rest)
  assert rest.images == 2 * BATCH


def changed(config, part, **values):
  part_values = dataclasses.replace(getattr(config, part), **values)
  return dataclasses.replace(config, **{part: part_values})


def with_crops(config, seed=0):
  """Two random crops of every image."""
  return dataclasses.replace(
    config,
    seed=seed,
    data=dataclasses.replace(config.data, train_crop="small"),
    cache=dataclasses.replace(config.cache, crops=2),
  )


CHANGES = {
  "split": lambda c: changed(c, "data", train="train[1:24]"),
  "dtype": lambda c: changed(c, "cache", dtype="bfloat16"),
  "batch": lambda c: dataclasses.replace(c, batch_size=8),
  "parts": lambda c: changed(c, "optim", accumulation_steps=2),
  "size": lambda c: dataclasses.replace(c, image_size=12),
  "crops": with_crops,
}


@pytest.mark.fault("cache-of-another")
@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_another_configuration_are_not_found(
  change, config, earlier, backbone
):
  other = Pass()
  cached_rows(CHANGES[change](config), backbone, other)
  assert other.images >= SIZE


@pytest.mark.fault("cache-of-another")
@pytest.mark.parametrize(
  "change",
  [
    {"fingerprint": "0" * 64},
    {"config": tiny_backbone(depth=1, gelu="exact").config},
  ],
  ids=["weights", "gelu"],
)
def test_rows_of_another_backbone_are_not_found(
  change, config, earlier, backbone
):
  other = Pass()
  cached_rows(config, dataclasses.replace(backbone, **change), other)
  assert other.images >= SIZE


@pytest.mark.fault("cache-of-another")
def test_rows_of_another_slice_of_the_same_files_are_not_found(
  config, backbone
):
  """Both halves of a TFDS split have its files, size and classes."""
  other, first = Pass(), reader_of(config)
  for split in (first, dataclasses.replace(first, split="train[23:46]")):
    cached_rows(config, backbone, other, reader=split)
  assert other.images >= 2 * SIZE


@pytest.mark.slow
def test_seed_identifies_rows_only_of_random_crops(config, backbone):
  again = Pass()
  cached_rows(config, backbone, Pass())
  cached_rows(dataclasses.replace(config, seed=3), backbone, again)
  assert again.images == 0
  cached_rows(with_crops(config), backbone, Pass())
  cached_rows(with_crops(config, seed=3), backbone, again)
  assert again.images >= 2 * SIZE


@pytest.mark.fault("cache-of-another")
@pytest.mark.slow
def test_rows_of_another_crop_are_not_found(config, backbone):
  crops, other = with_crops(config), Pass()
  cached_rows(crops, backbone, Pass())
  crops = changed(crops, "data", train_crop="inception")
  cached_rows(crops, backbone, other)
  assert other.images >= 2 * SIZE


@pytest.mark.fault("cache-of-another")
@pytest.mark.slow
def test_rows_of_another_version_are_not_found(config, backbone, monkeypatch):
  cached_rows(config, backbone, Pass())
  monkeypatch.setattr(cache_folder, "__version__", "other")
  again = Pass()
  cached_rows(config, backbone, again)
  assert again.images >= SIZE


@pytest.mark.fault("cache-no-room")
@pytest.mark.parametrize("where", ["disk", "host", "device"])
def test_too_little_space_is_refused_before_computing(
  where, config, backbone, monkeypatch
):
  needed = SIZE * BYTES
  usage = shutil._ntuple_diskusage(2**40, 2**40, needed - 1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  memory = type("Memory", (), {"available": needed - 1})
  monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
  if where != "disk":
    config = changed(config, "cache", where=where, dir="")
  frozen_pass = Pass()
  with pytest.raises(ConfigError) as error:
    cached_rows(config, backbone, frozen_pass)
  assert f"{needed:,} bytes" in str(error.value)
  assert f"{needed - 1:,} bytes free" in str(error.value)
  assert "'bfloat16'" in str(error.value)
  assert frozen_pass.images == 0


def test_later_run_counts_unreadable_records_of_cached_rows(config, backbone):
  results = []
  for max_bad in (1, 1, 0):
    reader = reader_of(config)
    reader = dataclasses.replace(
      fake_data.damaged(reader, [5]), max_bad=max_bad
    )
    frozen_pass = Pass()
    if not max_bad:
      with pytest.raises(BrokenDataError, match="example 5"):
        cached_rows(config, backbone, frozen_pass, reader)
    else:
      results.append(cached_rows(config, backbone, frozen_pass, reader))
      assert [*reader.unreadable] == [5]
  assert results[0][0].tobytes() == results[1][0].tobytes()
  assert (results[0][0][5] == results[0][0][6]).all()


@pytest.mark.parametrize("version", ["", "2"])
def test_disk_cache_of_python_data_requires_a_version(
  version, config, backbone
):
  """Without a version, a change of the contents would not be noticed."""
  reader = reader_of(config)
  known = DataFiles(facts={"examples": SIZE, "version": version})
  source = dataclasses.replace(reader, data_files=known)
  frozen_pass = Pass()
  if version:
    cached_rows(config, backbone, frozen_pass, source)
  else:
    with pytest.raises(ConfigError, match="without a version"):
      cached_rows(config, backbone, frozen_pass, source)
  assert bool(frozen_pass.images) == bool(version)


def test_missing_rows_are_agreed_by_all_processes(
  config, backbone, monkeypatch
):
  """Also by a process that has nothing yet, where others have some."""
  asked = []
  real = processes.union_over_processes
  monkeypatch.setattr(
    processes,
    "union_over_processes",
    lambda numbers: asked.append(list(numbers)) or real(numbers),
  )
  cache = cache_of(config, backbone, Pass())
  needs = cache.needs("train", reader_of(config))
  assert needs.missing == needs.plan.count
  assert asked == [[0, 1, 2, 3, 4, 5]]
  cached_rows(config, backbone, Pass())
  needs = cache.needs("train", reader_of(config))
  assert needs.missing == 0
  assert asked[1:] == [asked[0], []]


@pytest.mark.fault("cache-stopped")
def test_only_one_run_at_a_time_writes_a_cache(tmp_path):
  asked = []
  path = tmp_path / ".lock"
  first = lock.one_at_a_time(path, asked.append, "config.cache.dir")
  first.__enter__()

  def wait(owner):
    asked.append(owner)
    if len(asked) == 3:
      first.__exit__(None, None, None)

  with lock.one_at_a_time(path, wait, "config.cache.dir"):
    assert len(asked) == 3
    assert all(owner.startswith("process ") for owner in asked)


def test_memory_estimate_includes_the_cache(config, backbone, monkeypatch):
  nothing = StepMemory(batches=0, contexts=0, temporary=0)
  monkeypatch.setattr(Step, "memory", lambda *_, **__: nothing)
  found = []
  for cache in (
    {},
    {"what": "contexts"},
    {"what": "contexts", "where": "disk"},
  ):
    cache = config_lib.CacheConfig(**cache)
    config = dataclasses.replace(config, cache=cache)
    made = run_inputs(config, backbone)
    found.append(passes.pack_bytes(made, made.trials))
  # Keys and values of 17 tokens of width 32; all devices share one memory.
  cached_bytes = SIZE * 2 * 17 * 32 * 4 // jax.local_device_count()
  assert found[1] - found[0] == cached_bytes
  assert found[2] == found[0]
  # A gradient, and parameters and momentum twice: the old ones are kept until
  # the new ones are known to be finite.
  params_bytes = trees.bytes_of(pack.create_task(made, *made.trials).params)
  assert 5 * params_bytes <= found[0] < 5 * params_bytes + 100
