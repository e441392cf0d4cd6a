"""Where tasks look: against the dense oracle, and as users would call it."""

import functools

import jax
import numpy as np
import oracle
import pytest
from conftest import random_task, tiny_backbone
from families import FAMILIES, FEW_FIRST
from PIL import Image

import memory_vit as mv
from memory_vit.errors import DataError, TaskError
from memory_vit.looking import attention_rollout as rollout
from memory_vit.looking import attention_shares as shares
from memory_vit.looking import token_attention as attention
from memory_vit.looking.attention_map import INFERNO
from memory_vit.prediction import compilations

BACKBONES = {"plain": {}, **FAMILIES}
PLAIN_FIRST = [
  "plain",
  *(pytest.param(*p.values, marks=(*p.marks, pytest.mark.slow))
    for p in FEW_FIRST),
]  # fmt: skip


def tasks_of(backbone):
  """Three in a row that read each other, with all parts, and one apart."""
  a = random_task(backbone, "a", seed=1, cells=2)
  b = random_task(
    backbone, "b", seed=2, cells=3, attends_to=[a], memory_norm=False,
    regime="cls+memory+norms",
  )  # fmt: skip
  c = random_task(
    backbone, "c", seed=3, cells=0, attends_to=[a, b],
    regime="side_masked",
  )  # fmt: skip
  return [b, a, random_task(backbone, "d", seed=4, regime="cls_masked",
                            cells=0), c]  # fmt: skip


@functools.cache
def of_oracle(family):
  """Backbone, tasks, and the oracle's weights (b, l, h, queries, keys)."""
  backbone = tiny_backbone(width=16, **BACKBONES[family])
  tasks = tasks_of(backbone)
  params = {
    "backbone": backbone.params, "tasks": {t.name: t.params for t in tasks},
  }  # fmt: skip
  known = [(t.name, t.spec.attends_to, t.spec.memory_norm) for t in tasks]

  @jax.jit
  def run(params, images):
    weights = []
    oracle.forward(backbone.config, params, known, images, weights)
    return weights

  return backbone, tasks, np.stack(run(params, pictures()), axis=1)


def pictures(count=3):
  images = np.random.default_rng(5).uniform(-1, 1, (count, 8, 8, 3))
  return images.astype(np.float32)


def columns(tasks, tokens):
  """Of the oracle's keys: {task: its token, slice of its memory}."""
  first, where = tokens + len(tasks), {}
  for i, task in enumerate(tasks):
    where[task.name] = tokens + i, slice(first, first + task.spec.cells)
    first += task.spec.cells
  return where


def close(found, expected, atol=2e-6):
  assert found.dtype == np.float32
  assert isinstance(found, np.ndarray)
  np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("family", PLAIN_FIRST)
def test_the_weights_are_those_of_the_masked_sequence(family):
  backbone, tasks, expected = of_oracle(family)
  tokens = expected.shape[3] - len(tasks)
  where = columns(tasks, tokens)
  heads = mv.token_attention(backbone, tasks, pictures(), per_head=True)
  # The mean over heads does not depend on the family.
  means = (
    [mv.token_attention(backbone, tasks, pictures())]
    if family == "plain" else []
  )  # fmt: skip
  for found in (heads, *means):
    assert list(found) == ["b", "a", "d", "c"]
  for task in tasks:
    own, memory = where[task.name]
    rows = expected[:, :, :, own]
    for found, row in [(heads, rows), *((m, rows.mean(2)) for m in means)]:
      seen = found[task.name]
      assert seen.task == task.name
      close(seen.image, row[..., :tokens])
      close(seen.token, row[..., own])
      close(seen.memory, row[..., memory])
      parents = set(task.spec.attends_to)
      assert seen.parent_tokens.keys() == parents
      assert seen.parent_memory.keys() == parents
      for parent in parents:
        token, memory_of_it = where[parent]
        close(seen.parent_tokens[parent], row[..., token])
        close(seen.parent_memory[parent], row[..., memory_of_it])
      close(seen.total, np.ones(row.shape[:-1]))
      # Nothing else is attended to; each part really is.
      assert seen.image.sum(-1).max() < 1
      assert (seen.token > 0).all()


