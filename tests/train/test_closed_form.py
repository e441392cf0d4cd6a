"""Heads in closed form are scikit-learn's, and tasks as any others."""

import dataclasses
import logging

import fake_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifierCV, RidgeCV

import memory_vit as mv
from memory_vit.config import OPTIONS
from memory_vit.errors import ConfigError, DataError, TrainingError
from memory_vit.kinds import KINDS, closed_form
from memory_vit.model.regimes import REGIMES
from memory_vit.runtime.preemption import Interrupted, StopSignal
from memory_vit.train import closed_form as closed_form_step
from memory_vit.train import dry_run, topology_plan
from memory_vit.train import fit as fit_lib

SIDE = 8
PIXELS = np.stack([fake_data.noise(i, SIDE, SIDE) for i in range(60)])
ROWS = np.arange(len(PIXELS))
QUICK = ("head", "probe", "cls_masked", "memory_masked")
RUN = {"name": "pets", "batch_size": 16, "progress": False}
TARGETS = {
  "classes": ROWS % 5,
  "labels": np.stack([ROWS % 2, ROWS % 3 == 0, ROWS < 9], axis=1).astype(int),
  "values": np.stack([ROWS * 3.5, np.sin(ROWS)], axis=1),
}


@pytest.fixture(scope="module")
def small():
  return tiny_backbone(depth=2, num_classes=0)


def features_of(backbone, pixels=PIXELS):
  images = jnp.asarray(pixels / 127.5 - 1, jnp.float32)
  return np.asarray(mv.encode(backbone, images)[1].pooled)


def outputs_of(backbone, task, pixels=PIXELS):
  images = jnp.asarray(pixels / 127.5 - 1, jnp.float32)
  return np.asarray(mv.forward(backbone, task, images)[task.name])


def folded(decision):
  """Outputs of a decision function, which is one number for two classes."""
  if decision.ndim == 1:
    return np.stack([-decision / 2, decision / 2], axis=1)
  return decision


@pytest.mark.versions
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("method", ["lda", "ridge"])
def test_logits_are_the_decision_function_of_scikit_learn(
  small, method, classes
):
  targets = ROWS % classes
  head = mv.fit_head(small, (PIXELS, targets), method=method, **RUN).task
  features = features_of(small).astype(np.float64)
  strength = closed_form.solve(
    KINDS["classes"].solver(method), features, targets, classes
  ).strength
  if method == "lda":
    found = LinearDiscriminantAnalysis(
      solver="lsqr", shrinkage=strength["shrinkage"]
    )
    assert 0 < strength["shrinkage"] < 1
  else:
    found = RidgeClassifierCV(alphas=[strength["penalty"]])
  expected = folded(found.fit(features, targets).decision_function(features))
  np.testing.assert_allclose(
    outputs_of(small, head), expected, rtol=0, atol=1e-5 * abs(expected).max()
  )
  assert head.spec.regime == "head"


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["labels", "values"])
def test_ridge_of_labels_and_values_is_that_of_scikit_learn(small, kind):
  targets = TARGETS[kind]
  head = mv.fit_head(small, (PIXELS, targets), kind=kind, **RUN).task
  features = features_of(small).astype(np.float64)
  scaled = 2.0 * targets - 1
  if kind == "values":
    stated = head.spec.kind
    scaled = (targets - np.array(stated.mean)) / np.array(stated.std)
  penalties = closed_form._penalties(features)
  found = RidgeCV(alphas=penalties, alpha_per_target=True)
  expected = found.fit(features, scaled).predict(features)
  np.testing.assert_allclose(
    outputs_of(small, head), expected, rtol=0, atol=1e-5 * abs(expected).max()
  )


def test_one_label_and_one_value_are_solved(small):
  for kind, targets in (("labels", ROWS[:, None] % 2), ("values", ROWS)):
    found = mv.fit_head(small, (PIXELS, targets), kind=kind, **RUN)
    assert outputs_of(small, found.task).shape == (len(ROWS), 1)
    assert found.scores.examples == len(ROWS)


def test_shrinkage_is_one_for_all_classes(small):
  """It comes from the differences from the means of classes, not from all."""
  rng = np.random.default_rng(0)
  features = rng.normal(size=(40, 6))
  classes = ROWS[:40] % 4
  features += 100 * classes[:, None]
  near = closed_form.lda(features, classes, 4).strength["shrinkage"]
  features += 1e4 * classes[:, None]
  far = closed_form.lda(features, classes, 4).strength["shrinkage"]
  np.testing.assert_allclose(near, far, rtol=1e-6)


