"""Figures of an evaluation: what is drawn is what was counted."""

import itertools

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import scipy.sparse
from matplotlib.backends.backend_agg import FigureCanvasAgg

from memory_vit import plots
from memory_vit.errors import DataError
from memory_vit.evaluation import calibrate

matplotlib.use("Agg")


def drawn(figure):
  """Draws a figure, and returns the boxes of its axes with their texts."""
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  boxes = [axes.get_tightbbox() for axes in figure.axes]
  for box in boxes:  # within the figure, but for the margin of a text
    assert box.min.min() > -4
    assert np.all(box.max < figure.bbox.max + 4)
  return boxes


def test_calibration_by_hand():
  confidence = np.array([0.1, 0.2, 0.5, 0.9, 1.0], np.float32)
  correct = np.array([False, True, False, True, True])
  found = calibrate(confidence, correct, bins=2)
  # A bin ends with its upper bound: 0.5 is in the first.
  assert found.count.tolist() == [3, 2]
  np.testing.assert_allclose(found.confidence, [0.8 / 3, 0.95])
  np.testing.assert_allclose(found.accuracy, [1 / 3, 1])
  gap = 3 / 5 * (1 / 3 - 0.8 / 3) + 2 / 5 * 0.05
  assert found.expected_error == pytest.approx(gap)
  assert found.edges.tolist() == [0, 0.5, 1]


def test_calibration_of_no_examples_is_drawn():
  found = calibrate(np.zeros(0, np.float32), np.zeros(0, bool))
  assert found.count.tolist() == [0] * 15
  assert np.isnan(found.expected_error)
  drawn(plots.calibration_figure(found))


def test_bars_are_the_accuracy_of_bins():
  rng = np.random.default_rng(0)
  confidence = rng.random(500).astype(np.float32)
  found = calibrate(confidence, rng.random(500) < confidence, bins=10)
  figure = plots.calibration_figure(found, "a $\\frac{title")
  above, below = figure.axes
  assert [bar.get_height() for bar in above.patches] == [*found.accuracy]
  assert [bar.get_height() for bar in below.patches] == [*found.count]
  drawn(figure)


@pytest.mark.parametrize(
  "kind", [np.array, scipy.sparse.csr_array, jnp.array, list]
)
def test_cells_are_shares_of_the_class(kind):
  matrix = kind([[3, 1, 0], [0, 0, 0], [0, 5, 5]])
  names = ["a" * 300, "$\\frac{b", "c\n\x1b[2J"]
  figure = plots.confusion_matrix_figure(matrix, names)
  axes = figure.axes[0]
  shares = axes.images[0].get_array()
  np.testing.assert_array_equal(shares.mask, [[0] * 3, [1] * 3, [0] * 3])
  np.testing.assert_array_equal(
    shares.filled(-1), [[0.75, 0.25, 0], [-1] * 3, [0, 0.5, 0.5]]
  )
  numbers = {t.get_position(): t.get_text() for t in axes.texts}
  assert numbers == {(0, 0): "3", (1, 0): "1", (1, 2): "5", (2, 2): "5"}
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["a" * 21 + "...", "$\\frac{b", "c\\n\\x1b[2J"]
  drawn(figure)


def test_neighbours_of_many_classes_are_drawn_together():
  classes = 21_000
  label = np.array([0, 1, 52, 53, 20_999])
  guess = np.array([0, 53, 52, 53, 0])
  matrix = scipy.sparse.coo_array(
    (np.ones(5, int), (label, guess)), shape=(classes, classes)
  )
  names = list(map(str, range(classes)))
  figure = plots.confusion_matrix_figure(matrix, names)
  shares = figure.axes[0].images[0].get_array()
  assert shares.shape == (397, 397)  # 53 to a row
  # Of the three examples of classes 0 to 52, one is taken for class 53.
  np.testing.assert_allclose(shares[0, :2], [2 / 3, 1 / 3])
  assert (shares[1, 1], shares[396, 0]) == (1, 1)
  assert not figure.axes[0].texts
  drawn(figure)


@pytest.mark.parametrize("shape", [(2, 3), (0, 0), (3,)])
def test_confusion_matrix_of_other_classes_is_refused(shape):
  names = ["a"] * (3 if shape != (0, 0) else 0)
  with pytest.raises(DataError, match="the confusion matrix has shape"):
    plots.confusion_matrix_figure(np.zeros(shape), names)


@pytest.mark.parametrize("count", [1, 7, 13])
def test_a_sheet_has_all_mistakes_and_no_overlaps(count):
  images = np.random.default_rng(0).uniform(-1, 1, (count, 8, 8, 3))
  title = "African hunting dog, hyena dog, Cape hunting dog\nnot $cat$\n99 %"
  figure = plots.mistakes_sheet(images, [title] * count)
  assert len(figure.axes) == count
  for axes, image in zip(figure.axes, images, strict=True):
    levels = np.round((image + 1) * 127.5)
    np.testing.assert_array_equal(axes.images[0].get_array(), levels)
    assert axes.get_title() == (
      "African hunting dog,\nhyena dog, Cape...\nnot $cat$\n99 %"
    )
  for a, b in itertools.combinations(drawn(figure), 2):
    assert not a.padded(-0.25).overlaps(b.padded(-0.25))


def test_a_title_of_many_lines_is_cut():
  figure = plots.mistakes_sheet(np.zeros((1, 8, 8, 3)), ["a\n" * 1000])
  assert figure.axes[0].get_title() == "a\na\na"


def test_a_sheet_without_mistakes():
  figure = plots.mistakes_sheet(np.zeros((0, 8, 8, 3)), [])
  assert [text.get_text() for text in figure.texts] == ["no mistakes"]


def test_curves_are_steps():
  curves = [
    (np.array([0.5, 1, 1]), np.array([1, 0.5, 0])),
    (np.array([0.25, 1]), np.array([1, 0])),
  ]
  figure = plots.precision_recall_figure(curves, ["a$\\frac{x" * 9, "b\n"])
  lines = figure.axes[0].lines
  assert {line.get_drawstyle() for line in lines} == {"steps-post"}
  np.testing.assert_array_equal(lines[0].get_xdata(), curves[0][1])
  np.testing.assert_array_equal(lines[1].get_ydata(), curves[1][0])
  [legend] = figure.legends
  assert legend.get_texts()[1].get_text() == "b\\n"
  drawn(figure)


@pytest.mark.parametrize("count", [1, 8])
def test_a_panel_for_each_of_the_first_values(count):
  right = np.random.default_rng(0).random((20, count))
  figure = plots.scatter_figure(
    right, right + 1, ["a$\\frac{x"] * count, ["mm"] * count
  )
  assert len(figure.axes) == min(count, 6)
  points, diagonal = figure.axes[0].lines
  np.testing.assert_array_equal(points.get_ydata(), right[:, 0] + 1)
  np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())
  assert figure.axes[0].get_xlabel() == "true (mm)"
  drawn(figure)
  drawn(plots.scatter_figure(right[:0], right[:0], ["a"] * count))
  with pytest.raises(DataError, match="true values have shape"):
    plots.scatter_figure(right, right[:3], ["a"] * count)
