"""Interference: tasks with the memories of others beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import one_device, random_task, run_program, tiny_backbone
from fake_studies import small_study

import memory_vit as mv
from memory_vit.data import batching, datasets
from memory_vit.errors import MemoryVitError
from studies.paper import interference
from studies.paper import measured_interference as measured


@pytest.fixture
def study(backbone_file):
  return small_study(backbone_file)


def dense_logits(backbone, first, memories, images):
  """A ViT whose tokens all attend to all memories, block by block."""
  compiled = jax.jit(dense, static_argnums=0)
  p = backbone.params
  return compiled(backbone.config, p, first.params, memories, images)


def dense(config, p, task, memories, images):
  z = oracle.patches(p["embedding"], images, 2)
  cls = jnp.broadcast_to(task["cls"], (len(z), 1, z.shape[-1]))
  position = p["Transformer"]["posembed_input"]["pos_embedding"]
  z = jnp.concatenate([cls, z], 1) + position
  for i in range(config.depth):
    memory = jnp.concatenate([m[i] for m in memories])
    z = oracle.block(
      p["Transformer"][f"encoderblock_{i}"], z, memory,
      jnp.ones((z.shape[1], z.shape[1] + len(memory)), bool),
      memory_norm=np.ones(len(memory), bool), config=config,
    )  # fmt: skip
  z = oracle.layer_norm(p["Transformer"]["encoder_norm"], z, config)
  return oracle.dense(task["head"], z[:, 0])


def test_naive_memories_equal_the_dense_oracle(backbone, images):
  tasks = [
    random_task(backbone, f"t{i}", seed=i, cells=i + 1, regime="memory")
    for i in range(3)
  ]

  def logits(task):
    return run_program(backbone, [task], images)["t0"]

  alone = logits(tasks[0])
  assert np.array_equal(logits(measured.naive(tasks[0], [])), alone)
  found = logits(measured.naive(tasks[0], tasks[1:]))
  memories = [task.params["memory"] for task in tasks]
  expected = dense_logits(backbone, tasks[0], memories, images)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  assert not np.allclose(found, alone, atol=0.01)
  with pytest.raises(MemoryVitError, match="expected tasks of 'memory'"):
    measured.naive(tasks[0], [random_task(backbone, "m")])


@pytest.mark.slow
def test_measured_interference_equals_the_dense_oracle(study):
  backbone = tiny_backbone(num_classes=5, depth=1)
  source = datasets.open_split("digits:5-9", "test")
  options = {"batch_size": 192, "mesh": one_device()}
  naive = [
    random_task(backbone, f"t{i}", seed=i, classes=5, regime="memory", cells=6)
    for i in range(3)
  ]
  [batch] = batching.eval_batches(
    source, naive[0].spec.preprocessing, batch_size=192
  )
  memories = [task.params["memory"] for task in naive]
  logits = [
    np.asarray(dense_logits(backbone, naive[0], memories[:n], batch["image"]))
    for n in (1, 2, 3)
  ]
  # With all memories, no class has the largest logit for all images.
  bias = logits[2].mean(0)
  naive[0].params["head"]["bias"] = naive[0].params["head"]["bias"] - bias
  expected = [
    np.mean(((out - bias).argmax(-1) == batch["label"])[batch["mask"] > 0])
    for out in logits
  ]
  # Omitting any memory would be noticed.
  assert expected[2] not in expected[:2]
  found = measured.naive_accuracies(backbone, naive, source, **options)
  assert found == pytest.approx(expected)
  masked = [random_task(backbone, f"m{i}", seed=i, classes=5) for i in range(3)]
  accuracies = measured.masked_accuracies(backbone, masked, source, **options)
  assert [accuracy for accuracy, _ in accuracies] == [accuracies[0][0]] * 3
  assert accuracies[0][1] == 0
  assert max(difference for _, difference in accuracies) == 0
  rows = interference.section(study, [*found[:2], 0.1], accuracies).rows
  assert [row["paper, no mask"] for row in rows] == [0.5, 0.281, 0.278]
  assert rows[2]["difference, no mask"] == 0.1 - found[0]
  assert [row["difference, masked"] for row in rows] == [0, 0, 0]
  assert [row["largest difference of a logit"] for row in rows] == [0, 0, 0]
  # If one of the tasks diverged.
  lost = interference.section(study, (), ())
  assert not lost.rows
  assert "Not measured: a task diverged" in lost.notes[0]


@pytest.mark.slow
def test_largest_difference_over_all_batches_is_reported(backbone, monkeypatch):
  """The largest over all batches, for each number of slots."""
  masked = [random_task(backbone, f"m{i}", seed=i, classes=5) for i in range(3)]
  source = datasets.open_split("digits:5-9", "test")
  read, calls = mv.read, []

  def disturbed(backbone, slots, context):
    """By 2 in the first of four batches, with two others; by 1 in the next."""
    calls.append(len(slots.specs))
    logits = read(backbone, slots, context)
    by = {(1, 3): 2.0, (2, 3): 1.0, (2, 2): 0.5}
    return {
      name: values + by.get((-(-len(calls) // 3), len(slots.specs)), 0.0)
      for name, values in logits.items()
    }

  monkeypatch.setattr(mv, "read", disturbed)
  found = measured.masked_accuracies(
    backbone, masked, source, batch_size=48, mesh=one_device()
  )
  assert len(calls) == 4 * 3
  assert [difference for _, difference in found] == pytest.approx(
    [0.0, 0.5, 2.0], abs=1e-4
  )
