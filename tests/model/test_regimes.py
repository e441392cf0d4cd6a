"""Regimes: what each trains, computes, and leaves unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
  edit_task,
  one_device,
  random_task,
  run_program,
  tiny_backbone,
)

import memory_vit as mv
from memory_vit.config import OptimConfig
from memory_vit.errors import ConfigError, TaskError
from memory_vit.model import trees
from memory_vit.model.backbone import backbone_shapes
from memory_vit.model.regimes import REGIMES, Regime
from memory_vit.tasks import split_forward
from memory_vit.train import step
from memory_vit.train.optim import make_optimizer, make_schedule

ADAPTERS = [name for name, r in REGIMES.items() if "adapters" in r.trained]
MEMORY = [name for name, r in REGIMES.items() if "memory" in r.trained]
TUNED = [name for name, r in REGIMES.items() if not r.composes]
# These train every part. Tests that compile a step for each regime run the
# others in the slow group.
QUICK = {
  "full", "probe", "memory_masked", "norms_layers_masked", "adapter_memory",
}  # fmt: skip
QUICK_REGIMES = [
  name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
  for name in REGIMES
]


def task_of(backbone, regime, *, seed=0, cells=2, start=False, **options):
  """A task in which no parameter is zero, or one before training."""
  options = {
    "cells": cells if regime in MEMORY else 0,
    "regime": regime,
    "bottleneck": 3 if "bottleneck" in REGIMES[regime].fields else 0,
    **options,
  }
  if start:
    return mv.init_task(
      jax.random.key(seed), backbone, name="a", num_classes=3, **options
    )
  return random_task(backbone, "a", seed=seed, **options)


def logits(backbone, task, images):
  return np.asarray(run_program(backbone, [task], images)["a"])


def with_head_of(task, other):
  """The same head, so that outputs can be compared."""
  params = {**task.params, "head": other.params["head"]}
  return dataclasses.replace(task, params=params)


@pytest.mark.parametrize("regime", REGIMES)
def test_parameters_of_a_task_are_those_of_its_regime(backbone, regime):
  task = task_of(backbone, regime)
  parts = set(REGIMES[regime].trained)
  if REGIMES[regime].has_token and regime not in MEMORY:  # of no cells
    assert task.params["memory"].shape == (2, 0, 32)
    parts.add("memory")
  assert set(task.params) == parts


@pytest.mark.parametrize(
  ("regime", "expected"),
  [
    # k classes, m = 5 cells: 768 k (and k biases), 768, 768 * 12 * m.
    ("head", 100 * 769),
    ("head_cls", 100 * 769 + 768),
    ("cls_masked", 100 * 769 + 768),
    ("memory", 100 * 769 + 768 + 768 * 12 * 5),
    ("memory_masked", 100 * 769 + 768 + 768 * 12 * 5),
    ("memory_additive", 100 * 769 + 768 + 768 * 12 * 5),
    # Scale and bias of 25 LayerNorms: fewer parameters than 5 cells.
    ("norms_masked", 100 * 769 + 768 + 768 * 25 * 2),
    # A vector for each layer, beside LayerNorms.
    ("layers_masked", 100 * 769 + 768 + 768 * 12),
    ("norms_layers_masked", 100 * 769 + 768 + 768 * (25 * 2 + 12)),
    # Width 16: from 1536 and to 2 times 768 in each of 12 layers, and mixing.
    (
      "side_masked",
      100 * 769 + 768 + 768 * (25 * 2 + 12) + 12 * (16 * 3073 + 1280),
    ),
    ("memory_propagated", 100 * 769 + 768 + 768 * 5),
    # Two adapters in each of 12 blocks: 768 to 5 to 768, with biases.
    ("adapter", 100 * 769 + 768 + 12 * 2 * (2 * 768 * 5 + 5 + 768)),
    # 8 queries with a bias for each of 24 tokens; scales, 768 to 5 to 768.
    ("probe", 100 * 769 + 8 * (768 + 24) + 24 * 768 * (1 + 2 * 5)),
    # The published B/32, without its head and the layer before it.
    ("full", 100 * 769 + 87_455_232),
  ],
)
def test_counts_of_parameters_are_the_papers(regime, expected):
  config = mv.vit_config("B/32")
  shapes = backbone_shapes(config)
  backbone = mv.Backbone(config, shapes, "0" * 64)
  options = {
    "num_classes": 100,
    "cells": 5 if regime in MEMORY else 0,
    "bottleneck": 5 if "bottleneck" in REGIMES[regime].fields else 0,
  }

  def params(key):
    task = mv.init_task(
      key, backbone, name="a", regime=regime, cls_init="normal", **options
    )
    return {k: v for k, v in task.params.items() if k != "backbone"}

  found = trees.count(jax.eval_shape(params, jax.random.key(0)))
  if regime == "full":
    found += trees.count(shapes)
  assert found == expected


def test_memory_of_no_cells_is_head_cls(backbone, images):
  plain = task_of(backbone, "head_cls")
  expected = logits(backbone, plain, images)
  for regime in ("memory", "memory_propagated", "memory_additive"):
    task = task_of(backbone, regime, cells=0)
    task = with_head_of(task, plain)
    task.params["cls"] = plain.params["cls"]
    close(logits(backbone, task, images), expected)


def test_masked_memory_of_no_cells_is_cls_masked(backbone, images):
  masked = task_of(backbone, "cls_masked")
  spec = dataclasses.replace(masked.spec, regime="memory_masked")
  expected = logits(backbone, masked, images)
  found = logits(backbone, mv.Task(spec, masked.params), images)
  assert np.array_equal(found, expected)
  # It is served like any masked task.
  close(mv.forward(backbone, [masked], images)["a"], expected)


@pytest.mark.parametrize(
  ("regime", "array"),
  [
    ("norms_masked", "norms/bias"),
    ("layers_masked", "layers"),
    ("norms_layers_masked", "layers"),
  ],
)
def test_parts_of_the_token_start_without_effect(
  backbone, images, tmp_path, regime, array
):
  """Own LayerNorms and weights of layers start without any effect."""
  plain = task_of(backbone, "cls_masked")
  task = with_head_of(task_of(backbone, regime, start=True), plain)
  task.params["cls"] = plain.params["cls"]
  expected = logits(backbone, plain, images)
  close(logits(backbone, task, images), expected)
  moved = task_of(backbone, regime)
  moved.params.update(cls=plain.params["cls"], head=plain.params["head"])
  found = logits(backbone, moved, images)
  assert np.abs(found - expected).max() > 0.1
  # In slots, also after it was saved.
  mv.save_task(moved, tmp_path / "a")
  loaded = mv.load_task(tmp_path / "a", backbone)
  assert loaded.digest == moved.digest
  close(mv.forward(backbone, [loaded], images)["a"], found)
  rows = len(trees.flatten(moved.params)[array])
  edit_task(tmp_path / "a", lambda m: m["arrays"][array].update(shape=[9, 32]))
  with pytest.raises(
    TaskError, match=rf"{array}: \(9, 32\), expected \({rows}"
  ):
    mv.load_task(tmp_path / "a", backbone)


def test_a_readout_of_layers_is_not_read_by_other_tasks(backbone, images):
  """A child attends to the keys and values of its parent's token as before."""
  parent = task_of(backbone, "layers_masked")
  params = {**parent.params, "layers": -parent.params["layers"]}
  child = random_task(backbone, "child", seed=1, attends_to=("a",))
  found = mv.forward(backbone, [parent, child], images)
  other = mv.forward(backbone, [mv.Task(parent.spec, params), child], images)
  assert not np.allclose(found["a"], other["a"])
  assert np.array_equal(found["child"], other["child"])