def dense_rollout(weights, tokens, tasks):
  """Products of whole matrices, after each layer: (b, l, queries, nodes).

  The nodes are all tokens and, last, memory, which is what it is.
  """
  b, l, _, queries, _ = weights.shape
  mean = weights.astype(np.float64).mean(2)
  product, after = np.eye(queries + 1)[None].repeat(b, 0), []
  for i in range(l):
    layer = np.zeros((b, queries + 1, queries + 1))
    layer[:, :queries, :queries] = mean[:, i, :, :queries]
    layer[:, :queries, queries] = mean[:, i, :, queries:].sum(-1)
    layer[:, queries, queries] = 1
    product = (layer + np.eye(queries + 1)[None]) / 2 @ product
    after.append(product)
  return np.stack(after, axis=1)


@pytest.mark.parametrize("family", PLAIN_FIRST)
def test_the_rollout_is_the_product_over_the_layers(family):
  backbone, tasks, weights = of_oracle(family)
  tokens = weights.shape[3] - len(tasks)
  expected = dense_rollout(weights, tokens, tasks)
  found = mv.attention_rollout(backbone, tasks, pictures())
  assert list(found) == ["b", "a", "d", "c"]
  for i, task in enumerate(tasks):
    row, rolled = expected[:, :, tokens + i], found[task.name]
    close(rolled.image, row[..., :tokens])
    close(rolled.tokens, row[..., tokens:-1].sum(-1))
    close(rolled.memory, row[..., -1])
    total = rolled.image.sum(-1) + rolled.tokens + rolled.memory
    close(total, np.ones(total.shape))
  assert not found["d"].memory.any()
  # "c" has no memory of its own, and reads that of others.
  assert (found["c"].memory > 0).all()


def test_attention_is_bitwise_equal_beside_neighbours(backbone):
  a = random_task(backbone, "a", seed=1)
  others = [random_task(backbone, f"o{i}", seed=2 + i) for i in range(3)]
  images = pictures()

  def bits(tasks):
    slots = mv.fill_slots(backbone, tasks, slots=4)
    seen = mv.token_attention(backbone, slots, images)["a"]
    rolled = mv.attention_rollout(backbone, slots, images)["a"]
    return [
      x.tobytes() for x in (seen.image, seen.memory, seen.token, rolled.image)
    ]

  assert bits([a]) == bits([a, *others])


def test_other_tasks_and_images_of_these_shapes_compile_nothing(backbone):
  """No program at all: that of the image and small ones included."""

  def look(others):
    """Attention of "a" beside other tasks; the number of compilations."""
    tasks = [random_task(backbone, f"o{i}", seed=i) for i in range(others)]
    tasks.append(random_task(backbone, "a", seed=9))
    slots = mv.fill_slots(backbone, tasks, slots=4)
    with compilations.counted() as tally:
      mv.token_attention(backbone, slots, pictures(5))
      mv.attention_rollout(backbone, slots, pictures(5) / (1 + others))
    return tally.count

  assert look(0) > 0  # no other test has five images
  assert [look(1), look(2)] == [0, 0]


@pytest.mark.slow
def test_bfloat16_sums_to_one_and_is_close():
  found = []
  for dtype in ("float32", "bfloat16"):
    backbone = tiny_backbone(dtype=dtype)
    tasks = tasks_of(backbone)
    seen = mv.token_attention(backbone, tasks, pictures())["c"]
    rolled = mv.attention_rollout(backbone, tasks, pictures())["c"]
    close(seen.total, np.ones(seen.total.shape))
    total = rolled.image.sum(-1) + rolled.tokens + rolled.memory
    close(total, np.ones(total.shape))
    found.append((seen, rolled))
  (seen, rolled), (seen_16, rolled_16) = found
  close(seen_16.image, seen.image, atol=0.05)
  close(rolled_16.image, rolled.image, atol=0.05)
  assert not np.array_equal(seen_16.image, seen.image)


def test_a_patch_stands_in_the_map_where_it_stands_in_the_image():
  """Behind class tokens and registers, row by row."""
  for family, first in (("plain", 1), ("dinov2", 4), ("siglip", 0)):
    config = tiny_backbone(width=16, **BACKBONES[family]).config
    image = np.random.default_rng(0).random((3, 2, first + 16), np.float32)
    rolled = rollout.AttentionRollout(
      "a", image, image[..., 0], image[..., 0], config
    )
    maps = mv.patch_map(rolled)
    assert maps.shape == (3, 2, 4, 4)
    assert maps[1, 1, 2, 3] == image[1, 1, first + 2 * 4 + 3]
    heads = np.stack([image] * 5, axis=2)
    seen = attention.TokenAttention(
      "a", heads, heads[..., :0], heads[..., 0], {}, {}, config
    )
    assert np.array_equal(mv.patch_map(seen)[:, :, 3], maps)


