"""Temperatures and thresholds of unknown images: what is fitted, and where."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from conftest import one_device

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.kinds import (
  CLASSES,
  KINDS,
  class_sums,
  label_metrics,
  temperature,
)
from memory_vit.kinds.kind import Batch, HeldOut

LABELS = mv.TaskKind(name="labels")


def drawn(examples, classes, heat, seed=0):
  """Logits whose softmax at `heat` is the probability of each class."""
  rng = np.random.default_rng(seed)
  logits = 3 * rng.normal(size=(examples, classes)).astype(np.float32)
  chances = scipy.special.softmax(logits, axis=1)
  targets = np.array([rng.choice(classes, p=p / p.sum()) for p in chances])
  return HeldOut(np.float32(heat) * logits, targets)


@pytest.mark.parametrize("heat", [0.05, 0.5, 1.0, 4.0, 30.0])
def test_temperature_is_recovered(heat):
  found = temperature.of_classes(*drawn(4_000, 10, heat))
  assert found == pytest.approx(heat, rel=0.1)


@pytest.mark.parametrize("heat", [0.1, 1.0, 5.0])
def test_temperature_of_labels_is_recovered(heat):
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(4_000, 4)).astype(np.float32)
  labels = (rng.random(logits.shape) < scipy.special.expit(logits)) * 1.0
  found = temperature.of_labels(np.float32(heat) * logits, labels)
  assert found == pytest.approx(heat, rel=0.1)


def test_few_examples_leave_a_temperature_near_1():
  """The rule: examples * log-loss + 2 log(t)^2."""
  logits, targets = drawn(20, 10, 20.0)
  sizes = []
  for times in (1, 2, 10, 100):
    more = np.tile(logits, (times, 1)), np.tile(targets, times)
    sizes.append(math.log(temperature.of_classes(*more)))
  assert sizes == sorted(sizes)
  few = temperature.of_classes(logits[:1], targets[:1])
  assert abs(math.log(few)) < 0.5 * sizes[-1]


@pytest.mark.parametrize("right", [True, False])
def test_outputs_that_are_all_right_or_all_wrong_end_within_bounds(right):
  logits = np.eye(4, dtype=np.float32)[np.arange(400) % 4] * 5
  targets = (np.arange(400) + (not right)) % 4
  found = temperature.of_classes(logits, targets)
  assert temperature.LEAST <= found <= temperature.GREATEST
  assert (found < 1) == right
  huge = temperature.of_classes(logits * 1e30, targets)
  assert math.isfinite(huge)


def test_classes_keep_their_order_and_logits_their_values():
  held_out = drawn(300, 5, 6.0)
  kind = CLASSES.kind.fitted(CLASSES, held_out, 0.0)
  before, after = (k.activate(held_out.outputs) for k in (CLASSES, kind))
  assert kind.temperature > 3
  assert (before.argmax(axis=1) == after.argmax(axis=1)).all()
  expected = scipy.special.softmax(
    held_out.outputs.astype(np.float64) / kind.temperature, axis=1
  )
  np.testing.assert_allclose(after, expected, rtol=1e-5)
  assert after.max(axis=1).mean() < before.max(axis=1).mean()


def test_labels_that_are_chosen_do_not_depend_on_the_temperature():
  """Thresholds are chosen on the calibrated probabilities."""
  rng = np.random.default_rng(3)
  labels = (rng.random((200, 3)) < 0.3) * 1.0
  outputs = (labels + rng.normal(size=labels.shape)).astype(np.float32)
  held_out = HeldOut(outputs, labels)
  fitted = KINDS["labels"].fitted(LABELS, held_out, 0.0)
  assert fitted.temperature != 1
  counted = np.ones(len(labels), bool)
  plain = dataclasses.replace(
    LABELS,
    thresholds=label_metrics.evaluation_of_rows(
      LABELS, outputs, labels, counted
    ).thresholds,
  )
  chosen = [
    label_metrics.evaluation_of_rows(kind, outputs, labels, counted)
    .predictions.predicted_labels
    for kind in (plain, fitted)
  ]  # fmt: skip
  assert chosen[0].any()
  np.testing.assert_array_equal(*chosen)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.999])
def test_threshold_rejects_the_share_that_is_asked_for(share):
  held_out = drawn(1_000, 5, 1.0)
  kind = CLASSES.kind.fitted(CLASSES, held_out, share)
  columns = kind.rejection(held_out.outputs)
  np.testing.assert_array_equal(
    columns["known_score"], held_out.outputs.max(axis=1)
  )
  assert columns["unknown"].mean() == pytest.approx(share, abs=0.002)
  assert CLASSES.rejection(held_out.outputs) == {}


def test_answers_of_a_task_that_rejects_images_are_marked():
  outputs = np.array([[0.0, 4.0], [0.5, 0.0]])
  kind = mv.TaskKind(unknown=1.0)
  answers = kind.answers(("a", "b"), kind.activate(outputs))
  first, second = kind.marked(answers, outputs)
  assert list(first) == ["classes", "unknown", "known_score"]
  assert first["classes"] == answers[0]
  assert [first["unknown"], second["unknown"]] == [False, True]
  assert [first["known_score"], second["known_score"]] == [4.0, 0.5]
  rows = kind.kind.answer_rows
  assert rows(first) == rows(answers[0])
  assert rows(second) == [("unknown", ""), *rows(answers[1])]
  assert CLASSES.marked(answers, outputs) == answers


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"temperature": 0.0}, "temperature .* is 0.0, expected a finite number"),
    ({"temperature": math.inf}, "expected a finite number above 0"),
    ({"temperature": -2.0}, "expected a finite number above 0"),
    ({"unknown": math.nan}, "'unknown' of a task is nan"),
    ({"name": "labels", "unknown": 1.0}, "of labels cannot have unknown"),
    ({"name": "values", "mean": (0.0,), "std": (1.0,), "temperature": 2.0},
     "of values cannot have temperature"),
  ],
)  # fmt: skip
def test_impossible_numbers_are_refused(fields, message):
  with pytest.raises(TaskError, match=message):
    mv.TaskKind(**fields)


def test_exported_probabilities_are_compared_as_logits():
  """A difference of logits counts alike at any temperature."""
  kind = mv.TaskKind(temperature=5.0)
  outputs = np.array([[1.0, 0.0, -1.0]])
  found = kind.activate(outputs + [[0.01, 0.0, 0.0]])
  differences, _ = kind.kind.explained(kind, found, outputs)
  assert 0.002 < differences.max() <= 0.01


def state_of(outputs, targets, mask=None, also=("held_out",)):
  mask = jnp.asarray(mask or [1] * len(targets), jnp.float32)
  batch = Batch(jnp.asarray(outputs), jnp.asarray(targets), mask)
  return CLASSES.kind.state(CLASSES, batch, one_device(), also)


def test_rows_that_are_held_are_finite_and_few(monkeypatch):
  """Of more than `MOST_HELD_OUT`, every second, fourth, ... is held."""
  outputs = np.arange(40, dtype=np.float32).reshape(20, 2)
  outputs[3, 0] = np.nan
  targets = np.arange(20) % 2
  parts = [(outputs[i : i + 5], targets[i : i + 5]) for i in range(0, 20, 5)]
  mask = [1, 1, 1, 1, 0]
  state = functools.reduce(
    lambda one, other: one.merge(other),
    [state_of(*part, mask) for part in parts],
  )
  held = state.compute().held_out
  kept = [i for i in range(20) if i % 5 != 4 and i != 3]
  np.testing.assert_array_equal(held.outputs, outputs[kept])
  np.testing.assert_array_equal(held.targets, targets[kept])
  monkeypatch.setattr(class_sums, "MOST_HELD_OUT", 12)
  state = functools.reduce(
    lambda one, other: one.merge(other), [state_of(*part) for part in parts]
  )
  few = state.compute().held_out
  assert 2 <= len(few.targets) <= 6
  assert {*few.outputs[:, 1]} < {*outputs[:, 1]}
  assert state_of(*parts[0], also=()).compute().held_out is None


def test_an_output_that_is_not_finite_is_of_no_class():
  kind = mv.TaskKind(unknown=0.5)
  outputs = np.array([[np.nan, 1.0], [1.0, 0.0]])
  assert kind.rejection(outputs)["unknown"].tolist() == [True, False]


def test_huge_logits_have_a_calibration_error():
  """In float32 they overflow where they are divided first."""
  logits = jnp.asarray([[3e38, -3e38], [3e38, -3e38]], jnp.float32)
  rows = logits, jnp.asarray([0, 1]), jnp.ones(2)
  sums = class_sums.batch_sums(*rows, np.float32(0.5))
  found = class_sums.evaluation_of(class_sums.add(None, sums))
  assert found.scores.metrics["calibration_error"] == pytest.approx(0.5)
  predictions = class_sums.predict_examples(*rows, np.float32(0.5))
  assert predictions["finite"].all()
  assert predictions["top_classes"][:, 0].tolist() == [0, 0]


def test_average_precision_does_not_depend_on_the_temperature():
  """Probabilities of 1 are equal, their outputs are not."""
  rng = np.random.default_rng(0)
  outputs = rng.normal(size=(300, 2)).astype(np.float32)
  labels = (rng.random(outputs.shape) < scipy.special.expit(3 * outputs)) * 1.0
  counted = np.ones(len(labels), bool)
  scores = [
    label_metrics.evaluation_of_rows(
      mv.TaskKind(name="labels", temperature=t), outputs, labels, counted
    ).scores.score
    for t in (1.0, 0.001)
  ]
  assert scores[0] == scores[1]