def test_regimes_that_share_parts_begin_alike(backbone):
  """With the same seed, shared parts have the same initial values."""
  tasks = [
    task_of(backbone, name, start=True)
    for name in ("cls_masked", "norms_layers_masked")
  ]
  assert np.array_equal(*(task.params["cls"] for task in tasks))


@pytest.mark.parametrize("regime", ADAPTERS)
def test_adapters_start_without_effect(backbone, images, regime):
  task = task_of(backbone, regime, start=True)
  other = task_of(
    backbone, {"adapter": "head_cls", "adapter_memory": "memory"}[regime]
  )
  task = with_head_of(task, other)
  plain = {k: v for k, v in task.params.items() if k != "adapters"}
  found = logits(backbone, task, images)
  close(found, logits(backbone, mv.Task(other.spec, plain), images))
  assert np.any(task.params["adapters"]["mlp"]["down"]["kernel"])


def test_new_task_computes_as_the_backbone(backbone, images):
  """A new class token is a copy of the old one: all attend to the same."""
  headless = dataclasses.replace(
    backbone, config=split_forward.headless(backbone.config)
  )
  features = np.asarray(mv.encode(headless, images)[0])
  head = random_task(backbone, "a").params["head"]
  expected = features @ head["kernel"] + head["bias"]
  for regime in ("head", "head_cls", "full"):
    task = task_of(backbone, regime, start=True)
    task.params["head"] = head
    close(logits(backbone, task, images), expected)


