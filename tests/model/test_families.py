"""Promises about the published ViT hold for every family of ViTs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import random_task, run_program, tiny_backbone
from families import FAMILIES, ONE_FIRST
from jax.sharding import NamedSharding, PartitionSpec

import memory_vit as mv
from memory_vit.errors import ConfigError
from memory_vit.evaluation.verify import TOLERANCE
from memory_vit.model import backbone as backbones
from memory_vit.model import trees
from memory_vit.model.backbone import backbone_shapes, init_backbone
from memory_vit.model.regimes import REGIMES


@pytest.fixture(scope="module", params=ONE_FIRST)
def family(request):
  return tiny_backbone(width=16, **FAMILIES[request.param])


@pytest.fixture(scope="module", params=ONE_FIRST)
def in_bfloat16(request):
  return tiny_backbone(width=16, dtype="bfloat16", **FAMILIES[request.param])


def tasks_of(backbone):
  """Two that ignore each other, and a child of both, with all parts."""
  a = random_task(backbone, "a", seed=1, cells=2)
  b = random_task(
    backbone,
    "b",
    seed=2,
    cells=0,
    classes=4,
    regime="side_masked",
    side_width=12,
  )
  c = random_task(
    backbone, "c", seed=3, attends_to=["a", "b"], side_width=12,
    regime="cls+memory+norms+layers+side",
  )  # fmt: skip
  for task in (b, c):  # or all attention would go to what they add
    task.params["side"]["up"]["keys"] *= 0.2
  return [a, b, c]


def test_two_streams_equal_the_masked_sequence(family, images):
  tasks = tasks_of(family)
  params = {
    "backbone": family.params, "tasks": {t.name: t.params for t in tasks},
  }  # fmt: skip
  known = [(t.name, t.spec.attends_to, t.spec.memory_norm) for t in tasks]
  dense = jax.jit(lambda p: oracle.forward(family.config, p, known, images))
  found, expected = mv.forward(family, tasks, images), dense(params)
  assert found.keys() == expected.keys()
  for name, logits in expected.items():
    assert np.ptp(logits) > 0.1
    scale = np.abs(logits).max()
    np.testing.assert_allclose(found[name], logits, atol=3e-5 * scale)


def test_outputs_are_preserved_and_tasks_are_as_alone(family, images):
  tasks = tasks_of(family)
  original = mv.forward(family, [], images)["backbone"]
  together = mv.forward(family, tasks, images)
  assert np.array_equal(together["backbone"], original)
  assert np.array_equal(mv.encode(family, images)[0], original)
  alone = mv.forward(family, tasks[:1], images)["a"]
  np.testing.assert_allclose(together["a"], alone, atol=1e-5)
  fewer = mv.forward(family, mv.fill_slots(family, tasks, slots=8), images)
  np.testing.assert_allclose(fewer["c"], together["c"], atol=1e-5)


def test_bfloat16_keeps_every_promise(in_bfloat16, images):
  """Bitwise identical alone, cached, in slots and in a Predictor."""
  family, tasks = in_bfloat16, tasks_of(in_bfloat16)
  outputs, context = mv.encode(family, images)
  assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(context.layers))
  slots = mv.fill_slots(family, tasks, slots=4)
  together = mv.forward(family, slots, images)
  assert np.array_equal(together["backbone"], outputs)
  cached = mv.read(family, slots, jax.device_put(jax.device_get(context)))
  alone = mv.forward(family, mv.fill_slots(
    family, tasks[:1], slots=4, cells=2), images)  # fmt: skip
  for name, logits in cached.items():
    assert np.array_equal(logits, together[name])
  scale = np.abs(alone["a"]).max()
  np.testing.assert_allclose(together["a"], alone["a"], atol=1e-2 * scale)
  predictor = mv.Predictor.from_model(family, tasks, warm_up=False)
  found = predictor.predict_pixels(np.asarray(images[:3]))
  among = predictor.predict_pixels(np.asarray(images))
  for name, logits in found.logits.items():
    assert np.array_equal(logits, among.logits[name][:3])


def test_bfloat16_is_near_float32(in_bfloat16, images):
  """The largest error, relative to the largest logit, in every family."""
  exact = dataclasses.replace(
    in_bfloat16,
    config=dataclasses.replace(in_bfloat16.config, dtype="float32"),
  )
  tasks = tasks_of(in_bfloat16)
  found = mv.forward(in_bfloat16, tasks, images)
  for name, expected in mv.forward(exact, tasks, images).items():
    error = np.abs(found[name] - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < TOLERANCE["bfloat16"]


def test_kernels_are_rounded_once_and_no_bit_changes(in_bfloat16, images):
  once, tasks = backbones.rounded(in_bfloat16), tasks_of(in_bfloat16)
  for name, array in trees.flatten(once.params).items():
    half = name.endswith("kernel") and not name.startswith("head")
    assert array.dtype == (jnp.bfloat16 if half else jnp.float32), name
  assert once.id == in_bfloat16.id
  expected = mv.forward(in_bfloat16, tasks, images)
  for name, logits in mv.forward(once, tasks, images).items():
    assert np.array_equal(logits, expected[name]), name


# One family with all kinds of tokens before the patches, one with none.
@pytest.fixture(
  params=[pytest.param("dinov2", marks=pytest.mark.slow), "siglip"]
)
def either(request):
  return tiny_backbone(width=16, depth=1, **FAMILIES[request.param])


def test_batch_of_no_images_gives_no_logits(either, images):
  family, tasks = either, tasks_of(either)
  found = mv.forward(family, tasks, images[:0])
  for name, logits in mv.forward(family, tasks, images).items():
    assert found[name].shape == (0, *logits.shape[1:])
    assert found[name].dtype == logits.dtype
  outputs, context = mv.encode(family, images[:0])
  assert outputs.shape == found["backbone"].shape
  assert mv.read(family, tasks, context)["c"].shape == found["c"].shape


def test_axes_of_a_mesh_may_be_explicit(either):
  """As `jax.make_mesh` makes them: each device keeps its images."""
  explicit = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=explicit)
  by_rows = NamedSharding(mesh, PartitionSpec("data"))
  images = np.random.default_rng(0).uniform(-1, 1, (8, 8, 8, 3))
  images = images.astype(np.float32)
  family, tasks = either, tasks_of(either)
  expected = mv.forward(family, tasks, images)
  on_mesh = jax.device_put(
    (family, tasks), NamedSharding(mesh, PartitionSpec())
  )
  found = mv.forward(*on_mesh, jax.device_put(images, by_rows))
  for name, logits in expected.items():
    assert found[name].sharding.is_equivalent_to(by_rows, 2)
    np.testing.assert_allclose(found[name], logits, atol=1e-5)


def logits_of(backbone, task, images):
  return run_program(backbone, [task], images)[task.name]


@pytest.mark.parametrize("name", ["timm, mean", "dinov3", "siglip", "mean"])
def test_full_starts_as_the_backbone(name, images):
  """A `full` task starts with all parameters of the backbone."""
  backbone = tiny_backbone(width=16, **FAMILIES[name] | {"num_classes": 7})
  task = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=7, regime="full",
    cells=0,
  )  # fmt: skip
  params = {**task.params, "head": backbone.params["head"]}
  found = logits_of(backbone, mv.Task(task.spec, params), images)
  expected = mv.forward(backbone, [], images)["backbone"]
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["dinov3", "siglip"])
@pytest.mark.parametrize("regime", ["memory", "memory_additive", "adapter"])
def test_every_token_of_a_task_matters(name, regime, images):
  """Also on a backbone without class token: the task brings its own."""
  backbone = tiny_backbone(width=16, depth=1, **FAMILIES[name])
  kind = REGIMES[regime]
  task = random_task(
    backbone, "a", regime=regime, cells=2 if kind.has("memory") else 0,
    bottleneck=3 if "bottleneck" in kind.fields else 0,
  )  # fmt: skip
  out = np.asarray(logits_of(backbone, task, images))
  assert len(trees.flatten(task.params)) > 2
  for leaf in trees.flatten(task.params):
    changed = trees.flatten(task.params)
    changed[leaf] = 1 - changed[leaf]
    other = mv.Task(task.spec, trees.unflatten(changed))
    assert not np.allclose(out, logits_of(backbone, other, images)), leaf


def test_a_token_of_a_task_is_a_class_token_of_no_position(images):
  """On a backbone without one, all tokens attend to it as to its own."""
  backbone = tiny_backbone(width=16, **FAMILIES["mean"] | {"num_classes": 0})
  task = random_task(backbone, "a", regime="head_cls", cells=0)
  params = trees.flatten(backbone.params)
  table = "Transformer/posembed_input/pos_embedding"
  params[table] = np.pad(params[table], ((0, 0), (1, 0), (0, 0)))
  params["cls"] = task.params["cls"][None, None]
  config = dataclasses.replace(backbone.config, class_tokens=1, pooling="tok")
  same = mv.Backbone(config, trees.unflatten(params), "")
  head = task.params["head"]
  features = mv.forward(same, [], images)["backbone"]
  expected = features @ head["kernel"] + head["bias"][None]
  found = logits_of(backbone, task, images)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rope_with_memory_behind_the_patches_turns_the_patches_alone(images):
  """Memory at its initial value attends and is attended to by all alike."""
  backbone = tiny_backbone(width=16, depth=1, **FAMILIES["dinov3"])
  task = random_task(backbone, "a", regime="memory_propagated", cells=2)
  swapped = {**task.params, "memory": task.params["memory"][:, ::-1]}
  np.testing.assert_allclose(
    logits_of(backbone, task, images),
    logits_of(backbone, mv.Task(task.spec, swapped), images),
    atol=1e-5,
  )


def test_a_task_starts_from_what_is_pooled():
  """The class token; else the probe; else a grey patch at the mean position."""
  for name in ("clip", "siglip", "mean"):
    backbone = tiny_backbone(width=16, **FAMILIES[name])
    params = backbone.params
    expected = {
      "clip": lambda p: p["cls"][0, 0],
      "siglip": lambda p: p["MAPHead_0"]["probe"][0, 0],
      "mean": lambda p: (
        p["embedding"]["bias"]
        + p["Transformer"]["posembed_input"]["pos_embedding"][0].mean(0)
      ),
    }[name](params)
    task = mv.init_task(jax.random.key(0), backbone, name="a", num_classes=3)
    np.testing.assert_allclose(task.params["cls"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf vit", "dinov2", "siglip"])
def test_random_weights_are_drawn_for_every_kernel(name):
  """LeCun initialization when parameters are made; nothing is drawn later."""
  config = tiny_backbone(**FAMILIES[name]).config
  params = trees.flatten(init_backbone(config, jax.random.key(0)).params)
  kernels = {k: np.asarray(v) for k, v in params.items() if "kernel" in k}
  for path, kernel in kernels.items():
    to_heads = any(part in path for part in ("query/", "key/", "value/"))
    outputs = (-2, -1) if to_heads else -1
    inputs = kernel.size / np.prod(np.take(kernel.shape, outputs))
    assert abs(kernel.std() * inputs**0.5 - 1) < 0.2, path


def test_the_tree_has_what_the_family_has_and_nothing_else():
  def shapes(name):
    config = tiny_backbone(**FAMILIES[name]).config
    found = trees.flatten(backbone_shapes(config))
    return {name: leaf.shape for name, leaf in found.items()}

  table, block = "Transformer/posembed_input/pos_embedding", "encoderblock_0"
  dinov3, siglip, plain = shapes("dinov3"), shapes("siglip"), shapes("hf vit")
  assert dinov3["cls"] == (1, 1, 32)
  assert dinov3["registers"] == (1, 2, 32)
  assert table not in dinov3
  assert siglip[table] == (1, 16, 32)
  assert siglip["MAPHead_0/probe"] == (1, 1, 32)
  assert "cls" not in siglip
  gate = f"Transformer/{block}/MlpBlock_0/gate/kernel"
  assert shapes("dinov2")[gate] == (32, 48)
  assert shapes("two classes")["cls"] == (1, 2, 32)
  assert shapes("two classes")[table] == (1, 18, 32)
  norm = {f"Transformer/pre_norm/{part}" for part in ("scale", "bias")}
  assert shapes("clip").keys() - norm == plain.keys()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"gelu": "fast"}, "gelu is 'fast', expected one of 'tanh', 'exact'"),
    ({"pooling": "max"}, "pooling is 'max', expected one of 'tok', 'gap'"),
    ({"class_tokens": 3}, "class_tokens is 3 and .*, expected 0 to 2 class"),
    ({"registers": -1}, "registers is -1, expected .* and 0 to 64 registers"),
    ({"class_tokens": 0}, "pooling 'tok' needs a class token"),
    ({"norm_after_pooling": True}, "requires pooling 'gap', not 'tok'"),
    ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0, expected"),
    ({"positions": "rope", "rope_base": 1.0}, "rope_base is 1.0, expected"),
    # No configuration equals one with it: every call would compile anew.
    ({"rope_base": float("nan")}, "rope_base is nan, expected"),
    ({"positions": "rope", "num_heads": 16}, "that is a multiple of 4, but"),
    # The angles of these patches would take gigabytes.
    (
      {"positions": "rope", "patch_size": 1, "image_size": 257},
      "'rope' allows at most 65,536 patches",
    ),
  ],
)
def test_impossible_vit_options_are_refused(options, message):
  with pytest.raises(ConfigError, match=message):
    tiny_backbone(**options)
