"""The two streams against the dense oracle, and promises about outputs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import random_task, tiny_backbone
from plain_vit import PlainViT, einsum, with_flax_biases

import memory_vit as mv
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.model import attention, trees, vit
from memory_vit.model.masks import TaskMask
from memory_vit.runtime.dtypes import Precision
from memory_vit.tasks import inference

pytestmark = pytest.mark.versions


def random_tasks(backbone, seed, count=5):
  """A random acyclic graph of tasks, in a random order."""
  rng = np.random.default_rng(seed)
  tasks = []
  for i in range(count):
    parents = [t.spec.name for t in tasks if rng.random() < 0.4]
    cells = int(rng.integers(0, 4))
    learned = {"cells": cells}
    if i in (1, 3):
      regime = "norms_masked" if i == 1 else "layers_masked"
      learned = {"cells": 0, "regime": regime}
    if i == 4:
      learned |= {"regime": "cls+memory+norms+layers+side", "side_width": 12}
    tasks.append(
      random_task(
        backbone, f"task{i}", seed=10 * seed + i,
        classes=int(rng.integers(2, 6)), attends_to=parents,
        memory_norm=bool(rng.random() < 0.7), **learned,
      )
    )  # fmt: skip
  return [tasks[i] for i in rng.permutation(count)]


def as_oracle(tasks):
  return [(t.spec.name, t.spec.attends_to, t.spec.memory_norm) for t in tasks]


def all_params(backbone, tasks):
  return {
    "backbone": backbone.params,
    "tasks": {t.spec.name: t.params for t in tasks},
  }


@pytest.mark.parametrize(
  "seed", [3, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 8))]
)
def test_two_streams_equal_the_masked_sequence(images, seed):
  options = {"gelu": "exact", "depth": 1} if seed == 8 else {}
  backbone = tiny_backbone(**options)
  tasks = random_tasks(backbone, seed)
  # The random tasks have memory without a norm, and attend to memory of others.
  cells = {t.spec.name: t.spec.cells for t in tasks}
  assert any(t.spec.cells and not t.spec.memory_norm for t in tasks)
  assert any(
    t.spec.cells and any(cells[name] for name in t.spec.attends_to)
    for t in tasks
  )
  params = all_params(backbone, tasks)
  module = mv.MemoryViT(backbone.config, tuple(t.spec for t in tasks))

  def ours(task_params):
    return module.apply({"params": {**params, "tasks": task_params}}, images)

  def dense(task_params):
    return oracle.forward(
      backbone.config, {**params, "tasks": task_params}, as_oracle(tasks),
      images,
    )  # fmt: skip

  # A weighted sum, so that no part of the gradient can cancel.
  classes = {"backbone": 7, **{t.spec.name: t.spec.num_classes for t in tasks}}
  weights = {
    name: np.cos(np.arange(len(images) * c).reshape(-1, c))
    for name, c in classes.items()
  }

  # One gradient of the sum of losses; each task gets that of its own loss.
  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def losses(task_params):
    out = ours(task_params)
    return sum((out[n] * weights[n]).sum() for n in task_params), out

  @jax.jit
  def dense_gradient(task_params, weights):
    out, gradient = jax.vjp(dense, task_params)
    return gradient(weights)[0], out

  gradients, found = losses(params["tasks"])
  for name in params["tasks"]:
    own = {n: np.float32(w * (n == name)) for n, w in weights.items()}
    gradient, expected = dense_gradient(params["tasks"], own)
    for leaf, value in trees.flatten(gradient[name]).items():
      close(trees.flatten(gradients[name])[leaf], value)
  assert found.keys() == expected.keys()
  for name, logits in expected.items():
    close(found[name], logits)


def close(found, expected):
  """Equal to 1e-5 of the greatest value."""
  # In NumPy: each shape would be compiled.
  expected = np.asarray(expected)
  scale = float(np.abs(expected).max()) if expected.size else 1.0
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_original_outputs_are_preserved_to_the_bit(images, dtype):
  backbone = with_flax_biases(tiny_backbone(dtype=dtype))
  plain = np.asarray(PlainViT(backbone.config).jitted(backbone.params, images))
  assert np.abs(plain).max() > 0.1
  tasks = [
    random_task(
      backbone, f"t{i}", seed=i, cells=i % 4,
      regime="memory_masked" if i % 4 or i < 8 else
      ("norms_masked", "layers_masked", "side_masked")[i // 4 % 3],
    )
    for i in range(64)
  ]  # fmt: skip
  for count in (0, 1, 64):
    out = mv.forward(backbone, tasks[:count], images)
    assert np.array_equal(out["backbone"], plain), count
    assert len(out) == count + 1


@pytest.mark.fault("many-tasks")
def test_concatenated_equals_alone(backbone, images):
  tasks = [
    random_task(backbone, f"t{i}", seed=i, cells=i, classes=2 + i)
    for i in range(4)
  ]
  together = mv.forward(backbone, tasks, images)
  for task in tasks:
    alone = mv.forward(backbone, [task], images)[task.spec.name]
    close(together[task.spec.name], alone)


@pytest.mark.fault("many-tasks")
def test_removing_a_task_changes_nothing_for_the_others(backbone, images):
  a = random_task(backbone, "a", seed=1, cells=5)
  b = random_task(backbone, "b", seed=2, cells=3)
  c = random_task(backbone, "c", seed=3, cells=0, attends_to=("a",))
  every = mv.forward(backbone, [a, b, c], images)
  fewer = mv.forward(backbone, [c, a], images)
  for name in ("a", "c"):
    close(fewer[name], every[name])


def test_extension_reads_and_concatenation_does_not(backbone, images):
  parent = random_task(backbone, "parent", seed=1)
  other = random_task(backbone, "parent", seed=2)
  child = random_task(backbone, "child", seed=3, attends_to=("parent",))
  alone = random_task(backbone, "child", seed=3)

  def logits(task, parent):
    return mv.forward(backbone, [parent, task], images)["child"]

  assert not np.allclose(logits(child, parent), logits(child, other))
  assert np.array_equal(logits(alone, parent), logits(alone, other))
  assert not np.allclose(logits(child, parent), logits(alone, parent))


def test_memory_and_class_token_and_order_of_norm_matter(backbone, images):
  task = random_task(backbone, "a", seed=1)
  out = mv.forward(backbone, [task], images)["a"]
  for leaf in ("cls", "memory"):
    params = {**task.params, leaf: -task.params[leaf]}
    other = mv.Task(task.spec, params)
    assert not np.allclose(out, mv.forward(backbone, [other], images)["a"])
  spec = dataclasses.replace(task.spec, memory_norm=False)
  plain = mv.forward(backbone, [mv.Task(spec, task.params)], images)["a"]
  assert not np.allclose(out, plain)


def test_gradient_of_a_task_ignores_its_neighbours(backbone, images):
  a = random_task(backbone, "a", seed=1)
  b = random_task(backbone, "b", seed=2)
  _, context = mv.encode(backbone, images)

  def loss(params, specs):
    out = inference.read_tasks(
      params, backbone.params, context, config=backbone.config, specs=specs
    )
    return sum((logits**2).sum() for logits in out.values())

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  both = gradient({"a": a.params, "b": b.params}, (a.spec, b.spec))
  alone = gradient({"a": a.params}, (a.spec,))
  jax.tree.map(close, both["a"], alone["a"])


def test_bfloat16_is_close_to_float32(images):
  outs = [
    mv.forward(b, [random_task(b, "a", seed=1)], images)
    for b in (tiny_backbone(), tiny_backbone(dtype="bfloat16"))
  ]
  for name in outs[0]:
    assert outs[1][name].dtype == jnp.float32
    np.testing.assert_allclose(outs[1][name], outs[0][name], atol=0.05)
    assert not np.array_equal(outs[1][name], outs[0][name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_after_blocks_are_in_the_compute_dtype(images, dtype):
  """As in vit_jax, where they are half of what an accelerator moves."""
  backbone = tiny_backbone(dtype=dtype)

  def tokens(model, images):
    z = model.backbone._tokens(images, model.backbone._cls())
    return model.backbone.Transformer.encode(z, None)[0]

  states = vit.apply(
    vit.MemoryViT(backbone.config), {"backbone": backbone.params}, images,
    method=tokens,
  )  # fmt: skip
  assert {state.dtype.name for state in states} == {dtype}
  outputs = mv.forward(backbone, [], images)["backbone"]
  assert outputs.dtype == jnp.float32


def test_tasks_share_their_attention_in_float32():
  """In bfloat16 too: the weights themselves are all that is rounded."""
  rng = np.random.default_rng(0)
  b, h, t, n, m = 2, 2, 3, 20, 4
  # The values of the tokens are rows of the identity: outputs are the weights.
  k = n + 1 + m

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

  def one_hot(first, count, *shape):
    rows = jax.nn.one_hot(np.arange(first, first + count), k, dtype="bfloat16")
    return jnp.broadcast_to(rows, (*shape, count, k))

  query, keys, own = draw(b, h, t, k), draw(b, h, n, k), draw(b, h, t, k)
  cells = draw(t, h, m, k)
  tokens = jnp.broadcast_to(one_hot(n, 1)[0], (b, h, t, k))
  mask = TaskMask(
    cells=np.ones((t, m), bool), parents=np.zeros((t, 0), np.int32),
    is_parent=np.zeros((t, 0), bool), memory_norm=np.ones(t, bool),
  )  # fmt: skip
  found = attention.attend_from_tasks(
    query,
    (own, tokens),
    attention.Attended(
      context=(keys, one_hot(0, n, b, h)),
      cells=(cells, one_hot(n + 1, m, t, h)),
      mask=mask,
      terms=(),
    ),
    Precision("bfloat16"),
  )
  query = query / math.sqrt(k)
  scores = jnp.concatenate(
    [
      einsum("bhtk,bhsk->bhts", query, keys),
      einsum("bhtk,bhtk->bht", query, own)[..., None],
      einsum("bhtk,thmk->bhtm", query, cells),
    ],
    axis=-1,
  )
  expected = np.exp(np.asarray(scores, np.float64))
  expected /= expected.sum(-1, keepdims=True)
  # Rounded once, to 8 bits; a softmax in bfloat16 rounds at every step.
  error = np.abs(np.asarray(found, np.float64) / expected - 1).max()
  assert error < 2**-8 + 1e-5


def test_pre_logits_and_features(images):
  backbone = tiny_backbone(representation_size=16)
  config = backbone.config
  params = {"backbone": backbone.params, "tasks": {}}
  expected = jax.jit(lambda params: oracle.forward(config, params, [], images))(
    params
  )
  found = mv.forward(backbone, [], images)["backbone"]
  close(found, expected["backbone"])

  headless = tiny_backbone(num_classes=0)
  assert mv.forward(headless, [], images)["backbone"].shape == (8, 32)


def test_module_makes_the_documented_tree(backbone, images):
  a = random_task(backbone, "a", cells=3, classes=4)
  module = mv.MemoryViT(backbone.config, (a.spec,))
  shapes = jax.eval_shape(module.init, jax.random.key(0), images)["params"]
  assert set(shapes) == {"backbone", "tasks"}
  found = {k: v.shape for k, v in trees.flatten(shapes["tasks"]).items()}
  assert found == {
    "a/cls": (32,),
    "a/memory": (2, 3, 32),
    "a/head/kernel": (32, 4),
    "a/head/bias": (4,),
  }
  assert jax.tree.structure(shapes["backbone"]) == jax.tree.structure(
    backbone.params
  )


@pytest.mark.fault("replaced-task")
def test_forward_refuses_unusable_input(backbone, images):
  a = random_task(backbone, "a")
  with pytest.raises(DataError, match="floats in"):
    mv.forward(backbone, [a], images[:, :4])
  with pytest.raises(DataError, match="floats in"):
    mv.forward(backbone, [a], images.astype(jnp.uint8))
  with pytest.raises(TaskError, match="have the same name"):
    mv.forward(backbone, [a, a], images)
  with pytest.raises(TaskError, match="another backbone.*fingerprint"):
    mv.forward(tiny_backbone(seed=1), [a], images)
  with pytest.raises(ConfigError, match="bfloat16"):
    tiny_backbone(dtype="float16")
  with pytest.raises(ConfigError, match="multiple of the patch size"):
    tiny_backbone(image_size=9)
