"""Runs fit temperatures on validation, and report them on test."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import memory_vit as mv
from memory_vit.data import datasets
from memory_vit.data.batching import eval_images
from memory_vit.errors import ConfigError
from memory_vit.kinds import CLASSES
from memory_vit.kinds.calibration import calibrate
from memory_vit.kinds.kind import HeldOut
from memory_vit.tasks.program import make_program
from memory_vit.train import calibrate as calibrate_lib
from memory_vit.train import summary

OPTIONS = {
  "data.name": "digits", "data.train": "train[:200]",
  "data.validation": "train[200:290]", "data.test": "test[:100]",
  "batch_size": 32, "batch_size_eval": 40, "total_steps": 20,
  "eval_every": 10, "learning_rate": 0.5, "log_images": 0,
  "export_orbax": False, "task.unknown": 0.1, "data.flip": False,
  "data.train_crop": "resize",
}  # fmt: skip


@pytest.fixture(scope="module")
def config_of(backbone_file):
  def make(**changes):
    changed = {key.replace("__", "."): v for key, v in changes.items()}
    options = {"backbone": str(backbone_file), **OPTIONS, **changed}
    return mv.Config().replaced(options)

  return make


@pytest.fixture(scope="module")
def done(config_of, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "run"
  return workdir, mv.train_and_evaluate(config_of(), workdir)


def outputs_on(backbone_file, workdir, split):
  """Outputs of the exported task, and labels."""
  backbone = mv.load_backbone(backbone_file)
  task = mv.load_task(workdir / "tasks" / "digits", backbone)
  reader = datasets.open_split("digits", split)
  images = jnp.asarray(
    eval_images(reader, task.spec.preprocessing, range(reader.size))
  )
  labels = [int(reader.source.read(i)[1]) for i in range(reader.size)]
  logits = make_program(backbone, (task,))(backbone, images)[task.name]
  return task.spec.kind, np.asarray(logits), np.array(labels)


def test_temperature_and_threshold_are_those_of_validation(done, backbone_file):
  kind, logits, labels = outputs_on(backbone_file, done[0], "train[200:290]")
  expected = CLASSES.kind.fitted(CLASSES, HeldOut(logits, labels), 0.1)
  assert kind.temperature != 1
  assert kind.temperature == pytest.approx(expected.temperature, rel=1e-3)
  assert kind.unknown == pytest.approx(expected.unknown, rel=1e-3)


def test_test_is_reported_before_and_after(done, backbone_file):
  kind, logits, labels = outputs_on(backbone_file, done[0], "test[:100]")
  trial = done[1].tasks[0]
  assert trial.temperature == kind.temperature
  scores = trial.test
  for found, stated in (
    ({"loss": scores.loss, **scores.metrics}, kind),
    (trial.uncalibrated, CLASSES),
  ):
    chances = stated.activate(logits.astype(np.float64))
    loss = -np.log(chances[np.arange(len(labels)), labels]).mean()
    error = calibrate(
      chances.max(axis=1), chances.argmax(axis=1) == labels
    ).expected_error
    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    assert found["calibration_error"] == pytest.approx(error, rel=1e-3)
  unknown = logits.max(axis=1) < kind.unknown
  assert trial.rejection["rejected"] == pytest.approx(unknown.mean())
  right = (logits.argmax(axis=1) == labels)[~unknown].mean()
  assert trial.rejection["accuracy"] == pytest.approx(right)
  shown = summary.summary(done[1], done[0])
  assert f"temperature {kind.temperature:.3g}; on the test split" in shown
  assert "as unknown; accuracy" in shown


def test_finished_run_stays_as_it_is(done, config_of):
  workdir, result = done
  written = (workdir / "tasks" / "digits" / "task.json").read_text()
  assert mv.train_and_evaluate(config_of(), workdir) == result
  again = (workdir / "tasks" / "digits" / "task.json").read_text()
  assert json.loads(again) == json.loads(written)


@pytest.mark.slow
def test_trials_of_a_sweep_are_fitted_in_parts(
  config_of, tmp_path, monkeypatch
):
  """Outputs of all trials may be more than the memory holds."""
  config = config_of(sweep__learning_rate=(0.5, 0.1, 0.01), total_steps=4)
  all_at_once = mv.train_and_evaluate(config, tmp_path / "a")
  monkeypatch.setattr(calibrate_lib, "MOST_HELD_OUT", 1)
  one_by_one = mv.train_and_evaluate(config, tmp_path / "b")
  heats = [
    {t.name: t.temperature for t in result.tasks}
    for result in (all_at_once, one_by_one)
  ]
  assert len({*heats[0].values()}) == 3
  for name, heat in heats[0].items():
    assert heats[1][name] == pytest.approx(heat, rel=1e-4)


def test_without_validation_nothing_is_fitted(config_of, tmp_path):
  config = config_of(data__validation="", task__unknown=0.0, total_steps=2)
  result = mv.train_and_evaluate(config, tmp_path)
  assert result.tasks[0].temperature is None
  assert not result.tasks[0].uncalibrated
  shown = summary.summary(result, tmp_path)
  assert "no temperature, because no image is held out" in shown
  with pytest.raises(ConfigError, match=r"task.unknown .*validation is empty"):
    config.replaced({"task.unknown": 0.1})
  with pytest.raises(ConfigError, match=r"task.unknown .*labels"):
    config_of(task__kind="labels")


def test_closed_head_without_folds_says_that_it_rejects_nothing(
  config_of, tmp_path, caplog
):
  caplog.set_level(logging.WARNING)
  config = config_of(
    data__validation="", data__per_class=1, regime="head", total_steps=1,
    optim__name="ridge", cache__what="features", learning_rate=0.1,
  )  # fmt: skip
  result = mv.train_and_evaluate(config, tmp_path)
  assert result.tasks[0].temperature is None
  assert "no image is rejected as unknown" in caplog.text
