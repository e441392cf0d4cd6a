"""Which examples of a split are right: in order, and as they were written."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_device, random_task, tiny_backbone

from memory_vit.data import datasets
from memory_vit.errors import ConfigError
from memory_vit.evaluation import evaluate
from memory_vit.evaluation.hits import Hits, read_hits, write_hits
from memory_vit.kinds import class_sums as metrics


@pytest.mark.slow
def test_hits_are_what_top1_counts():
  rng = np.random.default_rng(0)
  # Of few values, so that there are ties.
  logits = jnp.asarray(rng.integers(0, 3, (50, 4)), jnp.float32)
  labels = jnp.asarray(rng.integers(0, 4, 50), jnp.int32)
  mask = jnp.asarray(rng.integers(0, 2, 50), jnp.float32)
  found = np.asarray(metrics.example_hits(logits, labels, mask))
  sums = metrics.batch_sums(logits, labels, mask)
  assert (found == 1).sum() == sums["top1"]
  assert (found >= 0).sum() == sums["count"]
  np.testing.assert_array_equal(found >= 0, np.asarray(mask) > 0)
  assert {*found.tolist()} == {-1, 0, 1}


@pytest.mark.slow
def test_hits_of_a_split_are_those_of_its_examples_in_order():
  """Whatever the size of a batch: what fills the last one is left out."""
  backbone = tiny_backbone(depth=1)
  source = datasets.open_split("digits:5-9", "test[:50]")
  task = random_task(
    backbone, "digits", classes=5, class_names=source.class_names
  )
  predict = evaluate.predict_fn(backbone, [task], one_device())
  found = {}
  for size in (16, 50):
    result = evaluate.evaluate_source(
      predict, source, task.spec.preprocessing, batch_size=size,
      mesh=one_device(), also=["hits"],
    )["digits"]  # fmt: skip
    hits = found[size] = result.hits
    assert hits.right.shape == hits.counted.shape == (source.size,)
    assert hits.right.mean() == pytest.approx(result.scores.accuracy)
    assert hits.counted.all()
  assert 0 < found[16].right.sum() < 50
  np.testing.assert_array_equal(found[16].right, found[50].right)


@pytest.mark.parametrize("count", [0, 1, 8, 13])
def test_hits_are_read_as_they_were_written(tmp_path, count):
  assert read_hits(tmp_path) is None
  rng = np.random.default_rng(count)
  hits = {
    name: Hits(*(rng.random((2, count)) < 0.5)) for name in ("a-00", "a-01")
  }
  write_hits(tmp_path, hits)
  found = read_hits(tmp_path)
  assert found.keys() == hits.keys()
  for name, one in hits.items():
    np.testing.assert_array_equal(found[name].right, one.right)
    np.testing.assert_array_equal(found[name].counted, one.counted)


@pytest.mark.fault("changed-run")
@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("examples", 17), ("examples", -1), ("examples", 10**12),
    ("examples", None), ("right", "zz"), ("right", "00"), ("counted", 7),
    ("counted", None),
  ],
)  # fmt: skip
def test_damaged_hits_are_refused(tmp_path, key, value):
  write_hits(tmp_path, {"a": Hits(*np.ones((2, 16), bool))})
  file = tmp_path / "hits.json"
  values = json.loads(file.read_text())
  values["a"][key] = value
  file.write_text(json.dumps(values))
  with pytest.raises(
    ConfigError, match=r"hits.json: the hits of 'a' cannot be read"
  ):
    read_hits(tmp_path)