def test_adapters_start_with_different_weights(backbone):
  """After attention and after the MLP, in every layer: random and different."""
  task = task_of(backbone, "adapter", start=True)
  kernels = np.concatenate(
    [
      np.asarray(task.params["adapters"][place]["down"]["kernel"])
      for place in ("attention", "mlp")
    ]
  ).reshape(4, -1)
  alike = np.corrcoef(kernels) - np.eye(4)
  assert np.abs(alike).max() < 5 / np.sqrt(kernels.shape[1])
  # lecun_normal for each: scaled by the width of its input.
  np.testing.assert_allclose(kernels.std(1), 32**-0.5, rtol=0.3)


@pytest.mark.parametrize("regime", sorted({*MEMORY, *ADAPTERS} & {*TUNED}))
def test_regimes_equal_the_dense_oracle(backbone, images, regime):
  """Logits and gradients, with no parameter at its initial value."""
  task = task_of(backbone, regime, memory_norm=regime != "memory")
  spec, attention = task.spec, REGIMES[regime].attention

  def dense(task):
    p, d = backbone.params, 32
    z = oracle.patches(p["embedding"], images, 2)
    cls = jnp.broadcast_to(task["cls"], (len(z), 1, d))
    position = p["Transformer"]["posembed_input"]["pos_embedding"]
    z = jnp.concatenate([cls, z], 1) + position
    n = z.shape[1]
    for i in range(backbone.config.depth):
      memory = jnp.zeros((0, d))
      if attention == "memory":
        memory = task["memory"][i]
      elif attention == "additive" and i:
        z = jnp.concatenate([z[:, :n], z[:, n:] + task["memory"][i][None]], 1)
      elif i == 0 and attention != "plain":
        first = jnp.broadcast_to(task["memory"][0], (len(z), 2, d))
        z = jnp.concatenate([z, first], 1)
      z = dense_block(
        p["Transformer"][f"encoderblock_{i}"], z, memory,
        [spec.memory_norm] * len(memory), task.get("adapters"), i,
        backbone.config,
      )  # fmt: skip
    z = oracle.layer_norm(p["Transformer"]["encoder_norm"], z, backbone.config)
    return oracle.dense(task["head"], z[:, 0])

  def ours(params):
    cut = split_forward.make_split_forward(backbone.config, (spec,))
    frozen = {"backbone": backbone.params, "tasks": {}}
    return cut.logits({"a": params}, frozen, images)["a"]

  def loss(function, params):
    out = function(params)
    return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

  run = jax.jit(
    jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=0
  )
  (_, found), found_grad = run(ours, task.params)
  (_, expected), expected_grad = run(dense, task.params)
  close(found, expected)
  jax.tree.map(close, found_grad, expected_grad)


def dense_block(p, z, memory, norm, adapters, i, config):
  """`oracle.block`, with adapters."""
  if adapters is None:
    mask = jnp.ones((z.shape[1], z.shape[1] + len(memory)), bool)
    return oracle.block(
      p, z, memory, mask, memory_norm=np.array(norm, bool), config=config
    )

  def adapt(a, y):
    a = jax.tree.map(lambda leaf: leaf[i], a)
    return y + oracle.dense(a["up"], jax.nn.gelu(oracle.dense(a["down"], y)))

  mask = jnp.ones((z.shape[1], z.shape[1] + len(memory)), bool)
  norm = np.array(norm, bool)
  # Attention alone: the MLP of the block gives zero.
  silent = jax.tree.map(jnp.zeros_like, p["MlpBlock_0"])
  attended = oracle.block(
    {**p, "MlpBlock_0": silent},
    z,
    memory,
    mask,
    memory_norm=norm,
    config=config,
  )
  z = z + adapt(adapters["attention"], attended - z)
  m = p["MlpBlock_0"]
  y = oracle.layer_norm(p["LayerNorm_1"], z, config)
  y = oracle.dense(m["Dense_1"], jax.nn.gelu(oracle.dense(m["Dense_0"], y)))
  return z + adapt(adapters["mlp"], y)


def close(found, expected):
  scale = float(np.abs(expected).max()) if np.size(expected) else 1.0
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * scale)


