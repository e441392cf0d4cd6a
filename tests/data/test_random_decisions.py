"""Order, crops and mirroring follow from the seed, in both libraries."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from memory_vit.data import random_decisions
from memory_vit.data.random_decisions import shuffled, uniforms

# Height and width: usual, tiny, elongated, and so long that no window fits.
SHAPES = [(375, 500), (24, 24), (8, 8), (5, 7), (3, 5), (40, 170), (1, 90)]


def windows(numbers, height, width):
  """y, x, height and width of the windows of examples, float64 (n, 4)."""
  return np.array([
    random_decisions.inception_window(np, one, float(height), float(width))
    for one in uniforms(0, numbers)
  ])  # fmt: skip


# --- order --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 10, 1_000])
def test_every_example_comes_once_in_each_epoch(size):
  epochs = shuffled(np.arange(4 * size), size, 0).reshape(4, size)
  np.testing.assert_array_equal(
    np.sort(epochs), np.tile(np.arange(size), (4, 1))
  )


@pytest.mark.parametrize(("size", "seed"), [(1_000, 0), (50_000, 1)])
def test_epochs_and_neighbours_are_independent(size, seed):
  epochs = shuffled(np.arange(4 * size), size, seed).reshape(4, size)
  other = shuffled(np.arange(size), size, seed + 1)
  # Neither among each other nor with the order of the files; the limit is five
  # standard deviations of independent permutations.
  limit = 5 / np.sqrt(size)
  correlations = np.corrcoef(np.vstack([np.arange(size), epochs, other]))
  assert np.abs(correlations - np.eye(6)).max() < limit
  for epoch in epochs:
    assert abs(np.corrcoef(epoch[:-1], epoch[1:])[0, 1]) < limit


def test_an_order_does_not_depend_on_what_is_asked_for_together():
  numbers = np.arange(5, 40)
  together = shuffled(numbers, 10, 3)
  for number, record in zip(numbers, together, strict=True):
    assert shuffled([number], 10, 3).tolist() == [record]


@pytest.mark.versions
def test_orders_and_uniforms_are_those_of_other_machines():
  """Stored numbers: another NumPy must not continue a run in another order."""
  assert shuffled(np.arange(10, 20), 10, 7).tolist() == [
    3,
    9,
    1,
    6,
    2,
    5,
    4,
    8,
    0,
    7,
  ]
  assert uniforms(7, [2**40])[0, :3].tolist() == [
    0.21774338383180913, 0.5858935113466756, 0.20439977409127041
  ]  # fmt: skip


# --- uniforms -----------------------------------------------------------------


def test_uniforms_follow_from_the_number_alone():
  numbers = [4, 5, 6, 2**40, 0, 0, 7]
  together = uniforms(1, numbers)
  for number, found in zip(numbers, together, strict=True):
    np.testing.assert_array_equal(uniforms(1, [number])[0], found)
  assert len(np.unique(together, axis=0)) == 6
  assert uniforms(1, []).shape == (0, random_decisions.UNIFORMS)


def test_uniforms_are_uniform_and_uncorrelated():
  """Of an example, of examples that follow each other, and of two seeds."""
  count = 20_000
  found = uniforms(0, range(count))
  assert found.min() >= 0
  assert found.max() < 1
  columns = [*found.T, *found[1:].T, *uniforms(1, range(count)).T]
  columns = np.array([column[: count - 1] for column in columns])
  assert np.abs(columns.mean(axis=1) - 0.5).max() < 5 * np.sqrt(1 / 12 / count)
  assert np.abs(np.corrcoef(columns) - np.eye(60)).max() < 5 / np.sqrt(count)


# --- windows ------------------------------------------------------------------


@pytest.mark.slow
def test_tensorflow_and_numpy_choose_equal_windows_and_places():
  count, rng = 100_000, np.random.default_rng(0)
  shapes = np.exp(rng.uniform(0, np.log(5000), (count, 2))).round()
  numbers = uniforms(0, range(count))

  def choose(ops, uniforms, shape):
    height, width = shape[0], shape[1]
    window = random_decisions.inception_window(ops, uniforms, height, width)
    place = random_decisions.random_place(ops, uniforms, height, width)
    return ops.stack([*window, *place])

  examples = tf.data.Dataset.from_tensor_slices((numbers, shapes))
  in_graph = examples.map(
    lambda one, shape: choose(tf, one, shape), num_parallel_calls=2
  )
  expected = [
    choose(np, one, shape) for one, shape in zip(numbers, shapes, strict=True)
  ]
  np.testing.assert_array_equal([*in_graph.as_numpy_iterator()], expected)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_windows_are_parts_of_the_promised_size(height, width):
  y, x, rows, columns = windows(range(500), height, width).T
  assert np.all((y >= 0) & (y + rows <= height))
  assert np.all((x >= 0) & (x + columns <= width))
  whole = (rows == height) & (columns == width)
  assert np.all((rows * columns >= 0.05 * height * width) | whole)
  # Rounded to whole pixels.
  assert np.all((columns >= 0.75 * rows - 0.5) | whole)
  assert np.all((columns <= 4 / 3 * rows + 0.5) | whole)
  if max(height, width) > 30 * min(height, width):
    assert np.all(whole)
  else:
    assert not np.any((rows == 0) | (columns == 0))
    assert len(np.unique([y, x, rows, columns], axis=1).T) > 10


def test_windows_reach_all_ends_of_an_image():
  y, x, rows, columns = windows(range(2_000), 24, 30).T
  assert y.min() == 0
  assert x.min() == 0
  assert (y + rows)[rows < 24].max() == 24
  assert (x + columns)[columns < 30].max() == 30


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), SHAPES[:4])
def test_windows_are_distributed_as_tensorflows(height, width):
  """By means of area, aspect, their squares, and the middle of windows."""
  count = 20_000

  def choose(seed):
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      (height, width, 3), tf.zeros((0, 0, 4)), seed=tf.stack([0, seed]),
      min_object_covered=0.0, aspect_ratio_range=(3 / 4, 4 / 3),
      area_range=(0.05, 1.0), use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    return tf.concat([begin[:2], size[:2]], axis=0)

  seeds = tf.data.Dataset.range(count, output_type=tf.int32)
  theirs = seeds.map(choose, num_parallel_calls=2).as_numpy_iterator()
  theirs = np.array(list(theirs), np.float64)
  # Theirs never reaches the last row and the last column.
  theirs[:, :2] += 0.5 * (theirs[:, 2:] < (height, width))
  found = windows(range(count), height, width)
  pairs = zip(
    measures(found, height, width),
    measures(theirs, height, width),
    strict=True,
  )
  for ours, other in pairs:
    error = np.sqrt((ours.var() + other.var()) / count)
    assert abs(ours.mean() - other.mean()) < 4 * error


def measures(windows, height, width):
  """Area, aspect, their squares, and the middle, relative to the image."""
  y, x, rows, columns = windows.T
  area, aspect = rows * columns / (height * width), columns / rows
  middle = (y + rows / 2) / height, (x + columns / 2) / width
  return area, area**2, aspect, aspect**2, *middle


def test_half_of_the_examples_are_mirrored():
  mirrored = random_decisions.is_mirrored(uniforms(0, range(10_000)).T)
  assert abs(mirrored.mean() - 0.5) < 0.025
  pairs = itertools.pairwise(mirrored)
  assert abs(np.mean([a == b for a, b in pairs]) - 0.5) < 0.025
