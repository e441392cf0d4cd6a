"""Runs of one process share programs where their shapes are equal."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.errors import ConfigError
from memory_vit.train import padded_head, run

# Programs whose size depends on the model, and which are not those of a data
# set alone.
_LARGE = ("_gradient", "_update", "read_program", "encode_program")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(depth=1), path)
  return path


def config_of(backbone, name, **changes):
  config = config_lib.Config(
    backbone=str(backbone),
    batch_size=8,
    batch_size_eval=8,
    total_steps=3,
    learning_rate=0.5,
    data=config_lib.DataConfig(
      name=name, train="train[:24]", validation="train[24:32]", test="test[:8]"
    ),
    task=config_lib.TaskConfig(name="shared", cells=2),
  )
  return dataclasses.replace(config, **changes)


def padded(config, classes):
  task = dataclasses.replace(config.task, padded_classes=classes)
  return dataclasses.replace(config, task=task)


def compiled(caplog, work):
  """How often each of the large programs is compiled."""
  caplog.clear()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    work()
  messages = [r.getMessage() for r in caplog.records]
  return {
    name: sum(f"Compiling jit({name})" in text for text in messages)
    for name in _LARGE
  }


@pytest.mark.slow
def test_tasks_padded_to_one_width_compile_once(backbone, tmp_path, caplog):
  """Of data sets with 5, 3 and 10 classes, in a sweep of two rates."""
  sweep = config_lib.SweepConfig(learning_rate=(0.1, 0.5))
  counts = []
  for i, name in enumerate(["digits:5-9", "digits:0-2", "digits"]):
    config = padded(config_of(backbone, name, sweep=sweep), 300)
    counts.append(
      compiled(
        caplog,
        lambda config=config, i=i: run.train_and_evaluate(
          config, tmp_path / str(i)
        ),
      )
    )
  assert counts[0]["_gradient"] == counts[0]["_update"] == 1  # of the pack
  assert counts[0]["read_program"] == 1  # for validation and test
  assert counts[1] == counts[2] == dict.fromkeys(_LARGE, 0)


@pytest.mark.slow
def test_padded_head_trains_to_the_same_task(backbone, tmp_path):
  config = config_of(backbone, "digits:5-9")
  expected = run.train_and_evaluate(config, tmp_path / "alone")
  found = run.train_and_evaluate(padded(config, 300), tmp_path / "padded")
  frozen = mv.load_backbone(backbone)
  one, other = (
    mv.load_task(tmp_path / name / "tasks/shared", frozen)
    for name in ("alone", "padded")
  )
  heat = one.spec.kind.temperature
  assert other.spec.kind.temperature == pytest.approx(heat, rel=1e-4)
  kind = dataclasses.replace(other.spec.kind, temperature=heat)
  assert dataclasses.replace(other.spec, kind=kind) == one.spec
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    other.params,
    one.params,
  )
  assert found.tasks[0].test.per_class == expected.tasks[0].test.per_class
  assert found.tasks[0].chance == 1 / 5


def test_padding_of_a_head_is_never_predicted():
  logits = np.arange(10.0).reshape(2, 5)
  predict = padded_head.of_classes(lambda images: {"a": logits}, 3)
  np.testing.assert_array_equal(predict(None)["a"], [[0, 1, 2], [5, 6, 7]])


def test_padding_below_the_number_of_classes_is_refused(backbone, tmp_path):
  config = padded(config_of(backbone, "digits:5-9"), 4)
  with pytest.raises(ConfigError, match="padded_classes is 4, .* 5 classes"):
    run.train_and_evaluate(config, tmp_path)


@pytest.mark.slow
def test_sweep_without_validation_exports_the_last_step(backbone, tmp_path):
  """Each trial as a run of its own that chooses nothing."""
  config = config_of(backbone, "digits:5-9")
  data = dataclasses.replace(config.data, validation="")
  sweep = config_lib.SweepConfig(learning_rate=(0.1, 0.5), export="all")
  both = dataclasses.replace(config, data=data, sweep=sweep)
  result = run.train_and_evaluate(both, tmp_path / "both")
  assert [t.best_step for t in result.tasks] == [3, 3]
  assert [t.val.accuracy for t in result.tasks] == [None, None]
  alone = dataclasses.replace(config, data=data, learning_rate=0.5)
  run.train_and_evaluate(alone, tmp_path / "alone")
  frozen = mv.load_backbone(backbone)
  found = mv.load_task(tmp_path / "both/tasks/shared-01", frozen)
  expected = mv.load_task(tmp_path / "alone/tasks/shared", frozen)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    found.params,
    expected.params,
  )
