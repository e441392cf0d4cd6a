"""Runs on embeddings train the same tasks as runs on the images."""

import dataclasses
import json
import shutil
import types

import fake_embeddings
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pyarrow as pa
import pytest
from conftest import run_program
from fake_embeddings import CLASSES, TEST

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.cache.row_file import FileRows
from memory_vit.configs import embeddings as embeddings_config
from memory_vit.data import audit, datasets
from memory_vit.errors import (
  BackboneError,
  ConfigError,
  DataError,
  TaskError,
  TrainingError,
)
from memory_vit.evaluation import task_data
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import find, manifest, store
from memory_vit.train import dry_run, run
from memory_vit.train.inputs import open_inputs
from memory_vit.train.step import Step

BATCH = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A backbone, images, and their embeddings."""
  root = tmp_path_factory.mktemp("embedded")
  fake_embeddings.write_backbone(root)
  data = fake_embeddings.write_images(root)
  fake_embeddings.embedded(root, "embedded/train", data / "train")
  fake_embeddings.embedded(root, "embedded/test", data / "test")
  return root


def config_of(place, changes=(), name="embeddings"):
  """Of some steps, on the embeddings or on the images of the same folder."""
  values = embeddings_config.get_config()
  values.backbone = str(place / "tiny.npz")
  values.data.name = name
  values.data.dir = str(place / ("data" if name == "folder" else "embedded"))
  values.data.train, values.data.validation = "train[:24]", "train[24:]"
  values.task.name = "pets"
  values.batch_size, values.batch_size_eval, values.eval_every = BATCH, BATCH, 3
  values.epochs, values.total_steps = 0.0, 7
  values.update_from_flattened_dict(dict(changes))
  return config_lib.from_dict(values.to_dict())


def trained_arrays(workdir, name="pets"):
  """The bytes of every array of an exported task."""
  path = workdir / "tasks" / name
  found = store.read_arrays(path, manifest.read(path))
  return {key: np.asarray(value) for key, value in found.items()}


def assert_same_bits(first, second):
  assert first.keys() == second.keys()
  for key, value in first.items():
    assert value.tobytes() == second[key].tobytes(), key


def opened(config, workdir):
  return open_inputs(config, workdir, sharding.make_mesh(), StopSignal())


def copied(place, tmp_path, config, dtype=np.float32):
  """Embeddings with the values that a run on the images caches, to the bit."""
  made = opened(config, tmp_path)
  values, name = {}, ""
  for role, reader in made.splits.items():
    rows = made.cache.rows(role, reader)
    # Whole batches for all devices.
    found = rows.take(np.arange(-(-reader.size // BATCH) * BATCH) % reader.size)
    [(name, array)] = found.items()
    for i, row in enumerate(np.asarray(array)[: reader.size]):
      values[reader.file_name(i)] = row.astype(dtype)
  target = tmp_path / "embedded"
  for source in sorted((place / "embedded").rglob("*.parquet")):
    file = target / source.relative_to(place / "embedded")
    if "_plan" in file.parts:
      continue
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(source.read_bytes())
    fake_embeddings.rewritten(
      file,
      lambda table, about: (
        fake_embeddings.with_values(table, name, values), about
      ),
    )  # fmt: skip
  return target


@pytest.mark.slow
@pytest.mark.parametrize(
  ("regime", "where"),
  [("head", "host"), ("head", "device"), ("probe", "disk"), ("probe", "host")],
)
def test_equal_embeddings_train_the_same_task_as_images(
  place, tmp_path, regime, where
):
  """Order, labels, validation, test: all are those of the image folder."""
  changes = {"regime": regime}
  images = config_of(place, changes, "folder")
  result = run.train_and_evaluate(images, tmp_path / "images")
  there = copied(place, tmp_path, images)
  changes |= {
    "data.dir": str(there), "cache.where": where,
    "cache.dir": str(tmp_path / "cache") if where == "disk" else "",
  }  # fmt: skip
  found = run.train_and_evaluate(config_of(place, changes), tmp_path / "rows")
  assert_same_bits(
    trained_arrays(tmp_path / "rows"), trained_arrays(tmp_path / "images")
  )
  assert found.tasks == result.tasks
  assert found.tasks[0].test.examples == TEST * len(CLASSES)
  hits = [tmp_path / d / "hits.json" for d in ("rows", "images")]
  assert hits[0].read_bytes() == hits[1].read_bytes()


@pytest.mark.slow
def test_sweep_on_few_bfloat16_embeddings_equals_sweep_on_images(
  place, tmp_path
):
  """Choice, weights and rounding at once, which could differ from images."""
  changes = {
    "cache.dtype": "bfloat16", "data.per_class": 4,
    "optim.class_weights": "balanced", "optim.accumulation_steps": 1,
    "sweep.learning_rate": (0.1, 0.3), "sweep.export": "all",
  }  # fmt: skip
  images = config_of(place, changes, "folder")
  result = run.train_and_evaluate(images, tmp_path / "images")
  data = place / "data"
  root = tmp_path / "place"
  root.mkdir()
  (root / "tiny.npz").symlink_to(place / "tiny.npz")
  flags = ("--stored=bfloat16",)
  fake_embeddings.embedded(root, "embedded/train", data / "train", *flags)
  fake_embeddings.embedded(root, "embedded/test", data / "test", *flags)
  there = copied(root, tmp_path, images, jnp.bfloat16)
  # Also where it is not asked for: nothing is lost by it.
  changes |= {"data.dir": str(there), "cache.dtype": "float32"}
  found = run.train_and_evaluate(config_of(root, changes), tmp_path / "rows")
  for name in ("pets", "pets-00", "pets-01"):
    assert_same_bits(
      trained_arrays(tmp_path / "rows", name),
      trained_arrays(tmp_path / "images", name),
    )
  # The test split of images is not cached, and so not rounded.
  assert [t.val.accuracy for t in found.tasks] == [
    t.val.accuracy for t in result.tasks
  ]


@pytest.fixture(scope="module")
def central(place):
  """Embeddings of central crops of larger images, as a task prepares them."""
  backbone = mv.load_backbone(place / "tiny.npz")
  task = mv.init_task(
    jax.random.key(0), backbone, name="middle", num_classes=2,
    preprocessing=EvalPreprocessing(
      image_size=8, crop="central", resize=11, interpolation="bicubic"
    ),
  )  # fmt: skip
  mv.save_task(task, place / "middle")
  flag = f"--task={place / 'middle'}"
  data = place / "data"
  fake_embeddings.embedded(place, "central/train", data / "train", flag)
  fake_embeddings.embedded(place, "central/test", data / "test", flag)
  return task.spec.preprocessing


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["head", "probe"])
def test_task_trained_on_embeddings_predicts_images_alike(
  place, central, tmp_path, regime
):
  """It carries how they were prepared; what `embed` wrote is as it is."""
  changes = {
    "regime": regime, "data.dir": str(place / "central"), "learning_rate": 1.0,
    "total_steps": 30, "data.validation": "",
  }  # fmt: skip
  result = run.train_and_evaluate(config_of(place, changes), tmp_path)
  backbone = mv.load_backbone(place / "tiny.npz")
  task = mv.load_task(tmp_path / "tasks" / "pets", backbone)
  assert task.spec.preprocessing == central
  assert task.spec.class_names == CLASSES
  config = json.loads((tmp_path / "config.json").read_text())
  assert (config["data"]["eval_crop"], config["data"]["resize"]) == (
    "central", 11,
  )  # fmt: skip
  source = datasets.open_split("folder", "test", str(place / "data"))
  paths = [source.file_name(i) for i in range(source.size)]
  logits = run_program(
    backbone, [task], jnp.asarray(mv.preprocess(paths, task))
  )["pets"]
  best = np.asarray(logits).argmax(axis=-1)
  assert len(np.unique(best)) > 1
  right = (best == source.labels).mean()
  assert result.tasks[0].test.accuracy == pytest.approx(right)
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, source.labels)
  assert result.tasks[0].test.loss == pytest.approx(float(loss.mean()), 1e-4)


@pytest.mark.slow
def test_embeddings_equal_cached_features_up_to_rounding(place, tmp_path):
  """Another program on other batches computes it: equal to 1e-5."""
  images, rows = config_of(place, {}, "folder"), config_of(place)
  found = []
  for i, config in enumerate((images, rows)):
    made = opened(config, tmp_path / str(i))
    rows_of_run = made.cache.rows("train", made.splits["train"])
    found.append(
      (
        np.asarray(rows_of_run.take(np.arange(24))["pooled"]),
        rows_of_run.labels,
      )
    )
  np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(found[1][1], found[0][1])
  assert len(np.unique(found[1][1][:8])) == 3  # the classes are mixed


@pytest.mark.fault("changed-embeddings")
@pytest.mark.slow
def test_stopped_run_resumes_unless_its_embeddings_changed(
  place, tmp_path, monkeypatch
):
  """Also where its embeddings lie elsewhere, unless they have changed."""
  changes = {"checkpoint_every": 3, "data.test": ""}
  config = config_of(place, changes)
  run.train_and_evaluate(config, tmp_path / "whole")
  steps, real = [], Step.__call__

  def stops_in_step_5(self, *args):
    steps.append(1)
    if len(steps) == 5:
      raise KeyboardInterrupt
    return real(self, *args)

  monkeypatch.setattr(Step, "__call__", stops_in_step_5)
  with pytest.raises(KeyboardInterrupt):
    run.train_and_evaluate(config, tmp_path / "stopped")
  moved = tmp_path / "moved"
  shutil.copytree(place / "embedded", moved)
  elsewhere = config_of(place, {**changes, "data.dir": str(moved)})
  for file in moved.rglob("*.parquet"):
    file.touch()
  with pytest.raises(TrainingError, match="files"):
    run.train_and_evaluate(elsewhere, tmp_path / "stopped")
  for file in moved.rglob("*.parquet"):
    shutil.copystat(place / "embedded" / file.relative_to(moved), file)
  run.train_and_evaluate(elsewhere, tmp_path / "stopped")
  assert len(steps) == 5 + 4  # from step 3 on
  assert_same_bits(
    trained_arrays(tmp_path / "stopped"), trained_arrays(tmp_path / "whole")
  )


@pytest.mark.slow
def test_embeddings_cached_on_disk_are_not_read_again(
  place, tmp_path, monkeypatch
):
  changes = {"cache.where": "disk", "cache.dir": str(tmp_path / "cache")}
  config = config_of(place, {**changes, "total_steps": 1})
  run.train_and_evaluate(config, tmp_path / "first")
  put = []
  monkeypatch.setattr(FileRows, "put", lambda *args: put.append(args))
  run.train_and_evaluate(config, tmp_path / "second")
  assert not put
  assert_same_bits(
    trained_arrays(tmp_path / "first"), trained_arrays(tmp_path / "second")
  )


def test_dry_run_reports_embeddings_to_read(place, tmp_path):
  said = dry_run.dry_run(config_of(place), tmp_path / "run")
  assert "features of training    24 rows of 128 bytes: 3,072 bytes" in said
  assert "features of validation" in said
  assert "features of test" in said
  assert "\nreading " in said
  assert not (tmp_path / "run").exists()


def test_embeddings_that_exceed_memory_are_refused(
  place, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    psutil, "virtual_memory", lambda: types.SimpleNamespace(
      available=6_000, total=2**30
    ),
  )  # fmt: skip
  with pytest.raises(
    ConfigError,
    match=r"features of training and validation and test take 6,144 bytes",
  ):
    run.train_and_evaluate(config_of(place), tmp_path)


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"regime": "memory_masked"}, "expected 'head' or 'probe', or images"),
    ({"regime": "full"}, "config.regime is 'full', for which embeddings"),
    ({"cache.what": "none"}, "cache.what is 'none'.*expected 'features'"),
    ({"cache.what": "images"}, "config.cache.what is 'images'"),
    ({"cache.crops": 3}, "config.cache.crops is 3.*expected 1"),
    ({"data.flip": True}, "config.data.flip is True.*expected False"),
    ({"data.train_crop": "small"}, "train_crop is 'small'.*expected 'resize'"),
    ({"optim.mixup": 0.2}, "config.optim.mixup is 0.2.*expected 0.0"),
    ({"upstream.name": "embeddings"}, "config.upstream.name is 'embeddings'"),
  ],
)  # fmt: skip
def test_image_options_are_refused_for_embeddings(place, changes, expected):
  with pytest.raises(ConfigError, match=expected) as error:
    config_of(place, changes)
  assert "\n" not in str(error.value)


@pytest.mark.fault("damaged-embeddings")
@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"image_size": 12}, "config.image_size is 12.* made with 8: exp"),
    ({"gelu": "exact"}, "config.gelu is 'exact'.* made with 'tanh': exp"),
    ({"dtype": "bfloat16"}, "config.dtype is 'bfloat16'.* 'float32': exp"),
    ({"data.eval_crop": "central"}, "eval_crop is 'central'.*with 'resize'"),
  ],
)
def test_embeddings_made_with_other_options_are_refused(
  place, tmp_path, changes, expected
):
  with pytest.raises(ConfigError, match=expected):
    opened(config_of(place, changes), tmp_path)


@pytest.mark.fault("damaged-embeddings")
def test_embeddings_of_another_backbone_are_refused(place, tmp_path):
  fake_embeddings.write_backbone(tmp_path, seed=5)
  changes = {"backbone": str(tmp_path / "tiny.npz")}
  with pytest.raises(BackboneError, match="expected the backbone that made"):
    opened(config_of(place, changes), tmp_path)


def test_crop_other_than_that_of_the_embeddings_is_refused(
  place, central, tmp_path
):
  changes = {
    "data.dir": str(place / "central"), "data.eval_crop": "central",
    "data.resize": 9,
  }  # fmt: skip
  with pytest.raises(ConfigError, match="data.resize is 9.* made with 11"):
    opened(config_of(place, changes), tmp_path)


@pytest.mark.fault("damaged-embeddings")
@pytest.mark.parametrize("split", ["test", "validation"])
def test_splits_with_different_preprocessing_are_refused(
  place, central, tmp_path, split
):
  """A task would be measured on other images than those that it is made for."""
  there = tmp_path / "embedded"
  there.mkdir()
  (there / "train").symlink_to(place / "embedded" / "train")
  (there / "test").symlink_to(place / "central" / "test")
  changes = {"data.dir": str(there), f"data.{split}": "test"}
  if split == "validation":
    changes["data.test"] = ""
  with pytest.raises(
    DataError,
    match="'test': .* with crop 'central', resize 11, interpolation 'bicubic', "
    r"but the images of .*'train\[:24\]' with crop 'resize', resize 0, interp",
  ) as error:
    run.train_and_evaluate(config_of(place, changes), tmp_path / "run")
  assert "\n" not in str(error.value)
  assert not (tmp_path / "run" / "tasks").exists()


@pytest.mark.fault("damaged-embeddings")
def test_embeddings_of_another_shape_are_refused(place, tmp_path):
  """The metadata are a stranger's: what is wrong in them costs no traceback."""
  there = tmp_path / "embedded"
  shutil.copytree(place / "embedded", there)

  def narrow(table, about):
    about["values"]["shapes"]["pooled"] = [16]
    raw = {p: np.zeros(16, np.float32) for p in table["path"].to_pylist()}
    index = table.schema.get_field_index("pooled")
    values = pa.array([row.tobytes() for row in raw.values()], pa.binary(64))
    return table.set_column(index, "pooled", values), about

  for file in there.glob("t*/*.parquet"):
    fake_embeddings.rewritten(file, narrow)
  with pytest.raises(BackboneError, match="shapes"):
    opened(config_of(place, {"data.dir": str(there)}), tmp_path)


@pytest.mark.slow
def test_image_commands_refuse_embeddings(place, tmp_path):
  with pytest.raises(ConfigError, match="only images can be checked"):
    audit.audit_data(config_of(place))
  config = config_of(place, {"total_steps": 1})
  run.train_and_evaluate(config, tmp_path)
  given = task_data.Given(
    data={}, directories={"": str(place / "data")}, splits={}
  )
  [(path, _)] = find.find_tasks([tmp_path / "tasks"])
  with pytest.raises(
    TaskError, match="'pets' has embeddings as data, but images are needed"
  ):
    task_data.choose([manifest.read(path)], given, upstream=False)
  given = dataclasses.replace(given, data={"pets": "folder"})
  chosen, _ = task_data.choose([manifest.read(path)], given, upstream=False)
  assert chosen["pets"].name == "folder"