def test_attention_of_no_task_is_empty_and_bad_input_is_refused(backbone):
  for look in (mv.token_attention, mv.attention_rollout):
    assert look(backbone, [], pictures()) == {}
    task = random_task(backbone, "a")
    with pytest.raises(DataError, match="floats in"):
      look(backbone, task, pictures()[:, :4])
    with pytest.raises(DataError, match="expected finite values"):
      look(backbone, task, 9 * pictures())
    with pytest.raises(DataError, match="expected finite values"):
      look(backbone, [], 9 * pictures())
    assert look(backbone, task, 9 * pictures(), check=False)["a"]
    with pytest.raises(TaskError, match="another backbone"):
      look(tiny_backbone(seed=1), task, pictures())
    slots = mv.fill_slots(backbone, task)
    with pytest.raises(TaskError, match="another backbone"):
      look(tiny_backbone(seed=1), slots, pictures())


# Overlays.


def test_an_overlay_is_bright_where_the_map_is():
  image = np.full((40, 60, 3), 100, np.uint8)
  heat = np.zeros((4, 6), np.float32)
  heat[1, 4] = 0.5
  alone = mv.overlay(image, heat, opacity=1).astype(int)
  assert alone.shape == (40, 60, 3)
  brightness = alone.sum(-1)
  row, column = np.unravel_index(brightness.argmax(), brightness.shape)
  assert (row // 10, column // 10) == (1, 4)
  assert np.abs(alone[35, 5] - INFERNO[0]).max() <= 1
  # Twice the greatest value as the peak: the middle of the colours.
  flat = mv.overlay(image, heat * 0 + 0.5, peak=1.0, opacity=1)
  assert np.abs(flat.astype(int) - (INFERNO[7] + INFERNO[8]) / 2).max() <= 1
  assert np.array_equal(mv.overlay(image, heat, opacity=0), image)
  half = mv.overlay(image, heat, opacity=0.5).astype(int)
  assert np.abs(half - (alone + image) / 2).max() <= 1
  # Where nothing is, all is dark, and nothing is divided by nothing.
  dark = mv.overlay(image, heat * 0, opacity=1)
  assert np.array_equal(dark, np.broadcast_to(np.uint8(INFERNO[0]), dark.shape))


def test_the_colours_are_those_of_inferno():
  colours = pytest.importorskip("matplotlib").colormaps["inferno"]
  heat = np.linspace(0, 1, 256, dtype=np.float32)[None]
  image = np.zeros((1, 256, 3), np.uint8)
  found = mv.overlay(image, heat, opacity=1)[0].astype(int)
  expected = 255 * np.array(colours.colors)
  assert np.abs(found - expected).max() < 7
  light = np.asarray(Image.fromarray(found[None].astype(np.uint8)).convert("L"))
  assert (np.diff(light[0].astype(int)) >= -1).all()


@pytest.mark.parametrize(
  ("image", "heat", "options", "message"),
  [
    ("cat.jpg", None, {}, "is str, expected uint8"),
    (np.zeros((4, 4, 3)), None, {}, r"float64 \(4, 4, 3\), expected uint8"),
    (np.zeros((0, 4, 3), np.uint8), None, {}, r"uint8 \(0, 4, 3\), expected"),
    (None, np.zeros((2, 2, 2)), {}, r"shape \(2, 2, 2\), expected \(rows"),
    (None, np.full((2, 2), -1), {}, "numbers of at least 0"),
    (None, np.full((2, 2), np.nan), {}, "finite numbers"),
    (None, None, {"opacity": 2}, "opacity is 2 and"),
    (None, None, {"peak": np.inf}, "peak is inf, expected"),
  ],
)
def test_impossible_overlays_are_refused(image, heat, options, message):
  image = np.zeros((4, 4, 3), np.uint8) if image is None else image
  heat = np.ones((2, 2)) if heat is None else heat
  with pytest.raises(DataError, match=message):
    mv.overlay(image, heat, **options)


def test_parents_keep_their_order(backbone, images):
  """JAX sorts the keys of a dictionary."""
  parents = [
    random_task(backbone, name, seed=i) for i, name in enumerate("zab")
  ]
  child = random_task(backbone, "child", attends_to=parents)
  whole = mv.token_attention(backbone, [*parents, child], images)["child"]
  mean = shares.attention_shares(whole)
  joined = shares.join_shares([mean, mean])
  for found in (whole, whole.of_images(slice(1)), mean, joined):
    assert [*found.parent_tokens] == [*found.parent_memory] == ["z", "a", "b"]