@pytest.mark.fault("frozen-backbone")
@pytest.mark.parametrize("regime", QUICK_REGIMES)
def test_a_step_changes_what_is_trained_and_nothing_else(images, regime):
  backbone = tiny_backbone(depth=1)
  task, mesh = task_of(backbone, regime), one_device()
  config = OptimConfig(warmup=0.0, schedule="constant")
  rates = {"a": make_schedule(config, 0.1, 10)}
  optimizer = make_optimizer({"a": config}, rates)
  cut = split_forward.make_split_forward(backbone.config, (task.spec,))
  step_fn = step.Step(cut, optimizer, mesh)
  state = step_fn.create_state({"a": task.params})
  # Momentum of trained parameters alone, no state for frozen ones.
  slots = [x for x in jax.tree.leaves(state.opt_state) if np.ndim(x)]
  assert sum(x.size for x in slots) == trees.count(task.params)
  before = jax.device_get(backbone.params)
  rows = {"image": images, "label": np.arange(8, dtype=np.int32) % 3}
  frozen = {"backbone": backbone.params, "tasks": {}}
  state, first = step_fn(state, frozen, rows)
  # The clipped norm is of the gradient of trained parameters.
  assert first["a"]["grad_norm"] > 0
  after = trees.flatten(jax.device_get(state.params["a"]))
  for name, value in trees.flatten(task.params).items():
    # A bias on keys shifts all scores of a query alike: its gradient is zero.
    if value.size and not name.endswith("key/bias"):
      assert not np.array_equal(after[name], value), name
  jax.tree.map(np.testing.assert_array_equal, backbone.params, before)


@pytest.mark.parametrize("regime", TUNED)
def test_other_regimes_do_not_compose(backbone, images, regime, tmp_path):
  task = task_of(backbone, regime)
  other = random_task(backbone, "other")
  does = "reads all layers of the" if regime == "probe" else "changes what the"
  for tasks in ([task], [task, other]):
    with pytest.raises(
      TaskError,
      match=f"has the regime '{regime}', which {does} backbone.*: it cannot "
      "share a pass. Give it alone to mv.Predictor, predict, evaluate, serve ",
    ):
      mv.forward(backbone, tasks, images)
  with pytest.raises(TaskError, match="cannot share a pass"):
    mv.concatenate(other, task)
  with pytest.raises(TaskError, match="cannot share a pass"):
    split_forward.make_split_forward(backbone.config, (other.spec, task.spec))
  mv.save_task(task, tmp_path / "a")
  loaded = mv.load_task(tmp_path / "a", backbone)
  assert loaded.spec == task.spec
  assert loaded.digest == task.digest
  assert np.array_equal(
    logits(backbone, loaded, images), logits(backbone, task, images)
  )


def test_propagated_memory_has_one_layer_and_other_parts_all(
  backbone, monkeypatch
):
  trained = ("head", "cls", "memory", "adapters")
  monkeypatch.setitem(REGIMES, "both", Regime(trained, "propagated"))
  task = random_task(backbone, "a", regime="both", cells=2, bottleneck=3)
  depth = backbone.config.depth
  assert depth > 1
  assert task.params["memory"].shape[0] == 1
  assert task.params["adapters"]["mlp"]["down"]["bias"].shape == (depth, 3)


def test_unusable_regimes_are_refused(backbone):
  with pytest.raises(TaskError, match=r"cells is 2, which .* expected 0\."):
    random_task(backbone, "a", regime="head", cells=2)
  with pytest.raises(
    TaskError, match="bottleneck is 3, which this regime does"
  ):
    random_task(backbone, "a", bottleneck=3)
  with pytest.raises(TaskError, match="bottleneck is 0, expected at least 1"):
    random_task(backbone, "a", regime="adapter", cells=0)
  with pytest.raises(ConfigError, match="regime is 'lora', expected one of"):
    random_task(backbone, "a", regime="lora")


@pytest.mark.parametrize(
  "regime", ["memory", "memory_propagated", "memory_additive", "adapter"]
)
def test_regimes_that_change_the_backbone_run_in_bfloat16(images, regime):
  found = []
  for dtype in ("float32", "bfloat16"):
    backbone = tiny_backbone(dtype=dtype)
    found.append(logits(backbone, task_of(backbone, regime), images))
  np.testing.assert_allclose(found[1], found[0], atol=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masked_tasks_leave_the_outputs_and_others_do_not(images, dtype):
  """The point of the mask, on the model itself."""
  backbone = tiny_backbone(dtype=dtype)
  task = task_of(backbone, "cls_masked")
  alone = mv.forward(backbone, [], images)["backbone"]
  out = mv.forward(backbone, [task], images)["backbone"]
  assert np.array_equal(out, alone)
