"""Tasks that Python trains and evaluates by one call each."""

import dataclasses
import json
import logging
import subprocess
import sys
import tempfile

import fake_data
import jax
import numpy as np
import pytest
from conftest import ROOT, random_task, tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.config import FEW_LEARNING_RATES
from memory_vit.data import crop_sizes, in_memory
from memory_vit.errors import (
  BackboneError,
  ConfigError,
  DataError,
  TaskError,
)
from memory_vit.train import run, settle

NAMES = ["ant", "bee", "cat"]
PIXELS = np.stack([fake_data.noise(i, 8, 8) for i in range(48)])
WORDS = NAMES * 16
RUN = {"name": "pets", "epochs": 2, "batch_size": 16, "progress": False}


@pytest.fixture(scope="module")
def small():
  """A backbone that Python has: no file holds it."""
  return tiny_backbone(depth=1)


WITHOUT_TENSORFLOW = """
import json, sys
import numpy as np, pandas as pd
import memory_vit as mv
backbone = mv.load_backbone(sys.argv[1])
images = np.random.default_rng(0).integers(0, 256, (24, 12, 10, 3), np.uint8)
labels = np.arange(24) % 3
task = mv.train_task(
  backbone, (images, labels), name="t", epochs=1, batch_size=8, progress=False
).task
for data in (
  [*zip(images, labels)], pd.DataFrame({"path": sys.argv[2:], "label": [0, 1]})
):
  mv.evaluate_tasks(backbone, task, data, progress=False)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.processes
def test_data_in_memory_need_no_tensorflow(small, tmp_path):
  """From the import to the result, three learning rates and a held-out part."""
  mv.save_backbone(small, tmp_path / "small.npz")
  files = []
  for kind in ("JPEG", "PNG"):
    files.append(tmp_path / f"image.{kind}")
    files[-1].write_bytes(fake_data.encode(fake_data.noise(0), kind))
  done = subprocess.run(
    [sys.executable, "-c", WITHOUT_TENSORFLOW, tmp_path / "small.npz", *files],
    cwd=ROOT, stdout=subprocess.PIPE, check=True,
  )  # fmt: skip
  modules = {*json.loads(done.stdout.splitlines()[-1])}
  assert "memory_vit.data.memory_source" in modules
  heavy = {"tensorflow", "tensorflow_datasets", "clu", "keras"}
  assert not modules & heavy


class SeenError(Exception):
  """Raised in place of a run."""


@pytest.fixture
def configured(monkeypatch):
  """Calls `train_task`, and returns what it hands to the engine."""

  def call(*args, **options):
    seen = []

    def engine(config, workdir, **given):
      seen.append((config, workdir, given))
      raise SeenError

    monkeypatch.setattr(run, "train_and_evaluate", engine)
    with pytest.raises(SeenError):
      mv.train_task(*args, **{**RUN, **options})
    return seen[0]

  return call


def test_learning_rates_default_to_three_and_may_be_given(small, configured):
  data = (PIXELS, WORDS)
  config, _, given = configured(small, data)
  assert config.sweep.learning_rate == FEW_LEARNING_RATES
  assert given["backbone"] is small
  for rates in ((0.3, 0.1), np.array([0.3, 0.1])):
    config, *_ = configured(small, data, learning_rate=rates)
    assert config.sweep.learning_rate == (0.3, 0.1)
  config, *_ = configured(small, data, learning_rate=0.3, regime="head")
  assert not config.sweep.is_on
  assert (config.learning_rate, config.regime) == (0.3, "head")


def test_tenth_of_the_data_validates_if_no_split_is_given(small, configured):
  *_, given = configured(small, (PIXELS, WORDS))
  sizes = {role: reader.size for role, reader in given["splits"].items()}
  assert sizes == {"train": 43, "validation": 5}
  *_, given = configured(
    small, (PIXELS, WORDS), validation=(PIXELS[:8], WORDS[:8]),
    test=(PIXELS[:2], WORDS[1:3]),
  )  # fmt: skip
  sizes = {role: reader.size for role, reader in given["splits"].items()}
  assert sizes == {"train": 48, "validation": 8, "test": 2}
  # Of the training split: "ant" is not in the test, and has its number.
  assert given["splits"]["test"].labels.tolist() == [1, 2]


def test_options_are_accepted_unless_set_by_arguments(small, configured):
  config, *_ = configured(
    small, (PIXELS, WORDS), options={"data.flip": False, "eval_every": 3}
  )
  assert not config.data.flip
  assert config.eval_every == 3
  assert (config.image_size, config.dtype) == (8, "float32")
  for key in ("epochs", "task.name", "image_size", "gelu"):
    with pytest.raises(ConfigError, match=f"options: '{key}' is set by"):
      mv.train_task(small, (PIXELS, WORDS), **RUN, options={key: 1})
  with pytest.raises(
    ConfigError, match=r"no option 'flip'; nearest: data\.flip"
  ):
    mv.train_task(small, (PIXELS, WORDS), **RUN, options={"flip": False})


KINDS = {
  "labels": [NAMES[: i % 4] for i in range(48)],
  "values": [[i / 7, -i] for i in range(48)],
}


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"epochs": 0}, "epochs is 0, expected more than 0, or None"),
    ({"epochs": -1}, "epochs is -1, expected more than 0, or None"),
    ({"epochs": True}, "epochs is True, expected float"),
    ({"batch_size": 0}, "batch_size.* is 0, expected at least 1"),
    ({"batch_size": 2.5}, "batch_size.* is 2.5, expected int"),
    ({"learning_rate": 0}, "learning_rate is 0, expected a positive number"),
    ({"learning_rate": []}, "learning_rate is empty, expected numbers or None"),
    ({"cells": None}, "cells is None, expected int"),
    ({"name": ""}, "name is '': expected 1 to 64 characters of a-z"),
    ({"name": "backbone"}, "name is 'backbone': .* and not 'backbone'"),
    ({"options": {"total_steps": 5}}, "'total_steps' is set by an argument"),
  ],
)
def test_invalid_arguments_are_refused_before_data_are_read(
  small, given, message
):
  """It is refused before any data are read."""
  with pytest.raises(ConfigError, match=message):
    mv.train_task(small, iter([]), **{**RUN, **given})


def test_few_images_get_a_minimum_number_of_steps(small, configured):
  few = {"epochs": None, "batch_size": 128}
  config, *_ = configured(small, (PIXELS, WORDS), **few)
  assert (settle.steps_of(config, 43), config.eval_every) == (25, 5)
  config, *_ = configured(
    small, (PIXELS, WORDS), **few, options={"total_steps": 7}
  )
  assert settle.steps_of(config, 43) == 7
  config, *_ = configured(small, (PIXELS, WORDS), epochs=np.float32(2.5))
  assert settle.steps_of(config, 43) == 7


@pytest.mark.parametrize("size", [0, -8, 2.5, True, None])
def test_invalid_batch_sizes_of_an_evaluation_are_refused(small, tasks, size):
  with pytest.raises(ConfigError, match="batch_size is .*, expected"):
    mv.evaluate_tasks(small, tasks, (PIXELS, WORDS), batch_size=size)


@pytest.mark.parametrize("kind", [*KINDS])
def test_kind_applies_to_the_run_and_its_splits(small, configured, kind):
  config, _, given = configured(small, (PIXELS, KINDS[kind]), kind=kind)
  assert config.task.kind == kind
  splits = given["splits"]
  assert {split.kind for split in splits.values()} == {kind}
  assert splits["validation"].labels.shape[1] == splits["train"].num_classes
  with pytest.raises(TaskError, match="'boxes', expected one of classes"):
    mv.train_task(small, None, **RUN, kind="boxes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS])
def test_tasks_of_other_kinds_are_trained_and_evaluated(small, kind):
  test = PIXELS[:16], KINDS[kind][:16]
  result = mv.train_task(
    small, (PIXELS, KINDS[kind]), test=test, kind=kind, learning_rate=0.1,
    class_names=("x", "y") if kind == "values" else (), **RUN,
  )  # fmt: skip
  (trial,) = result.trials
  assert (result.score, result.scores) == (trial.test.score, trial.test)
  assert result.task.spec.kind.name == kind
  names = ("x", "y") if kind == "values" else tuple(NAMES)
  assert result.task.spec.class_names == names
  key = {"labels": "map", "values": "r2"}[kind]
  assert f"validation/{key}" in result.history
  (found,) = mv.evaluate_tasks(
    small, result.task, test, progress=False
  ).values()
  assert found.score == pytest.approx(result.score)
  assert found.metrics[key] == found.score
  assert found.metrics.keys() == trial.test.metrics.keys()
  assert found.examples == 16


@pytest.mark.parametrize(
  "stated",
  [
    None,
    mv.EvalPreprocessing(
      image_size=8, crop="central", resize=9, interpolation="bicubic"
    ),
  ],
)
def test_new_task_has_the_preprocessing_of_a_run(small, stated):
  backbone = dataclasses.replace(small, preprocessing=stated)
  new = mv.init_task(jax.random.key(0), backbone, name="new", num_classes=2)
  data = config_lib.DataConfig()
  run_does = crop_sizes.preprocessing_of(data.eval_crop, data.resize, 8, stated)
  assert new.spec.preprocessing == run_does


def test_name_in_place_of_a_backbone_is_refused(small):
  with pytest.raises(BackboneError, match=r"type str, .*mv\.load_backbone"):
    mv.train_task("augreg-B/32", (PIXELS, WORDS), **RUN)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
  """Two rates in one pass, and what was left behind."""
  place = tmp_path_factory.mktemp("temporary")
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(tempfile, "tempdir", str(place))
    # Nobody could read them afterwards.
    patched.setattr(run, "TensorBoard", lambda _: pytest.fail("events"))
    result = mv.train_task(
      small, (PIXELS, WORDS), test=(PIXELS[:16], WORDS[:16]),
      learning_rate=(0.3, 0.1), **RUN,
    )  # fmt: skip
  return result, [*place.glob("memory-vit-*")]


@pytest.mark.slow
def test_train_task_returns_task_trials_and_history(small, trained):
  result, left = trained
  assert not left
  assert result.task.spec.class_names == tuple(NAMES)
  assert result.task.spec.backbone == small.id
  assert result.task.provenance["config"]["backbone"].startswith("python:")
  assert {trial.learning_rate for trial in result.trials} == {0.3, 0.1}
  best = result.trials[0]
  assert best.val.accuracy == max(t.val.accuracy for t in result.trials)
  assert (result.accuracy, best.test.examples) == (best.test.accuracy, 16)
  steps, losses = result.history["train/loss"]
  assert steps.tolist() == [*range(1, 7)]
  assert np.isfinite(losses).all()
  assert "validation/top1" in result.history
  with pytest.raises(dataclasses.FrozenInstanceError):
    result.scores = None
  # Made and trained with the defaults: they share a pass.
  key = jax.random.key(0)
  own = mv.init_task(key, small, name="own", num_classes=2)
  assert mv.concatenate(result.task, own)["own"] is own


@pytest.mark.slow
def test_evaluate_tasks_equals_the_accuracy_of_the_run(small, trained):
  result, _ = trained
  test = (PIXELS[:16], WORDS[:16])
  found = mv.evaluate_tasks(small, result.task, test, progress=False)
  assert found["pets"].accuracy == result.accuracy
  assert found["pets"].examples == 16
  assert found["pets"].loss == pytest.approx(result.trials[0].test.loss)
  with pytest.raises(DataError, match="its label is 'dog'"):
    mv.evaluate_tasks(small, result.task, (PIXELS[:1], ["dog"]), progress=False)


@pytest.mark.slow
def test_train_task_equals_the_command(small, tmp_path):
  """The same configuration on the same folder: the same bits."""
  fake_data.write_folder(
    tmp_path / "data",
    {
      f"{split}/{name}": [f"{i}.png" for i in range(7)]
      for split in ("train", "test")
      for name in NAMES
    },
  )
  result = mv.train_task(
    small, tmp_path / "data" / "train", test=tmp_path / "data" / "test",
    workdir=tmp_path / "given", learning_rate=0.3, **RUN,
  )  # fmt: skip
  mv.save_backbone(small, tmp_path / "tiny.npz")
  made = result.task.provenance["config"]
  config = config_lib.from_dict(made).replaced(
    {
      "backbone": str(tmp_path / "tiny.npz"),
      "data.name": "folder",
      "data.dir": str(tmp_path / "data"),
    },
  )
  command = run.train_and_evaluate(config, tmp_path / "command")
  task = mv.load_task(tmp_path / "command" / "tasks" / "pets", small)
  assert task.digest == result.task.digest
  assert command.tasks[0].test.accuracy == result.accuracy


@pytest.mark.slow
def test_train_task_resumes_in_its_directory(small, tmp_path, monkeypatch):
  call = {**RUN, "workdir": str(tmp_path / "run"), "learning_rate": 0.3}
  first = mv.train_task(small, (PIXELS, WORDS), **call)
  assert first.accuracy == first.trials[0].val.accuracy
  assert (tmp_path / "run" / "tasks" / "pets" / "task.json").is_file()
  second = mv.train_task(small, (PIXELS, WORDS), **call)
  assert second.task.digest == first.task.digest
  assert second.trials == first.trials
  np.testing.assert_array_equal(
    second.history["train/loss"], first.history["train/loss"]
  )
  with pytest.raises(mv.MemoryVitError, match="other data"):
    mv.train_task(small, (PIXELS[::-1], WORDS), **call)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_only_during_the_call(
  small, capfd, progress, monkeypatch
):
  package = logging.getLogger("memory_vit")
  before = package.handlers, package.propagate, package.level

  def opening(*args):
    package.info("how far it is")
    raise SeenError

  monkeypatch.setattr(in_memory, "open_data", opening)
  with pytest.raises(SeenError):
    mv.train_task(small, (PIXELS, WORDS), **{**RUN, "progress": progress})
  assert ("how far it is" in capfd.readouterr().err) == progress
  assert (package.handlers, package.propagate, package.level) == before


# Evaluation.


@pytest.fixture(scope="module")
def tasks(small):
  named = {"class_names": NAMES}
  return mv.concatenate(
    random_task(small, "a", **named), random_task(small, "b", seed=1, **named)
  )


def right(backbone, tasks, name, pixels, labels):
  images = mv.preprocess(list(pixels), tasks)
  logits = mv.forward(backbone, tasks, images)[name]
  return float(np.mean(np.argmax(logits, -1) == labels))


@pytest.mark.slow
def test_tasks_are_evaluated_on_one_split_or_on_their_own(small, tasks):
  words, numbers = WORDS[:16], np.arange(16) % 3
  one = mv.evaluate_tasks(
    small, tasks, (PIXELS[:16], words), batch_size=16, progress=False
  )
  assert {name: m.accuracy for name, m in one.items()} == {
    name: right(small, tasks, name, PIXELS[:16], numbers) for name in "ab"
  }
  data = {"b": (PIXELS[:16], words), "a": (PIXELS[16:24], numbers[:8])}
  own = mv.evaluate_tasks(small, tasks, data, batch_size=16, progress=False)
  assert [*own] == ["a", "b"]
  assert own["b"] == one["b"]
  assert own["a"].examples == 8
  assert own["a"].accuracy == right(
    small, tasks, "a", PIXELS[16:24], numbers[:8]
  )
  some = mv.evaluate_tasks(
    small, tasks, {"a": data["a"]}, batch_size=16, progress=False
  )
  assert some == {"a": own["a"]}


def test_evaluate_tasks_refuses_unusable_data_and_tasks(small, tasks):
  data = (PIXELS[:8], WORDS[:8])
  for given, message in (
    ({"a": data, "c": data}, "the keys 'c', but the tasks are a, b: "),
    ({"zz": data}, "the keys 'zz', but the tasks are a, b: "),
    (
      {"img": PIXELS, "label": WORDS},
      "the keys 'img', 'label', but .* keys image, l",
    ),
    ({}, "data is empty: expected a split"),
    (tiny_backbone(7, depth=1), "belongs to another backbone"),
  ):
    backbone, split = (small, given)
    if isinstance(given, mv.Backbone):
      backbone, split = given, data
    with pytest.raises(TaskError, match=message):
      mv.evaluate_tasks(backbone, tasks, split, progress=False)
  other = random_task(small, "c", class_names=["x", "y", "z"])
  with pytest.raises(TaskError, match="'c' has 3 classes"):
    mv.evaluate_tasks(
      small, [*tasks, other], (PIXELS[:3], [0, 1, 2]), progress=False
    )


@pytest.mark.slow
def test_task_without_class_names_takes_numbers(small):
  key = jax.random.key(0)
  task = mv.init_task(key, small, name="new", num_classes=5)
  data = (PIXELS[:8], [0, 1, 2, 1] * 2)  # the greatest is not among them
  found = mv.evaluate_tasks(small, task, data, batch_size=8, progress=False)
  assert found["new"].loss == pytest.approx(np.log(5), rel=1e-5)
  assert found["new"].per_class[4] is None
