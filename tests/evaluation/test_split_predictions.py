"""Predictions of examples, and metrics of classes, against loops and hands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from fake_data import broken_source, numbered_source

import memory_vit as mv
from memory_vit.data import batching
from memory_vit.data.batching import eval_images
from memory_vit.errors import BrokenDataError, TaskError
from memory_vit.evaluation import evaluate
from memory_vit.kinds import class_sums as metrics
from memory_vit.kinds.class_metrics import class_metrics, split_metrics
from memory_vit.kinds.confusion import (
  Confusion,
  confusion_matrix,
  largest_confusions,
)
from memory_vit.kinds.predictions import SplitPredictions

PLAIN = mv.EvalPreprocessing(image_size=8)


def predictions_of(logits, labels, counted=None) -> SplitPredictions:
  logits = np.asarray(logits, np.float32)
  mask = np.ones(len(labels)) if counted is None else np.asarray(counted)
  rows = jax.jit(metrics.predict_examples)(
    jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(mask, jnp.float32)
  )
  arrays = {name: np.asarray(values) for name, values in rows.items()}
  found = SplitPredictions(num_classes=logits.shape[1], **arrays)
  return found.first(len(labels))


def sure(guesses, classes, confidence=0.9):
  """Logits of which the softmax gives a guess so much."""
  rest = (1 - confidence) / (classes - 1) if classes > 1 else 1
  logits = np.full((len(guesses), classes), np.log(rest))
  logits[np.arange(len(guesses)), guesses] = np.log(confidence)
  return logits


def metrics_of(predictions):
  return split_metrics(predictions, class_metrics(predictions))


def test_predictions_are_what_the_metrics_count():
  rng = np.random.default_rng(0)
  # Of few values, so that there are ties.
  logits = rng.integers(0, 4, (60, 9)).astype(np.float32)
  labels = rng.integers(0, 9, 60).astype(np.int32)
  mask = rng.integers(0, 2, 60).astype(np.float32)
  found = predictions_of(logits, labels, mask)
  sums = metrics.batch_sums(*map(jnp.asarray, (logits, labels, mask)))
  assert found.correct.sum() == sums["top1"]
  assert found.counted.sum() == sums["count"]
  some = found.counted
  assert found.loss[some].sum() == pytest.approx(float(sums["loss"]), rel=1e-5)
  whole = metrics_of(found)
  assert whole.top5.share == pytest.approx(float(sums["top5"] / sums["count"]))
  shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  order = np.argsort(-shares, axis=1, kind="stable")[:, :5]
  np.testing.assert_array_equal(found.top_classes, order)
  np.testing.assert_allclose(
    found.top_probabilities, np.take_along_axis(shares, order, 1), rtol=1e-5
  )
  right = np.eye(9)[labels]
  brier = ((shares - right) ** 2).sum(1)
  np.testing.assert_allclose(found.brier, brier, rtol=1e-4, atol=1e-6)


def test_mistakes_come_by_confidence():
  logits = np.concatenate(
    [sure([0], 3, 0.5), sure([1], 3, 0.9), sure([1, 2], 3, 0.7)]
  )
  found = predictions_of(logits, [1, 1, 0, 0])
  assert found.mistakes.tolist() == [2, 3, 0]  # of equal ones the first
  unread = predictions_of(logits, [1, 1, 0, 0], [1, 1, 0, 1])
  assert unread.mistakes.tolist() == [3, 0]


def test_metrics_by_hand():
  labels = [0, 0, 0, 1, 1, 2]
  guesses = [0, 0, 1, 1, 0, 1]
  found = predictions_of(sure(guesses, 4), labels)
  classes = class_metrics(found)
  assert classes.support.tolist() == [3, 2, 1, 0]
  assert classes.predicted.tolist() == [3, 3, 0, 0]
  nan = np.nan
  np.testing.assert_allclose(classes.precision, [2 / 3, 1 / 3, nan, nan])
  np.testing.assert_allclose(classes.recall, [2 / 3, 1 / 2, 0, nan])
  np.testing.assert_allclose(classes.f1, [2 / 3, 2 / 5, 0, nan])
  whole = split_metrics(found, classes)
  assert (whole.examples, whole.skipped, whole.not_finite) == (6, 0, 0)
  assert whole.top1.share == 0.5
  # Wilson: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).
  z, n = 1.959964, 6
  half = z * np.sqrt(0.25 / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
  assert whole.top1.low == pytest.approx(0.5 - half, rel=1e-5)
  assert whole.top1.high == pytest.approx(0.5 + half, rel=1e-5)
  assert whole.top5 is None
  assert whole.majority == 0.5
  assert whole.macro_f1 == pytest.approx((2 / 3 + 2 / 5 + 0) / 3)
  assert whole.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
  right, wrong = np.log(1 / 0.9), np.log(30)
  assert whole.loss == pytest.approx((right + wrong) / 2, rel=1e-5)
  assert whole.brier == pytest.approx(
    ((0.1**2 + 3 / 900) + (0.9**2 + (29 / 30) ** 2 + 2 / 900)) / 2, rel=1e-5
  )
  assert whole.calibration_error == pytest.approx(0.4, rel=1e-5)


def test_metrics_are_those_of_scikit_learn():
  rng = np.random.default_rng(1)
  labels = rng.integers(0, 6, 200).astype(np.int32)
  logits = rng.standard_normal((200, 6)) + 2 * np.eye(6)[labels]
  whole = metrics_of(predictions_of(logits, labels))
  guesses = logits.argmax(1)
  assert whole.macro_f1 == pytest.approx(
    sklearn.metrics.f1_score(labels, guesses, average="macro")
  )
  assert whole.balanced_accuracy == pytest.approx(
    sklearn.metrics.balanced_accuracy_score(labels, guesses)
  )
  matrix = confusion_matrix(predictions_of(logits, labels))
  np.testing.assert_array_equal(
    matrix.toarray(), sklearn.metrics.confusion_matrix(labels, guesses)
  )


def test_confusions_come_by_number():
  labels = [0, 0, 1, 1, 2, 2, 2, 2]
  guesses = [1, 1, 0, 1, 0, 0, 0, 2]
  matrix = confusion_matrix(predictions_of(sure(guesses, 3), labels))
  found = largest_confusions(matrix, 9)
  assert found == [Confusion(2, 0, 3), Confusion(0, 1, 2), Confusion(1, 0, 1)]
  assert largest_confusions(matrix, 2) == found[:2]


def test_metrics_of_only_hits_only_mistakes_and_one_class():
  right = metrics_of(predictions_of(sure([0, 1, 1], 2), [0, 1, 1]))
  assert (right.top1.share, right.macro_f1) == (1, 1)
  assert right.top1.low < 1 == right.top1.high
  found = predictions_of(sure([1, 0, 0], 2), [0, 1, 1])
  wrong = metrics_of(found)
  assert (wrong.top1.share, wrong.macro_f1, wrong.top1.low) == (0, 0, 0)
  assert len(found.mistakes) == 3
  only = predictions_of(np.zeros((4, 1)), [0] * 4)
  assert metrics_of(only).top1.share == 1
  assert metrics_of(only).calibration_error == 0
  assert confusion_matrix(only).toarray().tolist() == [[4]]


@pytest.mark.fault("non-finite-outputs")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_mistakes(value):
  """Also where the class that jax finds best among them is the right one."""
  logits = sure([0, 1, 0], 3)
  logits[2] = value
  found = predictions_of(logits, [0, 0, 0])
  assert found.correct.tolist() == [True, False, False]
  assert found.mistakes.tolist() == [1]  # it has no prediction
  whole = metrics_of(found)
  assert (whole.examples, whole.not_finite) == (3, 1)
  assert whole.top1.share == pytest.approx(1 / 3)
  assert whole.loss is whole.brier is whole.calibration_error is None
  # And so in the table that is printed.
  sums = metrics.batch_sums(
    jnp.asarray(logits), jnp.zeros(3, jnp.int32), jnp.ones(3)
  )
  assert sums["top1"] == found.correct.sum()
  classes = class_metrics(found)
  assert classes.recall[0] == pytest.approx(1 / 3)
  assert classes.predicted.tolist() == [1, 1, 0]
  assert confusion_matrix(found).toarray().sum() == 2


def test_predictions_of_a_split_stand_in_its_order(mesh):
  """What fills the last batch is left out, and what cannot be read counts not.

  The class that is predicted is seen in the picture.
  """
  source = broken_source(11, (3,), max_bad=1)
  images = eval_images(numbered_source(11), PLAIN, range(11))
  centres = jnp.asarray(images.reshape(11, -1))

  def predict(batch):
    rows = batch.reshape(len(batch), -1)
    return {"x": -((rows[:, None] - centres[None]) ** 2).sum(-1)}

  result = evaluate.evaluate_source(
    predict, source, PLAIN, batch_size=8, mesh=mesh, also=["predictions"]
  )["x"]
  found = result.predictions
  counted = [i for i in range(11) if i != 3]
  assert found.num_classes == len(found.label) == 11
  np.testing.assert_array_equal(np.flatnonzero(found.counted), counted)
  np.testing.assert_array_equal(found.label[counted], counted)
  np.testing.assert_array_equal(found.top_classes[counted, 0], counted)
  assert metrics_of(found).top1.share == result.scores.accuracy == 1
  assert metrics_of(found).skipped == result.scores.skipped == 1


@pytest.mark.slow
def test_predictions_may_be_of_one_output_alone(mesh):
  """Those of hundreds of tasks would fill the memory."""

  def predict(batch):
    rows = batch.reshape(len(batch), -1)
    return {"x": rows[:, :11], "y": rows[:, 11:22]}

  source = broken_source(11, (3,), max_bad=1)

  def found(**which):
    return evaluate.evaluate_source(
      predict, source, PLAIN, batch_size=8, mesh=mesh,
      also=["hits", "predictions"], **which,
    )  # fmt: skip

  every, one = found(), found(predictions_of="y")
  # Several are named by several names.
  several = found(predictions_of=("y", "xy"))
  assert several["x"].predictions is None
  assert several["y"].predictions is not None
  assert one["x"].predictions is None
  for name in ("x", "y"):
    assert one[name].scores.accuracy == every[name].scores.accuracy
    np.testing.assert_array_equal(one[name].hits.right, every[name].hits.right)
  np.testing.assert_array_equal(
    one["y"].predictions.top_classes, every["y"].predictions.top_classes
  )


def test_an_output_of_other_classes_is_refused(mesh):
  """Where a label is beyond the classes, the loss is none, and in silence."""
  source = broken_source(11, ())
  for classes in (10, 12):
    with pytest.raises(TaskError, match=rf"'x' has {classes} classes, .* 11"):
      evaluate.evaluate_source(
        lambda batch, c=classes: {"x": batch.reshape(len(batch), -1)[:, :c]},
        source, PLAIN, batch_size=8, mesh=mesh,
      )  # fmt: skip


def test_images_are_those_of_an_evaluation():
  source = numbered_source(6)
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  (batch,) = batching.eval_batches(source, central, batch_size=6)
  found = eval_images(source, central, np.array([4, 0, 4]))
  np.testing.assert_array_equal(found, batch["image"][[4, 0, 4]])
  assert eval_images(source, central, []).shape == (0, 8, 8, 3)
  broken = broken_source(6, (2,), max_bad=1)
  with pytest.raises(BrokenDataError, match="example 2 cannot be read"):
    eval_images(broken, central, [1, 2])


def test_confusions_of_many_classes_take_little_memory():
  """Of 21,000 classes the matrix would have 441 million cells."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 21_000, 1_000).astype(np.int32)
  one = np.zeros(1_000, np.float32)
  found = SplitPredictions(
    num_classes=21_000, label=labels, counted=one == 0, finite=one == 0,
    top_classes=np.stack([labels, *[labels * 0] * 4], 1), loss=one, brier=one,
    top_probabilities=np.ones((1_000, 5), np.float32), known_score=one,
  )  # fmt: skip
  assert confusion_matrix(found).nnz <= 1_000
  assert metrics_of(found).macro_f1 == 1
