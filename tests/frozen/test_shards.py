"""Kept rows on disk: found again, never wrong ones, whole or made again."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow as tf
from conftest import one_device, tiny_backbone

from memory_vit import config as config_lib
from memory_vit.data import datasets
from memory_vit.data.data_files import DataFiles
from memory_vit.errors import BrokenDataError, ConfigError, TrainingError
from memory_vit.frozen import plan, shards
from memory_vit.runtime import lock, processes
from memory_vit.runtime.preemption import PREEMPTED, Interrupted, StopSignal
from memory_vit.train import passes, sweep, trainer
from memory_vit.train.run_context import RunContext
from memory_vit.train.step import Step

SIZE, BATCH = 23, 4
# Of 8 pixels, which stand for what a frozen pass makes of them; two batches.
BYTES = 4 * 8 * 8 * 3
SHARD = 2 * BATCH * BYTES


@pytest.fixture(scope="module")
def backbone():
  return tiny_backbone(depth=1)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
  monkeypatch.setattr(shards, "SHARD_BYTES", SHARD)


@pytest.fixture
def config(tmp_path):
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
    keep=config_lib.KeepConfig(
      what="contexts", where="disk", dir=str(tmp_path / "kept")
    ),
  )


def kept_of(config, backbone, stop=None):
  return trainer.Trainer(
    config=config,
    context=RunContext(one_device(), stop or StopSignal()),
    backbone=backbone,
    train=datasets.open_source("digits:5-9", config.data.train),
  ).kept


def reader_of(config):
  return datasets.open_source("digits:5-9", config.data.train)


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


def kept_rows(config, backbone, frozen_pass, reader=None, stop=None):
  """Everything that is kept: images, labels."""
  kept = kept_of(config, backbone, stop)
  rows = kept.training(reader or reader_of(config), frozen_pass)
  places = np.arange(len(rows.labels))
  return np.asarray(rows.take(places)), rows.labels.copy()


def folder_of(config):
  (folder,) = Path(config.keep.dir).iterdir()
  return folder


def test_a_later_run_finds_what_is_kept(config, backbone):
  first, again = Pass(), Pass()
  images, labels = kept_rows(config, backbone, first)
  assert first.images == 24  # six batches
  assert len(list(folder_of(config).glob("*.rows"))) == 3
  found, found_labels = kept_rows(config, backbone, again)
  assert again.images == 0
  assert found.tobytes() == images.tobytes()
  assert (found_labels == labels).all()
  in_memory = dataclasses.replace(
    config, keep=config_lib.KeepConfig(what="contexts")
  )
  expected, expected_labels = kept_rows(in_memory, backbone, Pass())
  assert images.tobytes() == expected.tobytes()
  assert (labels == expected_labels).all()


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


DAMAGES = {
  "flipped": flip,
  "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
  "empty": lambda path: path.write_bytes(b""),
  "other": lambda path: path.write_bytes(b"[1, 2]"),
  "large": lambda path: path.write_bytes(b'{"shard": ' + b"[" * 2**22),
  "gone": Path.unlink,
}


@pytest.mark.fault("kept-damaged")
@pytest.mark.parametrize("kind", ["rows", "json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_made_again(kind, damage, config, backbone, caplog):
  images, labels = kept_rows(config, backbone, Pass())
  DAMAGES[damage](folder_of(config) / f"00001.{kind}")
  again, whole = Pass(), Pass()
  with caplog.at_level(logging.WARNING):
    found, found_labels = kept_rows(config, backbone, again)
  assert again.images == 2 * BATCH  # of that shard alone
  assert found.tobytes() == images.tobytes()
  assert (found_labels == labels).all()
  # Without its last file it was never finished: there is nothing to say.
  never_finished = (kind, damage) == ("json", "gone")
  said = "shard 1 is damaged, and is made again" in caplog.text
  assert said != never_finished
  kept_rows(config, backbone, whole)
  assert whole.images == 0


@pytest.mark.fault("kept-damaged")
def test_labels_that_others_have_written_are_made_again(
  config, backbone, caplog
):
  """What can be read is compared as well."""
  _, labels = kept_rows(config, backbone, Pass())
  seal = folder_of(config) / "00001.json"
  said = json.loads(seal.read_text())
  said["shard"]["labels"].reverse()
  assert said["shard"]["labels"][0] != labels[2 * BATCH]
  seal.write_text(json.dumps(said))
  again = Pass()
  with caplog.at_level(logging.WARNING):
    _, found_labels = kept_rows(config, backbone, again)
  assert again.images == 2 * BATCH
  assert (found_labels == labels).all()
  assert "00001.json is not what was written (SHA-256)" in caplog.text


@pytest.mark.fault("kept-damaged")
def test_a_large_file_of_labels_is_not_read(config, backbone, monkeypatch):
  kept_rows(config, backbone, Pass())
  (folder_of(config) / "00001.json").write_bytes(b" " * 2**22)
  read = []
  real = Path.read_text
  monkeypatch.setattr(
    Path, "read_text", lambda p, **kw: read.append(p.name) or real(p, **kw)
  )
  kept_rows(config, backbone, Pass())
  assert read == ["00000.json", "00002.json"]


@pytest.mark.fault("kept-stopped")
def test_shards_that_were_finished_before_a_signal_are_found(config, backbone):
  def stop_later(images):
    if images == 4 * BATCH:  # the second shard is not written yet
      raise Interrupted(PREEMPTED, "stopped")

  with pytest.raises(Interrupted):
    kept_rows(config, backbone, Pass(stop_later))
  rest = Pass()
  kept_rows(config, backbone, rest)
  assert rest.images == 4 * BATCH


@pytest.mark.fault("kept-signal")
def test_it_is_asked_before_every_batch_whether_to_stop(config, backbone):
  """Several processes hear of a signal where they ask together."""

  class Asked(StopSignal):
    times = 0

    def is_wanted(self):
      self.times += 1
      return self.times > 4

  stopped, rest = Pass(), Pass()
  with pytest.raises(Interrupted) as error:
    kept_rows(config, backbone, stopped, stop=Asked())
  assert error.value.status == PREEMPTED
  assert stopped.images == 4 * BATCH
  kept_rows(config, backbone, rest)
  assert rest.images == 2 * BATCH


def changed(config, part, **values):
  part_values = dataclasses.replace(getattr(config, part), **values)
  return dataclasses.replace(config, **{part: part_values})


def with_views(config, seed=0):
  """Two random crops of every image."""
  return dataclasses.replace(
    config,
    seed=seed,
    data=dataclasses.replace(config.data, train_crop="small"),
    keep=dataclasses.replace(config.keep, views=2),
  )


CHANGES = {
  "split": lambda c: changed(c, "data", train="train[1:24]"),
  "dtype": lambda c: changed(c, "keep", dtype="bfloat16"),
  "batch": lambda c: dataclasses.replace(c, batch_size=8),
  "parts": lambda c: changed(c, "optim", accumulation_steps=2),
  "size": lambda c: dataclasses.replace(c, image_size=12),
  "views": with_views,
}


@pytest.mark.fault("kept-of-another")
@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_another_configuration_are_not_found(change, config, backbone):
  other = Pass()
  kept_rows(config, backbone, Pass())
  kept_rows(CHANGES[change](config), backbone, other)
  assert other.images >= SIZE


@pytest.mark.fault("kept-of-another")
@pytest.mark.parametrize(
  "change",
  [
    {"fingerprint": "0" * 64},
    {"config": tiny_backbone(depth=1, gelu="exact").config},
  ],
  ids=["weights", "gelu"],
)
def test_rows_of_another_backbone_are_not_found(change, config, backbone):
  other = Pass()
  kept_rows(config, backbone, Pass())
  kept_rows(config, dataclasses.replace(backbone, **change), other)
  assert other.images >= SIZE


@pytest.mark.slow
def test_a_seed_matters_where_views_are_random(config, backbone):
  again = Pass()
  kept_rows(config, backbone, Pass())
  kept_rows(dataclasses.replace(config, seed=3), backbone, again)
  assert again.images == 0
  kept_rows(with_views(config), backbone, Pass())
  kept_rows(with_views(config, seed=3), backbone, again)
  assert again.images >= 2 * SIZE


@pytest.mark.fault("kept-of-another")
@pytest.mark.slow
def test_rows_of_another_crop_are_not_found(config, backbone):
  crops, other = with_views(config), Pass()
  kept_rows(crops, backbone, Pass())
  crops = changed(crops, "data", train_crop="inception")
  kept_rows(crops, backbone, other)
  assert other.images >= 2 * SIZE


def test_the_code_of_each_subpackage_counts():
  """Also of this one; a name that is gone would count nothing."""
  package = Path(plan.__file__).parents[1]
  assert all([*(package / wing).rglob("*.py")] for wing in plan._WINGS)
  assert "frozen" in plan._WINGS


@pytest.mark.fault("kept-of-another")
@pytest.mark.slow
def test_code_that_changed_makes_rows_anew(config, backbone, monkeypatch):
  kept_rows(config, backbone, Pass())
  monkeypatch.setattr("memory_vit.frozen.plan.code_digest", lambda: "other")
  again = Pass()
  kept_rows(config, backbone, again)
  assert again.images >= SIZE


@pytest.mark.fault("kept-no-room")
@pytest.mark.parametrize("where", ["disk", "host", "device"])
def test_too_little_room_is_said_before_the_work(
  where, config, backbone, monkeypatch
):
  needed = SIZE * BYTES
  usage = shutil._ntuple_diskusage(2**40, 2**40, needed - 1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  memory = type("Memory", (), {"available": needed - 1})
  monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
  if where != "disk":
    config = changed(config, "keep", where=where, dir="")
  frozen_pass = Pass()
  with pytest.raises(ConfigError) as error:
    kept_rows(config, backbone, frozen_pass)
  assert f"{needed:,} bytes" in str(error.value)
  assert f"{needed - 1:,} free" in str(error.value)
  assert "'bfloat16'" in str(error.value)
  assert frozen_pass.images == 0


@pytest.mark.fault("kept-no-room")
def test_a_disk_that_is_full_all_the_same(config, backbone, monkeypatch):
  """Another process may fill it while rows are computed."""

  def full(self, path):
    raise OSError(28, "No space left on device")

  buffer = type("Buffer", (np.ndarray,), {"tofile": full})
  monkeypatch.setattr(
    shards.np, "empty", lambda *args: np.zeros(*args).view(buffer)
  )
  with pytest.raises(TrainingError, match="cannot be written.*No space left"):
    kept_rows(config, backbone, Pass())


def test_a_later_run_knows_what_could_not_be_read(config, backbone):
  results = []
  for max_bad in (1, 1, 0):
    reader = reader_of(config)
    fetch = reader.source.fetch

    def damaged(index, fetch=fetch):
      encoded, label = fetch(index)
      return tf.where(index == 5, "no image", encoded), label

    source = dataclasses.replace(reader.source, fetch=damaged)
    reader = type(reader)(source, max_bad=max_bad)
    frozen_pass = Pass()
    if not max_bad:
      with pytest.raises(BrokenDataError, match="example 5"):
        kept_rows(config, backbone, frozen_pass, reader)
    else:
      results.append(kept_rows(config, backbone, frozen_pass, reader))
      assert [*reader.unreadable] == [5]
  assert results[0][0].tobytes() == results[1][0].tobytes()
  assert (results[0][0][5] == results[0][0][6]).all()


@pytest.mark.parametrize("version", ["", "2"])
def test_data_of_python_needs_a_version(version, config, backbone):
  """Of its contents nothing else is known."""
  reader = reader_of(config)
  known = DataFiles(facts={"examples": SIZE, "version": version})
  source = dataclasses.replace(reader.source, inventory=known)
  frozen_pass = Pass()
  if version:
    kept_rows(config, backbone, frozen_pass, type(reader)(source))
  else:
    with pytest.raises(ConfigError, match="without a version"):
      kept_rows(config, backbone, frozen_pass, type(reader)(source))
  assert bool(frozen_pass.images) == bool(version)


def test_what_is_missing_is_asked_of_all(config, backbone, monkeypatch):
  """Also by a process that has nothing yet, where others have some."""
  asked = []
  real = processes.union_over_processes
  monkeypatch.setattr(
    processes,
    "union_over_processes",
    lambda numbers: asked.append(list(numbers)) or real(numbers),
  )
  kept = kept_of(config, backbone)
  needs = kept.needs("train", reader_of(config), Pass())
  assert needs.missing == needs.plan.count
  assert asked == [[0, 1, 2]]
  kept.training(reader_of(config), Pass())
  needs = kept.needs("train", reader_of(config), Pass())
  assert needs.missing == 0
  assert asked[1:] == [[0, 1, 2], []]


@pytest.mark.fault("kept-stopped")
def test_one_run_at_a_time_keeps_the_same(tmp_path):
  asked = []
  path = tmp_path / ".lock"
  first = lock.one_at_a_time(path, asked.append, "config.keep.dir")
  first.__enter__()

  def wait(owner):
    asked.append(owner)
    if len(asked) == 3:
      first.__exit__(None, None, None)

  with lock.one_at_a_time(path, wait, "config.keep.dir"):
    assert len(asked) == 3
    assert all(owner.startswith("process ") for owner in asked)


def test_memory_that_is_kept_is_planned_for(config, backbone, monkeypatch):
  monkeypatch.setattr(Step, "peak_bytes", lambda *args: 0)
  found = []
  for keep in ({}, {"what": "contexts"}, {"what": "contexts", "where": "disk"}):
    keep = config_lib.KeepConfig(**keep)
    config = dataclasses.replace(config, keep=keep)
    made = trainer.Trainer(
      config=config,
      context=RunContext(one_device()),
      backbone=backbone,
      train=reader_of(config),
    )
    found.append(passes.pack_bytes(made, sweep.trials_of(config, "d")))
  # Keys and values of 17 tokens of width 32; all devices share one memory.
  kept = SIZE * 2 * 17 * 32 * 4 // jax.local_device_count()
  assert found[1] - found[0] == kept
  assert found[2] == found[0]
