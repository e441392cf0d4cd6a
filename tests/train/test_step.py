"""One optimiser step: on meshes, in parts, and what it leaves alone."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_device, random_task, tiny_backbone
from steps import assert_close, batch, setting

import memory_vit as mv
from memory_vit.config import OptimConfig
from memory_vit.model import trees
from memory_vit.runtime import sharding
from memory_vit.tasks import inference
from memory_vit.tasks.split_forward import SplitForward
from memory_vit.train.optim import make_optimizer, make_schedule
from memory_vit.train.step import Step


@pytest.fixture(scope="module")
def backbone():
  """One block: a step does not look into it."""
  return tiny_backbone(depth=1)


def train(backbone, images, mesh, tasks, steps=3, **options):
  step_fn, state, frozen = setting(backbone, mesh, tasks, **options)
  for _ in range(steps):
    state, metrics = step_fn(state, frozen, batch(images, mesh))
  return jax.device_get(state), jax.device_get(metrics)


def test_training_lowers_the_loss(backbone, images, mesh):
  task = random_task(backbone, "a")
  _, first = train(backbone, images, mesh, [task], steps=1)
  state, last = train(backbone, images, mesh, [task], steps=12)
  assert state.step == 12
  assert last["a"]["loss"] < first["a"]["loss"] - 0.05
  assert set(last["a"]) == {
    "loss", "accuracy", "grad_norm", "param_norm", "skipped", "learning_rate",
  }  # fmt: skip
  # As the parameters are after the step, beside the accuracy before it.
  norm = np.sqrt(sum(np.sum(a**2) for a in jax.tree.leaves(state.params["a"])))
  np.testing.assert_allclose(last["a"]["param_norm"], norm, rtol=1e-6)
  for name, before in trees.flatten(task.params).items():
    after = trees.flatten(state.params["a"])[name]
    assert not np.array_equal(after, before), name


def test_the_learning_rate_of_a_step_is_the_optimizers(images, mesh):
  """Shown before warm-up has ended, and applied: one parameter, no momentum."""
  config = OptimConfig(warmup_steps=4, momentum=0.0, grad_clip=0.0)
  schedule = make_schedule(config, 0.8, 10)
  forward = SplitForward(
    lambda frozen, images: images,
    lambda trained, frozen, images: {
      "a": images + trained["a"]["head"]["bias"][None]
    },
  )
  optimizer = make_optimizer({"a": config}, {"a": schedule})
  step_fn = Step(forward, optimizer, mesh, schedules={"a": schedule})
  state = step_fn.create_state(
    {"a": {"head": {"bias": np.zeros(3, np.float32)}}}
  )
  rows = {"image": np.zeros((8, 3), np.float32), "label": np.zeros(8, np.int32)}
  for i in range(6):
    before = np.asarray(state.params["a"]["head"]["bias"])
    state, metrics = step_fn(state, {}, sharding.shard_batch(rows, mesh))
    rate = float(metrics["a"]["learning_rate"])
    assert rate == pytest.approx(float(schedule(i)), rel=1e-6)
    moved = np.linalg.norm(
      np.asarray(state.params["a"]["head"]["bias"]) - before
    )
    assert moved == pytest.approx(rate * float(metrics["a"]["grad_norm"]), 1e-3)


def test_a_step_is_announced_before_it_is_compiled(
  backbone, images, caplog, monkeypatch
):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  # No other test has a step of this name.
  task = random_task(backbone, "announced")
  with caplog.at_level("INFO", logger="memory_vit"):
    train(backbone, images, one_device(), [task])
  [line] = caplog.messages
  assert line.startswith("compiling a training step: ")


def test_8_devices_train_to_the_same_parameters_as_1(backbone, images):
  tasks = [random_task(backbone, "a")]
  one, _ = train(backbone, images, one_device(), tasks)
  eight, _ = train(backbone, images, sharding.make_mesh(), tasks)
  assert_close(eight.params, one.params)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "parts"), [(1, 2), (8, 4)])
def test_accumulation_equals_the_whole_batch(backbone, images, devices, parts):
  tasks = [random_task(backbone, "a")]
  mesh = sharding.make_mesh(jax.devices()[:devices])
  whole, m1 = train(backbone, images, mesh, tasks)
  in_parts, m2 = train(backbone, images, mesh, tasks, parts=parts)
  assert_close(in_parts.params, whole.params)
  assert_close(m2, m1)


def test_task_trains_the_same_beside_another_task(backbone, images):
  a, b = random_task(backbone, "a", seed=1), random_task(backbone, "b", seed=2)
  both, _ = train(backbone, images, one_device(), [a, b])
  alone, _ = train(backbone, images, one_device(), [a])
  assert_close(both.params["a"], alone.params["a"])


def test_gradient_equals_that_of_the_written_out_loss(backbone, images):
  """Against a loss written out here, with smoothed labels."""
  task = random_task(backbone, "a")
  mesh = one_device()
  step_fn, state, frozen = setting(backbone, mesh, [task], smoothing=0.2)
  rows = batch(images, mesh)
  found, metrics = step_fn.gradient(state.params, frozen, rows)

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    out = inference.MemoryViT(backbone.config, (task.spec,)).apply(
      {"params": {"backbone": backbone.params, "tasks": params}}, rows["image"]
    )
    targets = 0.8 * jnp.eye(3)[rows["label"]] + 0.2 / 3
    return -(targets * jax.nn.log_softmax(out["a"])).sum(-1).mean()

  expected, gradient = loss({"a": task.params})
  assert_close(found, gradient)
  np.testing.assert_allclose(metrics["a"]["loss"], expected, rtol=1e-5)


def test_accuracy_is_that_of_the_largest_logit(backbone, images):
  """Labels are the predictions for three images of four, and wrong for one."""
  task, mesh = random_task(backbone, "a"), one_device()
  step_fn, state, frozen = setting(backbone, mesh, [task])
  rows = batch(images, mesh)
  logits = mv.forward(backbone, [task], rows["image"])["a"]
  greatest = np.asarray(logits).argmax(-1).astype(np.int32)
  wrong = np.arange(len(greatest)) % 4 == 0
  rows["label"] = jnp.asarray(np.where(wrong, (greatest + 1) % 3, greatest))
  _, metrics = step_fn.gradient(state.params, frozen, rows)
  assert metrics["a"]["accuracy"] == 0.75


def test_parents_are_attended_to_but_not_trained(backbone, images):
  parent = random_task(backbone, "parent", seed=5)
  child = random_task(backbone, "child", attends_to=("parent",))
  mesh = one_device()
  step_fn, state, frozen = setting(backbone, mesh, [child], [parent])
  assert set(state.params) == {"child"}
  _, metrics = step_fn(state, frozen, batch(images, mesh))
  assert set(metrics) == {"child"}

  other = random_task(backbone, "parent", seed=6)
  step_fn, state, frozen = setting(backbone, mesh, [child], [other])
  _, changed = step_fn(state, frozen, batch(images, mesh))
  assert metrics["child"]["loss"] != changed["child"]["loss"]


def test_gradient_program_omits_the_backward_pass_of_the_backbone(
  backbone, images
):
  """The program that has the gradient holds none of the big products."""
  task = random_task(backbone, "a")
  step_fn, state, frozen = setting(backbone, one_device(), [task])
  _, context = mv.encode(backbone, images)
  gradient = step_fn.gradient_program.lower(
    state.params, frozen, context, jnp.zeros(len(images), jnp.int32)
  )
  flops = gradient.compile().cost_analysis()["flops"]
  forward = inference.encode_program.compiled.lower(
    backbone.params, images, config=backbone.config, piece=None
  )
  forward_flops = forward.compile().cost_analysis()["flops"]
  # One token and two cells, forward and back, of 17 tokens forward.
  assert flops < 0.5 * forward_flops


def test_full_regime_trains_every_parameter(images):
  backbone = tiny_backbone(depth=1)
  task = random_task(backbone, "a", regime="full", cells=0)
  state, _ = train(backbone, images, one_device(), [task], steps=1)
  after = trees.flatten(state.params["a"])
  for name, before in trees.flatten(task.params).items():
    # A bias on keys shifts all scores of a query alike: its gradient is zero.
    if not name.endswith("key/bias"):
      assert not np.array_equal(after[name], before), name


def test_first_step_changes_only_the_head(backbone, images):
  """The head starts at zero, so nothing flows through it yet."""
  task = random_task(backbone, "a")
  head = jax.tree.map(np.zeros_like, task.params["head"])
  task = dataclasses.replace(task, params={**task.params, "head": head})
  state, _ = train(backbone, images, one_device(), [task], steps=1)
  after = state.params["a"]
  assert np.array_equal(after["cls"], task.params["cls"])
  assert np.array_equal(after["memory"], task.params["memory"])
  assert np.any(after["head"]["kernel"])


def of(state, name):
  """The arrays of a task: its parameters and its optimiser state."""
  state = jax.device_get(state)
  return jax.tree.leaves(
    (state.params[name], state.opt_state.inner_states[name])
  )


def assert_equal(a, b):
  assert len(a) == len(b) > 0
  for x, y in zip(a, b, strict=True):
    assert np.array_equal(x, y)


@pytest.mark.fault("non-finite-update")
@pytest.mark.parametrize("where", ["image", "parameters", "learning rate"])
def test_non_finite_update_is_skipped_for_its_task_alone(
  backbone, images, where
):
  """Of the name that it belongs to, to the bit; the step counts."""
  mesh, rows = one_device(), batch(images, one_device())
  tasks = [random_task(backbone, n, seed=i) for i, n in enumerate("ab")]
  step_fn, state, frozen = setting(backbone, mesh, tasks)
  other, other_state, _ = setting(backbone, mesh, tasks)
  state, _ = step_fn(state, frozen, rows)
  other_state, _ = other(other_state, frozen, rows)
  if where == "image":
    rows = {**rows, "image": rows["image"].at[3, 0, 0, 0].set(jnp.inf)}
  elif where == "parameters":
    state.params["a"]["cls"] = state.params["a"]["cls"].at[0].set(jnp.nan)
  else:  # the gradient is finite, what comes of it is not
    huge = jax.tree.map(lambda x: x * 1e38, other_state.opt_state)
    huge.inner_states["b"] = other_state.opt_state.inner_states["b"]
    state = state.replace(opt_state=jax.tree.map(jnp.array, huge))
  before = {name: of(state, name) for name in "ab"}
  params_before = jax.device_get(jax.tree.leaves(state.params["a"]))
  after, metrics = step_fn(state, frozen, rows)
  assert after.step == 2
  assert metrics["a"]["skipped"] == 1
  norm = np.sqrt(
    sum(np.sum(a**2) for a in params_before)
  )  # not that of the update
  np.testing.assert_allclose(metrics["a"]["param_norm"], norm, rtol=1e-6)
  for x, y in zip(of(after, "a"), before["a"], strict=True):
    assert np.array_equal(x, y, equal_nan=True)
  if where == "image":
    assert metrics["b"]["skipped"] == 1
    assert_equal(of(after, "b"), before["b"])
    return
  # Its neighbour is as if nothing had happened.
  other_state, _ = other(other_state, frozen, rows)
  assert metrics["b"]["skipped"] == 0
  assert_equal(of(after, "b"), of(other_state, "b"))
