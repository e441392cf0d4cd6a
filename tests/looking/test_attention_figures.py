"""Figures of attention and of removed memory: what is drawn is there."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import memory_vit as mv
from memory_vit import looking
from memory_vit.errors import DataError
from memory_vit.looking.attention_shares import (
  AttentionShares,
  attention_shares,
  join_shares,
)
from memory_vit.looking.cell_removal import CellRemoval, Removals


def draw(figure):
  """Pixels of a figure, (h, w, 4)."""
  FigureCanvasAgg(figure).draw()
  return np.asarray(figure.canvas.buffer_rgba())


def pictures(count=3):
  images = np.random.default_rng(5).uniform(-1, 1, (count, 8, 8, 3))
  return images.astype(np.float32)


CONFIG = mv.ViTConfig(
  width=8, depth=2, mlp_dim=8, num_heads=2, patch_size=2, image_size=8
)


def looks(name="a", cells=2, parents=None, *, images=3, seed=0):
  """Attention of each head that sums to 1, of its mean, and a rollout."""
  rng, l, h, s = np.random.default_rng(seed), CONFIG.depth, 2, 17
  parents = parents or {}
  parts = [s, cells, 1, *(1 + m for m in parents.values())]
  weights = rng.random((images, l, h, sum(parts))).astype(np.float32)
  weights /= weights.sum(-1, keepdims=True)
  ends = np.cumsum(parts)[:-1]

  def attention(weights):
    image, memory, token, *others = np.split(weights, ends, axis=-1)
    read = dict(zip(parents, others, strict=True))
    return mv.TokenAttention(
      name, image, memory, token[..., 0],
      {k: a[..., 0] for k, a in read.items()},
      {k: a[..., 1:] for k, a in read.items()}, CONFIG,
    )  # fmt: skip

  mean = weights.mean(2)
  rollout = mv.AttentionRollout(
    name, mean[..., :s], mean[..., s], mean[..., -1], CONFIG
  )
  return attention(mean), rollout, attention(weights)


@pytest.fixture
def seen():
  """Attention, rollouts and attention of heads; "b" reads "a"."""
  each = {"a": looks("a"), "b": looks("b", 3, {"a": 2}, seed=1)}
  return [{name: of[i] for name, of in each.items()} for i in range(3)]


def test_shares_add_up_and_are_means(seen):
  for name in "ab":
    attention = seen[0][name]
    shares = attention_shares(attention)
    parts = (a.reshape(2, -1).sum(-1) for a in jax.tree.leaves(shares))
    np.testing.assert_allclose(sum(parts), 1, atol=1e-6)
    np.testing.assert_allclose(
      shares.memory, attention.memory.mean(0), atol=1e-7
    )
    np.testing.assert_allclose(shares.token, attention.token.mean(0), atol=1e-7)
    patches = mv.patch_map(attention).sum((-2, -1)).mean(0)
    np.testing.assert_allclose(shares.patches, patches, atol=1e-6)
    assert (shares.images, shares.task) == (3, name)
    # Of each head: the same means.
    heads = attention_shares(seen[2][name])
    for field in ("patches", "backbone_tokens", "token", "memory"):
      np.testing.assert_allclose(
        getattr(heads, field), getattr(shares, field), atol=1e-6
      )
  assert list(attention_shares(seen[0]["b"]).parent_memory) == ["a"]


def test_batches_of_other_sizes_count_by_their_images():
  """The mean over batches of four images and of one is that over five."""
  (whole, _, _) = looks("b", 3, {"a": 2}, images=5)

  def part(rows):
    return attention_shares(
      mv.TokenAttention(
        "b", whole.image[rows], whole.memory[rows], whole.token[rows],
        {"a": whole.parent_tokens["a"][rows]},
        {"a": whole.parent_memory["a"][rows]}, CONFIG,
      )
    )  # fmt: skip

  joined = join_shares([part(slice(4)), part(slice(4, 5))])
  expected = attention_shares(whole)
  assert joined.images == 5
  for field in ("patches", "backbone_tokens", "token", "memory"):
    np.testing.assert_allclose(
      getattr(joined, field), getattr(expected, field), atol=1e-6
    )
  for field in ("parent_tokens", "parent_memory"):
    np.testing.assert_allclose(
      getattr(joined, field)["a"], getattr(expected, field)["a"], atol=1e-6
    )


def test_shares_of_no_image_are_refused(seen):
  empty = mv.TokenAttention(
    "a", np.zeros((0, 2, 17), np.float32), np.zeros((0, 2, 2), np.float32),
    np.zeros((0, 2), np.float32), {}, {}, seen[0]["a"].config,
  )  # fmt: skip
  with pytest.raises(DataError, match="no image"):
    attention_shares(empty)


def test_overlays_have_one_scale_and_every_layer(seen):
  attention, rollout = seen[0]["a"], seen[1]["a"]
  figure = looking.attention_overlays(pictures(), attention, rollout)
  shown = [axes for axes in figure.axes if axes.images]
  assert len(shown) == 3 * (1 + 2 + 1)
  titles = [axes.get_title() for axes in shown[:4]]
  assert titles == ["image", "layer 1", "layer 2", "rollout"]
  # The first panel is the image as it is.
  first = np.asarray(shown[0].images[0].get_array())
  step = len(first) // 8
  expected = np.round((pictures()[0] + 1) * 127.5).astype(np.uint8)
  np.testing.assert_array_equal(first[::step, ::step], expected)
  bars = [axes for axes in figure.axes if axes not in shown]
  # The first bar is drawn last, and so lies next to the panels.
  limits = [axes.get_ylim()[1] for axes in reversed(bars)]
  maps = mv.patch_map(attention)
  assert limits[0] == pytest.approx(maps.max())
  assert limits[1] == pytest.approx(mv.patch_map(rollout)[:, -1].max())
  assert draw(figure).std() > 0


@pytest.mark.slow
def test_every_row_has_its_headers_and_the_image_stands_alone():
  """Of 12 layers, which are wrapped: where a layer is, and of which image."""
  config = dataclasses.replace(CONFIG, depth=12)
  weights = np.random.default_rng(0).random((3, 12, 17), np.float32)
  none = np.zeros((3, 12, 0), np.float32)
  attention = mv.TokenAttention(
    "a", weights, none, weights[..., 0], {}, {}, config
  )
  titles = [
    looking.answer_title("car", 0.79, name) for name in ("$x$", "b", "c")
  ]
  figure = looking.attention_overlays(pictures(), attention, titles=titles)
  draw(figure)
  panels = [axes for axes in figure.axes if axes.images]
  layers = [f"layer {i + 1}" for i in range(12)]
  found = [axes.get_title() for axes in panels]
  assert found == [
    each for title in titles for each in (title, *layers)
  ]  # fmt: skip
  assert titles[0] == "$x$\n→ car 79 %"
  columns = {axes.get_position().x0 for axes in panels}
  of_images = {axes.get_position().x0 for axes in panels[::13]}
  assert len(of_images) == 1
  assert min(columns) in of_images
  for i, axes in enumerate(panels):
    assert (axes.get_position().x0 in of_images) == (i % 13 == 0)
  boxes = [axes.title.get_window_extent() for axes in panels]
  assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
  (bar,) = [axes for axes in figure.axes if axes not in panels]
  assert bar.get_window_extent().height < 4.1 * figure.dpi


def test_a_patch_has_one_colour():
  """A map that is smoothed shows details that there are not."""
  heat = np.random.default_rng(0).random((4, 4), np.float32)
  grey = np.full((32, 32, 3), 128, np.uint8)
  shown = mv.overlay(grey, heat).reshape(4, 8, 4, 8, 3)
  assert (shown == shown[:, :1, :, :1]).all()


def test_long_classes_leave_their_probability():
  title = looking.answer_title("a" * 99, 0.5, "b" * 99)
  assert title.endswith(" 50 %")
  assert max(map(len, title.split("\n"))) < 25


def test_maps_of_heads_are_drawn_as_their_mean(seen):
  figures = [
    looking.attention_overlays(pictures(), each["a"])
    for each in (seen[0], seen[2])
  ]
  for one, other in zip(*(figure.axes for figure in figures), strict=True):
    for a, b in zip(one.images, other.images, strict=True):
      gap = np.abs(
        np.asarray(a.get_array(), int) - np.asarray(b.get_array(), int)
      )
      assert gap.max() <= 1


@pytest.mark.slow
def test_equal_tasks_do_not_differ(seen):
  rollouts = seen[1]["a"], seen[1]["a"]
  figure = looking.attention_difference(
    pictures(), seen[0]["a"], seen[0]["a"], rollouts
  )
  shown = [axes for axes in figure.axes if axes.images]
  assert len(shown) == 3 * 4
  for i, axes in enumerate(shown):
    assert not axes.collections  # no outline
    if i % 4:  # nothing lies over the grey picture
      array = np.asarray(axes.images[0].get_array())
      np.testing.assert_array_equal(array, array[..., :1].repeat(3, -1))
  draw(figure)


def test_a_difference_is_orange_where_the_first_looks_more(seen):
  a, b = seen[0]["a"], seen[0]["b"]
  figure = looking.attention_difference(pictures()[:1], *(
    mv.TokenAttention(
      x.task, x.image[:1], x.memory[:1], x.token[:1], {}, {}, x.config
    ) for x in (a, b)
  ))  # fmt: skip
  each = [mv.patch_map(x)[0] for x in (a, b)]
  maps = np.subtract(*(m / m.sum((-2, -1), keepdims=True) for m in each))
  layer, row, column = np.unravel_index(np.abs(maps).argmax(), maps.shape)
  array = np.asarray(figure.axes[1 + layer].images[0].get_array())
  step = len(array) // 4
  red, _, blue = array[row * step + step // 2, column * step + step // 2]
  assert (red > blue) == (maps[layer, row, column] > 0)
  assert figure.get_suptitle().split("\n") == [
    "orange, solid: a attends more", "purple, dashed: b attends more",
  ]  # fmt: skip
  # The scale is symmetric. How much goes to memory says nothing of it.
  np.testing.assert_allclose(maps.sum((-2, -1)), 0, atol=1e-6)
  low, high = figure.axes[-1].get_ylim()
  assert low == -high == pytest.approx(-np.abs(maps).max())


def test_bars_of_shares_reach_one(seen):
  figure = looking.memory_shares_figure(seen[0]["b"])
  bars, heat = figure.axes[:2]
  tops = [p.get_y() + p.get_height() for p in bars.patches]
  assert max(tops) == pytest.approx(1, abs=1e-6)
  shares = attention_shares(seen[0]["b"])
  np.testing.assert_allclose(
    np.asarray(heat.images[0].get_array()), 100 * shares.memory
  )
  draw(figure)


def test_a_task_without_memory_has_no_cells_to_draw():
  shares = looks(cells=0)[0]
  figure = looking.memory_shares_figure(shares)
  assert len(figure.axes) == 1
  assert not any(
    "memory" in text.get_text() for text in figure.legends[0].texts
  )


def removal(lost, gained, examples=500):
  def part(a, b):
    return Removals(np.asarray(a), np.asarray(b), examples)

  none = np.zeros(len(lost), int)
  return CellRemoval(
    "a", "digits:5-9", "$t$", examples, 0, 0.93,
    part(lost, gained), part(none, none), part(0, 0),
  )  # fmt: skip


def test_removal_marks_what_chance_hardly_makes():
  figure = looking.cell_removal_figure(
    removal([[60, 4], [3, 0]], [[2, 3], [0, 0]])
  )
  axes = figure.axes[0]
  array = np.asarray(axes.images[0].get_array())
  np.testing.assert_allclose(array, [[-11.6, -0.2, 0], [-0.6, 0, 0]])
  found = {t.get_text().split("\n")[0]: t.get_fontweight() for t in axes.texts}
  assert found == {
    "−11.6": "bold", "−0.2": "normal", "−0.6": "normal", "0.0": "normal",
  }  # fmt: skip
  assert figure.get_suptitle().split("\n") == [
    "a: top-1 93.0 % on 500 images", "digits:5-9 $t$",
    "without any memory 0.0 ± 0.0 points",
  ]  # fmt: skip
  assert not figure._suptitle.get_parse_math()  # "$" is of the name
  draw(figure)


def test_removal_that_changes_nothing_can_be_drawn():
  figure = looking.cell_removal_figure(removal([[0]], [[0]]))
  assert np.isfinite(figure.axes[0].images[0].get_clim()).all()
  draw(figure)


def labels_of(axes):
  """Boxes of the labels that are drawn at an axis, one list each."""
  return [
    [
      label.get_window_extent()
      for label in axis.get_ticklabels()
      if label.get_text()
    ]
    for axis in (axes.xaxis, axes.yaxis)
  ]


def assert_apart(figure):
  """No two labels of ticks touch, nor leave the figure."""
  draw(figure)
  for axes in figure.axes:
    for boxes in labels_of(axes):
      for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
      assert all(box.x0 >= 0 for box in boxes)
      assert all(box.x1 <= figure.bbox.width for box in boxes)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [12, 13, 20, 64, 256])
def test_twelve_layers_and_twenty_cells_do_not_overlap(cells):
  rng = np.random.default_rng(0)
  lost, gained = rng.poisson(3, (2, 12, cells))
  found = removal(lost, gained)
  figure = looking.cell_removal_figure(found)
  assert bool(figure.axes[0].texts) == (cells == 12)
  assert_apart(figure)
  labels = [t.get_text() for t in figure.axes[0].get_xticklabels()]
  assert labels[0] == "1"
  assert labels[-1] == "all"
  rng = np.random.default_rng(0)
  shares = AttentionShares(
    "a", 5, rng.random(40), rng.random(40), rng.random(40),
    rng.random((40, cells)), {}, {},
  )  # fmt: skip
  assert_apart(looking.memory_shares_figure(shares))


def test_what_chance_hardly_makes_is_marked_of_many_cells_too():
  lost, gained = np.zeros((2, 3, 30), int)
  lost[1, 4] = lost[2, 29] = 90
  found = removal(lost, gained)
  assert found.significant(found.cells).sum() == 2
  (axes, *_) = looking.cell_removal_figure(found).axes
  (dots,) = axes.collections
  assert sorted(map(tuple, dots.get_offsets())) == [(4, 1), (29, 2)]
  assert "dot: significant" in axes.get_xlabel()
  assert "bold" not in axes.get_xlabel()
  # Few cells have numbers in bold, and no dots.
  (few, *_) = looking.cell_removal_figure(
    removal(lost[:, :5], gained[:, :5])
  ).axes
  assert not few.collections
  assert "dot" not in few.get_xlabel()
  assert "bold: significant" in few.get_xlabel()
  assert "±: standard error" in few.get_xlabel()


def test_rollouts_of_other_images_are_refused(seen):
  looked, rolled = seen[0]["a"], seen[1]["a"]
  other = looks("a", images=2)[1]
  said = "images is 3, but attention, rollouts or titles are for 2"
  with pytest.raises(DataError, match=said):
    looking.attention_overlays(pictures(), looked, other)
  with pytest.raises(DataError, match=said):
    looking.attention_difference(pictures(), looked, looked, (rolled, other))
  with pytest.raises(DataError, match=said):
    looking.attention_difference(pictures(), looked, looks(images=2)[0])


@pytest.mark.parametrize(
  "images", [pictures()[0], pictures(2), pictures()[..., :1]]
)
def test_mismatched_images_are_refused(seen, images):
  with pytest.raises(DataError, match="images"):
    looking.attention_overlays(images, seen[0]["a"])
  with pytest.raises(DataError, match="images"):
    looking.attention_difference(images, seen[0]["a"], seen[0]["b"])


def test_long_names_do_not_leave_the_figure():
  shares = looks("a" * 64)[0]
  figure = looking.memory_shares_figure(shares)
  draw(figure)
  box = figure._suptitle.get_window_extent()
  assert box.x0 >= 0
  assert box.x1 <= figure.bbox.width
