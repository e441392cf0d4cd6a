"""The loss of a head: against definitions written out here."""

import jax
import numpy as np
import pytest

from memory_vit.kinds import KINDS
from memory_vit.kinds.classes import MixedClasses
from memory_vit.kinds.kind import HeadOutputs
from memory_vit.train.loss import HeadLoss
from memory_vit.train.mix import Mixup, mix

LABELS = np.array([0, 1, 2, 2, 1, 2, 2, 2], np.int32)
CLASSES = HeadLoss()


@pytest.fixture
def logits():
  return np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def cross_entropy(logits, targets):
  """Of each row."""
  shifted = logits - logits.max(-1, keepdims=True)
  return -(targets * (shifted - np.log(np.exp(shifted).sum(-1))[:, None])).sum(
    -1
  )


def test_balanced_weights_make_classes_count_alike(logits):
  counts = np.bincount(LABELS)
  weights = KINDS["classes"].weights(counts, 0)
  # Over the data the mean weight is 1, and all classes have the same share.
  np.testing.assert_allclose(weights[LABELS].mean(), 1, rtol=1e-6)
  np.testing.assert_allclose(weights * counts, len(LABELS) / 3, rtol=1e-6)
  outputs = HeadOutputs(weights=weights)
  loss, _ = HeadLoss(weighted=True).of_batch(logits, LABELS, outputs)
  each = cross_entropy(logits, np.eye(3)[LABELS])
  of_classes = [each[c == LABELS].mean() for c in range(3)]
  np.testing.assert_allclose(loss, np.mean(of_classes), rtol=1e-5)
  # A trial of a sweep that weighs nothing has them at hand, too.
  loss, _ = CLASSES.of_batch(logits, LABELS, outputs)
  np.testing.assert_allclose(loss, each.mean(), rtol=1e-5)


def test_class_without_examples_has_weight_zero():
  assert KINDS["classes"].weights(np.array([4, 0]), 0).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_padding_changes_neither_loss_nor_gradient(logits, smoothing):
  """Nor its gradient, whatever the logits of what is no class."""
  padded = np.pad(logits, ((0, 0), (0, 5)), constant_values=7.0)
  is_class = np.arange(8) < 3
  head = HeadLoss(smoothing=smoothing)

  def loss(logits, outputs):
    return head.of_batch(logits, LABELS, outputs)

  gradient = jax.grad(loss, has_aux=True)
  expected = *loss(logits, HeadOutputs()), gradient(logits, HeadOutputs())[0]
  found = (
    *loss(padded, HeadOutputs(is_class)),
    gradient(padded, HeadOutputs(is_class))[0],
  )
  np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-5)
  np.testing.assert_allclose(found[2][:, :3], expected[2], atol=1e-6)
  assert not np.any(found[2][:, 3:])


def test_mixed_labels_are_weighted_by_their_shares(logits):
  share = np.full(8, 0.7, np.float32)
  mixed = MixedClasses(LABELS, np.roll(LABELS, 1), share)
  loss, right = CLASSES.of_batch(logits, mixed, HeadOutputs())
  targets = 0.7 * np.eye(3)[LABELS] + 0.3 * np.eye(3)[np.roll(LABELS, 1)]
  expected = cross_entropy(logits, targets).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  greatest = logits.argmax(-1)
  expected = targets[np.arange(8), greatest].mean()
  np.testing.assert_allclose(right, expected, rtol=1e-5)


# Three images and two labels; the probabilities are 4/5, 1/2, 1/5 and 1/2.
OUTPUTS = np.log([[4, 1], [0.25, 1], [4, 0.25]]).astype(np.float32)
HAS = np.array([[1, 0], [0, 1], [0, 0]], np.float32)


@pytest.mark.parametrize(
  ("options", "weights", "expected"),
  [
    ({}, None, np.log([5 / 4, 2, 5 / 4, 2, 5, 5 / 4]).mean()),
    # Two of three images lack each label: those that have it count twice.
    ({"weighted": True}, [2, 2],
     np.log([25 / 16, 2, 5 / 4, 4, 5, 5 / 4]).mean()),
    # A tenth of each target is the opposite one.
    ({"smoothing": 0.2}, None, np.mean(
      0.9 * np.log([5 / 4, 2, 5 / 4, 2, 5, 5 / 4])
      + 0.1 * np.log([5, 2, 5, 2, 5 / 4, 5])
    )),
  ],
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 2])
def test_loss_of_labels_equals_hand_computed(
  options, weights, expected, padding
):
  """Worked out by hand; outputs beyond the labels do not count."""
  if weights:
    weights = KINDS["labels"].weights(HAS.sum(axis=0), len(HAS))
    assert weights.tolist() == [2, 2]
  head = HeadLoss(kind="labels", **options)
  padded = np.pad(OUTPUTS, ((0, 0), (0, padding)), constant_values=np.inf)
  loss, right = head.of_batch(padded, HAS, HeadOutputs(weights=weights))
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  # Predicted from 1/2 on: one of the first, both of the second, ...
  assert right == np.float32(4 / 6)
  assert head.metric == "accuracy"


def test_label_of_all_or_no_examples_has_weight_one():
  assert KINDS["labels"].weights(np.array([0, 1, 4]), 4).tolist() == [1, 3, 1]


@pytest.mark.parametrize(
  # Errors of 1/2, 0, 3 and 2 standard deviations.
  ("huber", "expected"),
  [(False, (1 / 4 + 9 + 4) / 4), (True, (1 / 8 + 2.5 + 1.5) / 4)],
)
def test_loss_of_values_equals_hand_computed(huber, expected):
  """Worked out by hand, for standardized values."""
  values = np.array([[1, 3], [-2, -1]], np.float32)
  found = np.array([[1.5, 3, 99], [1, 1, 99]], np.float32)
  head = HeadLoss(kind="values", huber=huber)
  loss, error = head.of_batch(found, values, HeadOutputs())
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert (head.metric, error) == ("mae", 5.5 / 4)


@pytest.mark.parametrize("label", [
  np.arange(4, dtype=np.int32), np.arange(8, dtype=np.float32).reshape(4, 2),
], ids=["classes", "values"])  # fmt: skip
def test_mixup_depends_only_on_seed_and_step(label):
  image = np.random.default_rng(1).normal(size=(4, 2, 2, 3)).astype(np.float32)
  batch = {"image": image, "label": label}
  shares = []
  for seed, step in [(0, 3), (0, 3), (0, 4), (1, 3)]:
    mixed = mix(batch, np.int32(step), Mixup(0.4, seed))
    if label.ndim == 1:
      first, second, each = map(np.asarray, mixed["label"])
      share = each[0]
      assert (each == share).all()
    else:  # the values of an image and its neighbour differ by 2, or by 6
      share = np.float32(1 - (mixed["label"][0, 0] - 0) / 6)
      first, second = np.arange(4), np.roll(np.arange(4), 1)
      expected = share * label[first] + (1 - share) * label[second]
      np.testing.assert_allclose(mixed["label"], expected, atol=1e-5)
    shares.append(float(share))
    assert 0.5 <= share < 1
    expected = share * image[first] + (1 - share) * image[second]
    np.testing.assert_allclose(mixed["image"], expected, atol=1e-6)
  assert shares[0] == shares[1]
  assert len({*shares}) == 3
