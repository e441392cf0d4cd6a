"""Meshes of 8 virtual devices: the same results with a split backbone."""

import collections
import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from marks import NIGHTLY
from steps import assert_close, batch, setting

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.config import OptimConfig
from memory_vit.errors import ConfigError
from memory_vit.evaluation import evaluate
from memory_vit.model import trees
from memory_vit.runtime import sharding
from memory_vit.tasks import create, inference, manifest, split_forward, store
from memory_vit.train import run, step
from memory_vit.train.optim import make_optimizer, make_schedule

# fsdp -> a mesh of 8 x 1, 4 x 2, 2 x 4 and 1 x 8 devices. One with two axes is
# the general case; all else in the tests has the first.
PARTS = [
  4,
  pytest.param(8, marks=pytest.mark.slow),
  *(pytest.param(fsdp, marks=NIGHTLY) for fsdp in (1, 2)),
]


@pytest.fixture(scope="module")
def wide():
  """Its MLP is large enough to be split."""
  return tiny_backbone(width=64, mlp_dim=256, depth=1)


def mesh_of(fsdp: int, devices: int = 8) -> jax.sharding.Mesh:
  return sharding.make_mesh(jax.devices()[:devices], fsdp)


def split_over(backbone, mesh):
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def specs_of(tree):
  """{name: axes} of the arrays that are split."""
  return {
    name: tuple(leaf.sharding.spec)
    for name, leaf in trees.flatten(tree).items()
    if not leaf.sharding.is_fully_replicated
  }


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_batches_reach_the_devices_in_their_order(count):
  """Each once, and at most two ahead of the batch in use."""
  read = []

  def batches():
    for i in range(count):
      read.append(i)
      yield {"label": np.full(8, i), "image": np.full((8, 2), 10 * i)}

  mesh = sharding.make_mesh()
  for i, found in enumerate(sharding.prefetch(batches(), mesh)):
    assert len(read) <= i + 2
    np.testing.assert_array_equal(found["label"], np.full(8, i))
    np.testing.assert_array_equal(found["image"], np.full((8, 2), 10 * i))
    assert found["image"].sharding == sharding.by_rows(mesh)
  assert read == list(range(count))


def test_a_mesh_divides_its_devices():
  assert dict(mesh_of(2).shape) == {"data": 4, "fsdp": 2}
  assert dict(sharding.make_mesh().shape) == {"data": 8, "fsdp": 1}
  for fsdp in (0, 3, 16):
    with pytest.raises(ConfigError, match=f"fsdp.* is {fsdp}, .* of the 8 dev"):
      mesh_of(fsdp)


@pytest.mark.parametrize(
  ("shape", "spec"),
  [
    ((64, 256), (None, "fsdp")),  # the longest axis
    ((256, 64), ("fsdp", None)),
    ((128, 128), ("fsdp", None)),  # the first of several
    ((128, 255), ("fsdp", None)),  # the longest does not divide
    ((3, 127, 255), ()),  # none does
    ((64, 128), ()),  # small
    ((), ()),
  ],
)
def test_the_longest_axis_that_divides_is_split(shape, spec):
  assert tuple(sharding.in_parts(shape, mesh_of(4)).spec) == spec
  assert tuple(sharding.in_parts(shape, mesh_of(1)).spec) == ()


def test_large_arrays_of_a_backbone_are_split(wide):
  params = sharding.put_backbone(wide.params, mesh_of(4))
  block = "Transformer/encoderblock_0/MlpBlock_0/Dense_{}/kernel"
  assert specs_of(params) == {
    block.format(0): (None, "fsdp"),
    block.format(1): ("fsdp", None),
  }
  kernel = trees.flatten(params)[block.format(0)]
  assert {s.data.shape for s in kernel.addressable_shards} == {(64, 64)}
  # What is computed of it is computed of all of it.
  assert trees.fingerprint(params) == wide.fingerprint
  assert_equal(sharding.to_host(params), wide.params)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def train(backbone, images, mesh, tasks, steps=3):
  step_fn, state, frozen = setting(backbone, mesh, tasks)
  for _ in range(steps):
    state, metrics = step_fn(state, frozen, batch(images, mesh))
  return state, metrics


@pytest.fixture(scope="module")
def alone(wide, images):
  """The result of training on one device."""
  tasks = [random_task(wide, "a"), random_task(wide, "b", seed=1, cells=3)]
  return tasks, jax.device_get(train(wide, images, mesh_of(1, 1), tasks))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", PARTS)
def test_every_mesh_learns_the_same(wide, images, alone, fsdp):
  tasks, expected = alone
  state, metrics = train(wide, images, mesh_of(fsdp), tasks)
  leaves = jax.tree.leaves(state)
  assert leaves
  assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
  assert_close(jax.device_get((state, metrics)), expected, atol=1e-5)


def full_step(backbone, mesh):
  """The regime `full`, with momenta."""
  config = OptimConfig(name="adamw", warmup=0.0)
  rates = {"a": make_schedule(config, 1e-3, 10)}
  optimizer = make_optimizer({"a": config}, rates)
  task = create.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=0,
    regime="full",
  )  # fmt: skip
  cut = split_forward.make_split_forward(backbone.config, (task.spec,))
  step_fn = step.Step(cut, optimizer, mesh)
  frozen = {"backbone": backbone.params, "tasks": {}}
  return step_fn, step_fn.create_state({"a": task.params}), frozen