def test_no_image_is_in_the_fold_that_judges_it(small):
  """A head that remembers each image would be right about all of them."""
  targets = np.random.default_rng(0).permutation(ROWS % 2)
  features = np.random.default_rng(1).normal(size=(len(ROWS), 200))
  seen = []

  def solver(rows, classes, count):
    seen.append({*map(tuple, rows)})
    kernel = np.linalg.pinv(rows) @ np.eye(count)[classes]
    return closed_form.Solution(kernel, np.zeros(count), {})

  found = closed_form.cross_validated(solver, features, targets, 2, seed=0)
  assert len(seen) == closed_form.FOLDS
  for row in features:
    assert sum(tuple(row) in each for each in seen) == closed_form.FOLDS - 1
  assert 0.2 < (found.argmax(axis=1) == targets).mean() < 0.8
  alone = closed_form.solve(solver, features, targets, 2).outputs(features)
  assert (alone.argmax(axis=1) == targets).all()


def test_scores_are_of_test_else_validation_else_folds(small):
  data, part = (PIXELS, ROWS % 5), (PIXELS[:7], ROWS[:7] % 5)
  found = mv.fit_head(small, data, test=part, validation=part, **RUN)
  assert found.scores.examples == 7
  assert found.trials[0].val.examples == 7
  assert mv.fit_head(small, data, validation=part, **RUN).scores.examples == 7
  folds = mv.fit_head(small, data, **RUN).scores
  assert folds.examples == len(PIXELS)
  one_each = mv.fit_head(
    small, (PIXELS[:5], ROWS[:5]), method="ridge", **RUN
  ).scores
  assert (one_each.examples, one_each.score) == (0, None)


def test_all_images_are_used_on_any_number_of_devices(small, tmp_path):
  """Also if they do not divide into batches."""
  data = (PIXELS[:50], ROWS[:50] % 5)
  features = features_of(small, PIXELS[:50])
  expected = closed_form.solve(closed_form.lda, features, data[1], 5)
  assert jax.device_count() > 1
  head = mv.fit_head(small, data, **RUN).task
  kernel = head.params["head"]["kernel"]
  np.testing.assert_allclose(
    kernel, expected.kernel, rtol=0, atol=1e-4 * abs(expected.kernel).max()
  )


@pytest.mark.parametrize(
  ("data", "options", "message"),
  [
    ((PIXELS[:4], ROWS[:4] % 2), {"class_names": ["a", "b", "c"]},
     r"have no image: 'c' \(1 of 3 classes\)"),
    ((PIXELS[:5], ROWS[:5]), {}, r"each class has only one image.*'?\"ridge\""),
    ((np.stack([PIXELS[0]] * 9), ROWS[:9] % 3), {}, "all images are the same"),
    ((PIXELS[ROWS[:8] % 2], ROWS[:8] % 2), {}, "all images have the same"),
    ((PIXELS[:8], [0] * 8), {}, "single class"),
    ((PIXELS[:1], [1.5]), {"kind": "values"}, "same for all|at least two"),
  ],
)  # fmt: skip
def test_what_cannot_be_solved_is_refused(small, data, options, message):
  with pytest.raises(DataError, match=message):
    mv.fit_head(small, data, **RUN, **options)


def test_features_that_are_not_finite_are_refused(small):
  params = dict(small.params)
  params["embedding"] = {
    **params["embedding"], "bias": params["embedding"]["bias"] * np.nan,
  }  # fmt: skip
  broken = dataclasses.replace(small, params=params)
  with pytest.raises(DataError, match="60 of 60 images are not finite"):
    mv.fit_head(broken, (PIXELS, ROWS % 5), **RUN)


@pytest.mark.parametrize(
  ("options", "key"),
  [
    ({"optim.mixup": 0.2}, "optim.mixup"),
    ({"optim.class_weights": "balanced"}, "optim.class_weights"),
    ({"optim.label_smoothing": 0.1}, "optim.label_smoothing"),
    ({"early_stopping": 2}, "early_stopping"),
    ({"total_steps": 5}, "total_steps"),
    ({"data.flip": True, "cache.crops": 4}, "cache.crops"),
    ({"data.train_crop": "small", "cache.crops": 4}, "cache.crops"),
    ({"cache.what": "none"}, "cache.what"),
    ({"regime": "probe"}, "regime"),
    ({"learning_rate": 0.3}, "learning_rate"),
    ({"sweep.learning_rate": (0.1, 1.0)}, "sweep.learning_rate"),
    ({"task.kind": "values"}, "'lda', which cannot solve a task of values"),
  ],
)
def test_options_of_optimizers_are_refused(options, key):
  config = mv.read_config("closed")
  with pytest.raises(ConfigError, match=key):
    config.replaced(options)


