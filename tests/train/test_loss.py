"""The loss of a head: against definitions written out here."""

import jax
import numpy as np
import pytest

from memory_vit.train.loss import (
  HeadClasses,
  Labels,
  Mixup,
  balanced_weights,
  loss_and_accuracy,
  mix,
)

LABELS = np.array([0, 1, 2, 2, 1, 2, 2, 2], np.int32)


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
  weights = balanced_weights(counts)
  # Over the data the mean weight is 1, and all classes have the same share.
  np.testing.assert_allclose(weights[LABELS].mean(), 1, rtol=1e-6)
  np.testing.assert_allclose(weights * counts, len(LABELS) / 3, rtol=1e-6)
  loss, _ = loss_and_accuracy(
    logits, LABELS, smoothing=0.0, classes=HeadClasses(weights=weights)
  )
  each = cross_entropy(logits, np.eye(3)[LABELS])
  of_classes = [each[c == LABELS].mean() for c in range(3)]
  np.testing.assert_allclose(loss, np.mean(of_classes), rtol=1e-5)


def test_a_class_without_examples_has_no_weight():
  assert balanced_weights(np.array([4, 0])).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_padding_changes_no_loss(logits, smoothing):
  """Nor its gradient, whatever the logits of what is no class."""
  padded = np.pad(logits, ((0, 0), (0, 5)), constant_values=7.0)
  is_class = np.arange(8) < 3

  def loss(logits, classes):
    return loss_and_accuracy(
      logits, LABELS, smoothing=smoothing, classes=classes
    )

  gradient = jax.grad(loss, has_aux=True)
  expected = *loss(logits, HeadClasses()), gradient(logits, HeadClasses())[0]
  found = (
    *loss(padded, HeadClasses(is_class)),
    gradient(padded, HeadClasses(is_class))[0],
  )
  np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-5)
  np.testing.assert_allclose(found[2][:, :3], expected[2], atol=1e-6)
  assert not np.any(found[2][:, 3:])


def test_mixed_labels_count_by_their_shares(logits):
  share = np.full(8, 0.7, np.float32)
  mixed = Labels(LABELS, np.roll(LABELS, 1), share)
  loss, right = loss_and_accuracy(
    logits, mixed, smoothing=0.0, classes=HeadClasses()
  )
  targets = 0.7 * np.eye(3)[LABELS] + 0.3 * np.eye(3)[np.roll(LABELS, 1)]
  expected = cross_entropy(logits, targets).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  greatest = logits.argmax(-1)
  expected = targets[np.arange(8), greatest].mean()
  np.testing.assert_allclose(right, expected, rtol=1e-5)


def test_mixup_follows_from_seed_and_step():
  image = np.random.default_rng(1).normal(size=(4, 2, 2, 3)).astype(np.float32)
  batch = {"image": image, "label": np.arange(4, dtype=np.int32)}
  shares = []
  for seed, step in [(0, 3), (0, 3), (0, 4), (1, 3)]:
    mixed = mix(batch, np.int32(step), Mixup(0.4, seed))
    first, second, share = mixed["label"]
    shares.append(float(share[0]))
    assert 0.5 <= share[0] < 1
    assert (share == share[0]).all()
    expected = (
      share[0] * image[np.asarray(first)]
      + (1 - share[0]) * image[np.asarray(second)]
    )
    np.testing.assert_allclose(mixed["image"], expected, rtol=1e-6)
  assert shares[0] == shares[1]
  assert len({*shares}) == 3