@pytest.mark.slow
def test_a_trained_backbone_is_split_with_its_momenta(wide, images):
  results = []
  for mesh in (mesh_of(1, 1), mesh_of(4)):
    step_fn, state, frozen = full_step(split_over(wide, mesh), mesh)
    for _ in range(3):
      state, metrics = step_fn(state, frozen, batch(images, mesh))
    results.append((state, metrics))
  (one, metrics_one), (eight, metrics_eight) = results
  assert_close(jax.device_get(metrics_eight), jax.device_get(metrics_one), 1e-5)
  # Adam divides by what may be nearly zero: to 1 % of a step of 1e-3.
  assert_close(jax.device_get(eight.params), jax.device_get(one.params), 1e-5)
  split = specs_of(eight.params)
  assert len(split) == 2
  counts = collections.Counter(
    "fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(eight)
  )
  assert counts[True] == 3 * len(split)  # beside the first and second moments


@pytest.mark.parametrize("fsdp", PARTS)
def test_outputs_stay_the_same_to_the_bit(wide, images, fsdp):
  """For any other tasks on the same mesh; close to those of one device."""
  mesh = mesh_of(fsdp)
  backbone = split_over(wide, mesh)
  rows = batch(images, mesh)["image"]
  before, _ = mv.encode(backbone, rows)
  tasks = [random_task(wide, "a"), random_task(wide, "b", seed=1)]
  after = mv.forward(backbone, tasks, rows)
  assert_equal(after["backbone"], before)
  expected = mv.forward(wide, tasks, np.tile(images, (4, 1, 1, 1)))
  assert_close(jax.device_get(after), jax.device_get(expected), 1e-4)


@pytest.mark.fault("partial-batch")
@pytest.mark.parametrize("fsdp", PARTS)
def test_evaluation_counts_every_example_once(wide, images, fsdp):
  mesh = mesh_of(fsdp)
  backbone, task = split_over(wide, mesh), random_task(wide, "a")
  labels = (np.arange(8) % 3).astype(np.int32)
  rows = [
    {"image": np.asarray(images), "label": labels, "mask": np.ones(8, "f4")},
    {"image": np.asarray(images), "label": labels,
     "mask": (np.arange(8) < 3).astype("f4")},
  ]  # fmt: skip

  def predict(images):
    return mv.forward(backbone, [task], images)

  found = evaluate.evaluate(predict, rows, mesh)["a"].scores
  out = np.asarray(mv.forward(wide, [task], images)["a"]).argmax(-1) == labels
  assert found.examples == 11
  assert found.accuracy == pytest.approx((out.sum() + out[:3].sum()) / 11)


def test_a_layer_is_gathered_where_it_is_used(wide, images):
  """Weights are sent; of activations only those that the head takes."""
  mesh = mesh_of(4)
  backbone = split_over(tiny_backbone(width=64, mlp_dim=256, depth=3), mesh)
  rows = jax.ShapeDtypeStruct(
    (32, 8, 8, 3), jnp.float32, sharding=sharding.by_rows(mesh)
  )
  text = (
    inference.encode_program.compiled.lower(
      backbone.params, rows, config=backbone.config, piece=None
    )
    .compile()
    .as_text()
  )
  moved = re.findall(r"= f32\[([\d,]*)\]\S* (all-\w+|reduce-scatter)\(", text)
  shapes = collections.Counter(tuple(map(int, s.split(","))) for s, _ in moved)
  assert {kind for _, kind in moved} == {"all-gather"}
  assert shapes == {(64, 256): 3, (256, 64): 3}


@pytest.mark.fault("other-devices")
@pytest.mark.slow
def test_run_resumes_on_other_devices(tmp_path, monkeypatch):
  """8 devices, then 1, then 4: the same images, the same result."""
  mv.save_backbone(
    tiny_backbone(width=64, mlp_dim=256, num_classes=5), tmp_path / "wide.npz"
  )
  values = digits.get_config()
  values.upstream.name = ""
  values.backbone, values.regime = str(tmp_path / "wide.npz"), "full"
  values.batch_size, values.batch_size_eval = 16, 64
  values.total_steps, values.checkpoint_every, values.eval_every = 6, 2, 6
  values.learning_rate = 0.03
  make_mesh, shard_batch = sharding.make_mesh, sharding.shard_batch
  take_step = step.Step.__call__
  seen, taken = [], []

  def logged(batch, mesh):
    if "mask" not in batch:
      seen.append(batch["image"].sum(axis=(1, 2, 3)).tolist())
    return shard_batch(batch, mesh)

  def run_on(devices, fsdp, steps, workdir):
    """Take this number of steps, and be interrupted in the next."""

    def stops(self, *args):
      if len(taken) == steps:
        raise KeyboardInterrupt
      taken.append(1)
      return take_step(self, *args)

    seen.clear()
    taken.clear()
    values.mesh.fsdp = fsdp
    monkeypatch.setattr(
      sharding, "make_mesh",
      lambda fsdp: make_mesh(jax.devices()[:devices], fsdp),
    )  # fmt: skip
    monkeypatch.setattr(sharding, "shard_batch", logged)
    monkeypatch.setattr(step.Step, "__call__", stops)
    config = config_lib.from_dict(values.to_dict())
    with contextlib.suppress(KeyboardInterrupt):
      run.train_and_evaluate(config, workdir)
    return seen[: len(taken)]

  whole = run_on(8, 4, 6, tmp_path / "whole")
  changing = [
    pictures
    for devices, fsdp in ((8, 4), (1, 1), (4, 2))
    for pictures in run_on(devices, fsdp, 2, tmp_path / "changing")
  ]
  assert len(whole) == 6
  assert changing == whole
  paths = [
    tmp_path / name / "tasks/digits-5-9" for name in ("whole", "changing")
  ]
  one, other = (store.read_arrays(path, manifest.read(path)) for path in paths)
  largest = max(np.abs(other[name] - one[name]).max() for name in one)
  print(f"largest difference {largest:.1e}")
  for name, array in one.items():
    np.testing.assert_allclose(
      other[name], array, rtol=1e-3, atol=1e-5, err_msg=name
    )
