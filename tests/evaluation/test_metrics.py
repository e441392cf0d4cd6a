import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory_vit.kinds import class_sums as metrics


def test_sums_equal_those_of_a_loop():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((40, 9)).astype(np.float32)
  labels = rng.integers(0, 8, 40).astype(np.int32)  # class 8 never comes
  mask = (np.arange(40) < 33).astype(np.float32)
  total = None
  for i in range(0, 40, 8):
    rows = (jnp.asarray(a[i : i + 8]) for a in (logits, labels, mask))
    total = metrics.add(total, metrics.batch_sums(*rows))
  evaluation = metrics.evaluation_of(total)
  found = evaluation.scores

  order = np.argsort(-logits, axis=1)
  right = order == labels[:, None]
  shifted = logits - logits.max(1, keepdims=True)
  log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
  losses = -log_p[np.arange(40), labels]
  assert found.examples == 33
  assert np.isclose(found.loss, losses[:33].mean(), rtol=1e-5)
  assert np.isclose(found.accuracy, right[:33, 0].mean())
  assert found.score == found.metrics["top1"] == found.accuracy
  assert np.isclose(found.top5, right[:33, :5].any(1).mean())
  assert evaluation.majority == np.bincount(labels[:33]).max() / 33
  for c in range(8):
    mine = labels[:33] == c
    assert np.isclose(found.per_class[c], right[:33, 0][mine].mean())
  assert found.per_class[8] is None


def test_top5_of_fewer_classes():
  sums = metrics.batch_sums(jnp.eye(3), jnp.array([0, 1, 0]), jnp.ones(3))
  found = metrics.evaluation_of(metrics.add(None, sums))
  assert np.isclose(found.scores.accuracy, 2 / 3)
  assert found.scores.top5 == 1.0
  assert found.majority == 2 / 3


@pytest.mark.parametrize("compiled", [True, False])
def test_first_of_equal_zeros_is_the_best_class(compiled):
  """As of all equal ones, and as `argmax` finds it in training."""
  logits = jnp.array([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-1.0, -0.0, 0.0]])
  labels, mask = jnp.array([0, 0, 1]), jnp.ones(3)
  assert (logits.argmax(-1) == labels).all()
  run = jax.jit if compiled else lambda function: function
  found = run(metrics.batch_sums)(logits, labels, mask)
  assert found["top1"] == 3
  hits = run(metrics.example_hits)(logits, labels, mask)
  assert hits.tolist() == [1, 1, 1]
  rows = run(metrics.predict_examples)(logits, labels, mask)
  assert rows["top_classes"].tolist() == [[0, 1, 2], [0, 1, 2], [1, 2, 0]]


def test_outputs_that_are_not_finite_are_mistakes_of_top1():
  """Of equal ones the first is the best, and so it is of what is no number."""
  logits = jnp.eye(3).at[0].set(jnp.nan).at[1, 2].set(jnp.inf)
  labels, mask = jnp.array([0, 2, 2]), jnp.ones(3)
  sums = metrics.batch_sums(logits, labels, mask)
  assert (sums["count"], sums["top1"], sums["top5"]) == (3, 1, 1)
  assert sums["not_finite"] == 2
  # Also for a wrong class, which leaves the loss finite by itself.
  sure = jnp.array([[1.0, -jnp.inf, 0.0]])
  sums_of_one = metrics.batch_sums(sure, jnp.array([0]), jnp.ones(1))
  found = metrics.evaluation_of(metrics.add(None, sums_of_one)).scores
  assert (found.not_finite, found.accuracy) == (1, 0)
  assert found.loss is None
  # What fills a batch is no example.
  padded = metrics.batch_sums(logits, labels, mask.at[0].set(0))
  assert padded["not_finite"] == 1
  whole = metrics.evaluation_of(metrics.add(None, sums))
  assert whole.scores.not_finite == 2
  assert sums["class_top1"].tolist() == [0, 0, 1]
  assert metrics.example_hits(logits, labels, mask).tolist() == [0, 0, 1]