def test_every_option_of_the_optimizer_is_refused():
  """One that is added later must not be ignored."""
  config = mv.read_config("closed")
  changed = {float: 0.5, int: 7, str: None}
  for key, option in OPTIONS.items():
    if key.startswith("optim.") and key != "optim.name":
      value = changed[type(option.default)]
      if value is None:
        value = next(c for c in option.rule.names if c != option.default)
      with pytest.raises(ConfigError, match=key.split(".")[1]):
        config.replaced({key: value})


def config_of(backbone_file, **options):
  return mv.read_config("closed", {
    "backbone": str(backbone_file), "data.name": "digits",
    "data.train": "train[:200]", "data.test": "test[:50]",
    "batch_size": 64, "batch_size_eval": 64, "log_images": 0,
    "export_orbax": False, **options,
  })  # fmt: skip


def test_methods_are_swept_and_a_finished_run_stays(
  backbone_file, tmp_path, caplog
):
  caplog.set_level(logging.INFO)
  config = config_of(
    backbone_file,
    **{"sweep.overrides": ({"optim.name": "lda"}, {"optim.name": "ridge"}),
       "data.validation": "train[200:260]"},
  )  # fmt: skip
  result = mv.train_and_evaluate(config, tmp_path / "run")
  assert len(result.tasks) == 2
  assert result.tasks[0].val.score >= result.tasks[1].val.score > 0.3
  assert "shrinkage" in caplog.text
  assert "penalty" in caplog.text
  again = mv.train_and_evaluate(config, tmp_path / "run")
  assert again == result
  with pytest.raises(TrainingError, match="began with different"):
    mv.train_and_evaluate(
      config.replaced({"data.train": "train[:190]"}), tmp_path / "run"
    )
  sgd = {"optim.name": "sgd"}
  with pytest.raises(ConfigError, match="a run of their own"):
    mv.train_and_evaluate(
      config.replaced({"sweep.overrides": ({"optim.name": "lda"}, sgd)}),
      tmp_path / "other",
    )


def test_dry_run_solves_nothing(backbone_file, tmp_path, monkeypatch):
  monkeypatch.setattr(closed_form, "solve", None)
  config = config_of(backbone_file)
  assert "1 head in closed form" in dry_run.dry_run(config, tmp_path / "run")
  with pytest.raises(ConfigError, match="closed form"):
    topology_plan.plan(config, "v5e-1", classes=10, examples=200)


@pytest.mark.parametrize(
  "regime",
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in REGIMES
  ],
)
def test_training_begins_with_a_head(small, regime):
  """Step 0 has the head's logits, but for what other parts begin with."""
  data = (PIXELS, ROWS % 5)
  head = mv.fit_head(small, data, **RUN)
  options = {
    **RUN, "name": "next", "regime": regime, "init": head.task,
    "learning_rate": 1e-6, "epochs": 1, "validation": data,
  }  # fmt: skip
  if regime == "probe":
    with pytest.raises(ConfigError, match="reads other features"):
      mv.train_task(small, data, **options)
    return
  found = mv.train_task(small, data, **options)
  steps, accuracies = found.history["validation/top1"]
  assert steps[0] == 0
  expected = outputs_of(small, head.task)
  right = (expected.argmax(axis=1) == data[1]).mean()
  assert right > 0.4
  if "memory" in REGIMES[regime].trained:  # noise at first
    return
  # A masked token attends to the class token and to itself.
  tolerance = 0.15 if REGIMES[regime].has_token else 1e-6
  assert abs(accuracies[0] - right) <= tolerance


@pytest.mark.slow
def test_head_to_begin_with_must_suit(small, tmp_path):
  data = (PIXELS, ROWS % 5)
  options = {**RUN, "name": "next", "regime": "cls_masked", "epochs": 1}
  head = mv.fit_head(small, data, **RUN).task
  token = random_task(small, "token", classes=5)
  for init, more, message in (
    (token, {}, "expected a task of regime 'head'"),
    (head, {"options": {"task.cls_init": "normal"}}, "random class token"),
    (tmp_path / "none", {}, "none"),
  ):
    with pytest.raises(mv.MemoryVitError, match=message):
      mv.train_task(small, data, init=init, **options, **more)
  with pytest.raises(ConfigError, match="is a task of 5 classes.*has 4"):
    mv.train_task(small, (PIXELS, ROWS % 4), init=head, **options)
  pooled = tiny_backbone(depth=1, num_classes=0, class_tokens=0, pooling="gap")
  head = mv.fit_head(pooled, data, **RUN).task
  with pytest.raises(ConfigError, match="pooled patches"):
    mv.train_task(pooled, data, init=head, **options)
  mv.train_task(pooled, data, init=head, **{**options, "regime": "full"})


def test_step_0_is_kept_if_training_makes_nothing_better(small, tmp_path):
  """Also by a run that is resumed."""
  data = (PIXELS, ROWS % 5)
  head = mv.fit_head(small, data, **RUN).task
  mv.save_task(head, tmp_path / "head")
  options = {
    **RUN, "name": "next", "regime": "head", "init": tmp_path / "head",
    "learning_rate": 1e3, "epochs": 1, "validation": data,
    "workdir": tmp_path / "run",
  }  # fmt: skip
  found = mv.train_task(small, data, **options)
  assert found.trials[0].best_step == 0
  # Its loss is that of the calibrated probabilities.
  heat = head.spec.kind.temperature
  assert heat != 1
  for key, array in head.params["head"].items():
    np.testing.assert_array_equal(found.task.params["head"][key], array / heat)
  again = mv.train_task(small, data, **options)
  assert again.trials == found.trials
  np.testing.assert_array_equal(
    again.task.params["head"]["kernel"], found.task.params["head"]["kernel"]
  )
  other = mv.fit_head(small, data, method="ridge", **RUN).task
  with pytest.raises(TrainingError, match="different parents"):
    mv.train_task(small, data, **{**options, "init": other})


def test_values_begin_in_the_standard_deviations_of_their_own_run(small):
  """A held-out part changes mean and deviation of what is left."""
  values = ROWS**1.5 + 100.0
  data, other = (PIXELS, values), (PIXELS[:40], values[:40])
  head = mv.fit_head(small, data, kind="values", **RUN).task
  found = mv.train_task(
    small, other, **{**RUN, "name": "next"}, kind="values", regime="head",
    init=head, learning_rate=1e3, epochs=1, validation=data,
  )  # fmt: skip
  assert found.trials[0].best_step == 0
  assert found.task.spec.kind.mean != head.spec.kind.mean
  one, two = (
    task.spec.kind.activate(outputs_of(small, task))
    for task in (head, found.task)
  )
  np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-3)
  with pytest.raises(ConfigError, match="in the units"):
    mv.train_task(
      small, data, **{**RUN, "name": "next"}, kind="values", regime="head",
      init=head, options={"task.units": ("mm",)},
    )  # fmt: skip


def test_images_that_the_head_has_seen_are_warned_of(small, caplog):
  data, part = (PIXELS, ROWS % 5), (PIXELS[:10], ROWS[:10] % 5)
  options = {**RUN, "name": "next", "regime": "head", "learning_rate": 0.1}
  whole = mv.fit_head(small, data, **RUN).task
  mv.train_task(small, data, init=whole, epochs=1, **options)
  assert "validation flatters the first steps" in caplog.text
  caplog.clear()
  mv.train_task(small, data, init=whole, epochs=1, validation=part, **options)
  assert "flatters" not in caplog.text
  with pytest.raises(ConfigError, match="are both given"):
    mv.train_task(
      small, data, init=whole, options={"task.init": "x"}, **options
    )


@pytest.mark.slow
def test_run_that_is_stopped_in_the_evaluation_of_step_0_resumes(
  backbone_file, tmp_path, monkeypatch
):
  config = config_of(backbone_file, **{"data.validation": "train[200:260]"})
  mv.train_and_evaluate(config, tmp_path / "head")
  sgd = {
    "optim.name": "sgd", "total_steps": 4, "regime": "cls_masked",
    "cache.what": "contexts", "task.init": str(tmp_path / "head/tasks/digits"),
  }  # fmt: skip
  config = config.replaced(sgd)
  whole = mv.train_and_evaluate(config, tmp_path / "whole")
  real, stop = fit_lib.validate, StopSignal()

  def stopped(*given, **options):
    raise Interrupted(143, "stopped")

  monkeypatch.setattr(fit_lib, "validate", stopped)
  with pytest.raises(Interrupted):
    mv.train_and_evaluate(config, tmp_path / "run", stop)
  with pytest.raises(Interrupted):  # and again
    mv.train_and_evaluate(config, tmp_path / "run", stop)
  monkeypatch.setattr(fit_lib, "validate", real)
  found = mv.train_and_evaluate(config, tmp_path / "run")
  assert found.tasks[0].val == whole.tasks[0].val
  assert found.tasks[0].best_step == whole.tasks[0].best_step


def test_features_that_do_not_fit_into_memory_are_refused(small, monkeypatch):
  monkeypatch.setattr(closed_form_step, "_COPIES", 2**40)
  with pytest.raises(ConfigError, match="for 60 images of 32 features takes"):
    mv.fit_head(small, (PIXELS, ROWS % 5), **RUN)
