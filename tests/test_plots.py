"""Figures: what is drawn is what was given."""

import itertools
import warnings

import matplotlib
import numpy as np
import pytest
import tensorflow as tf
from matplotlib.artist import Artist

from memory_vit import plots
from memory_vit.errors import DataError, MemoryVitError, TrainingError
from memory_vit.kinds.scores import Scores
from memory_vit.plots import rasterize
from memory_vit.run_result import RunResult, SweepResult, TrialResult
from memory_vit.train.tensorboard import EventFile

pytestmark = pytest.mark.versions

matplotlib.use("Agg")


def write(workdir, tag, values, first=1):
  """One event file, with values of the steps first, first + 1, ..."""
  writer = EventFile(workdir)
  for step, value in enumerate(values, first):
    writer.write_scalars(step, {tag: value})
  writer.close()


def pixels(figure):
  """Draws a figure: (h, w, 4), bytes."""
  figure.canvas.draw()
  return np.asarray(figure.canvas.buffer_rgba())


@pytest.fixture
def agg():
  """Gives a figure the canvas that can be drawn without a window."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  def attach(figure):
    FigureCanvasAgg(figure)
    return figure

  return attach


def random_images(count, size=8):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (count, size, size, 3)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 5, 8, 9, 24])
def test_grid_shows_every_image_unchanged(count, agg):
  images, titles = random_images(count), [f"title {i}" for i in range(count)]
  figure = plots.image_grid(images, titles)
  assert len(figure.axes) == count
  for axes, image, title in zip(figure.axes, images, titles, strict=True):
    (shown,) = axes.images
    levels = np.round((image + 1) * 127.5)
    np.testing.assert_array_equal(shown.get_array(), levels)
    assert axes.get_title() == title
  assert pixels(agg(figure)).std() > 0


def test_contrast_is_not_stretched():
  """A grey image is grey, and not black because it is the darkest."""
  image = np.full((1, 2, 2, 3), -0.5)
  (shown,) = plots.image_grid(image, [""]).axes[0].images
  assert np.all(np.asarray(shown.get_array()) == 64)


def test_images_and_titles_do_not_overlap(agg):
  titles = ["first line\nsecond line"] * 20
  figure = agg(plots.image_grid(random_images(20), titles))
  figure.canvas.draw()
  boxes = [axes.get_tightbbox() for axes in figure.axes]
  for a, b in itertools.combinations(boxes, 2):
    # A quarter of a pixel, as boxes that touch are rounded.
    assert not a.padded(-0.25).overlaps(b.padded(-0.25))


@pytest.mark.parametrize("lines", [1, 5])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_the_first_titles_are_not_cut(count, lines, agg):
  """Alone, in one row and in two; of one line, and as many as a mistake has."""
  titles = [
    "\n".join(["Ål", "label", "label", "label", "label"][:lines])
  ] * count
  shown = pixels(agg(plots.image_grid(random_images(count), titles)))
  assert shown[0, :, :3].min() == 255


def test_names_of_classes_do_not_overlap(agg):
  """They are shortened, and are neither formulas nor lines of their own."""
  names = ["golden retriever puppy", "siberian husky adult", "$\\frac{x",
           "a\x1b[2J", "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysilio",
           ""] * 3  # fmt: skip
  figure = agg(plots.image_grid(random_images(18), names))
  figure.canvas.draw()
  boxes = [axes.get_tightbbox() for axes in figure.axes]
  for a, b in itertools.combinations(boxes, 2):
    assert not a.padded(-0.25).overlaps(b.padded(-0.25))
  titles = [axes.get_title() for axes in figure.axes]
  assert titles[:4] == [
    "golden\nretriever puppy", "siberian husky\nadult", "$\\frac{x",
    "a\\x1b[2J",
  ]  # fmt: skip
  assert titles[4].count("\n") == 1


def test_uint8_images_are_shown_unchanged():
  levels = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3)
  (shown,) = plots.image_grid(levels, [""]).axes[0].images
  np.testing.assert_array_equal(shown.get_array(), levels[0])


def test_labels_of_lines_are_plain_text(agg):
  """Also those that matplotlib would take for formulas, or leave out."""
  odd = "$\\frac{x"
  points = [(1.0, 0.5, 0.25, 0.75), (2.0, 0.5, 0.5, 0.5)]
  figure = plots.lines_figure(
    {odd: points, "_hidden": points, "a\nb": points},
    title=odd, xlabel=odd, ylabel=odd,
  )  # fmt: skip
  agg(figure).canvas.draw()
  (axes,) = figure.axes
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == [odd, "_hidden", "a\\nb"]
  texts = (axes.get_title(), axes.get_xlabel(), axes.get_ylabel())
  assert texts == (odd,) * 3
  none = plots.lines_figure({}, title="", xlabel="", ylabel="")
  assert none.axes[0].get_legend() is None


def test_missing_glyphs_are_logged_in_one_line(caplog, recwarn):
  figure = plots.image_grid(random_images(2), ["犬", "犬猫"])

  class Odd(Artist):
    def draw(self, renderer):
      warnings.warn("of something else", UserWarning, stacklevel=2)

  figure.add_artist(Odd())
  warnings.simplefilter("default")
  rasterize.rasterize(figure)
  assert caplog.messages == [
    "2 letters of a figure are drawn as boxes: its font lacks them"
  ]
  assert [str(each.message) for each in recwarn] == ["of something else"]


@pytest.mark.parametrize(
  ("images", "titles"),
  [
    (random_images(2), ["one"]),
    (random_images(2)[0], ["one"]),
    (random_images(2)[..., :1], ["one", "two"]),
    (random_images(0), []),
  ],
)
def test_unusable_grids_are_refused(images, titles):
  with pytest.raises(DataError):
    plots.image_grid(images, titles)


def test_scalars_are_read_as_written(tmp_path):
  values = np.linspace(3, 1, 50)  # more than TensorBoard keeps by default
  write(tmp_path, "task/train/loss", values)
  write(tmp_path, "task/validation/top1", [0.5], first=50)
  scalars = plots.read_scalars(tmp_path)
  assert set(scalars) == {"task/train/loss", "task/validation/top1"}
  steps, read = scalars["task/train/loss"]
  assert steps.tolist() == list(range(1, 51))
  np.testing.assert_allclose(read, values, rtol=1e-6)
  steps, read = scalars["task/validation/top1"]
  assert (steps.tolist(), read.tolist()) == ([50], [0.5])


def test_events_other_than_scalars_are_left_out(tmp_path):
  with tf.summary.create_file_writer(str(tmp_path)).as_default(1):
    tf.summary.scalar("loss", 1.0)
    tf.summary.text("note", "text")
  assert set(plots.read_scalars(tmp_path)) == {"loss"}


@pytest.mark.fault("cut-events")
def test_truncated_events_are_read_up_to_the_last(tmp_path):
  """All but the last are read, and what the resumed run writes."""
  write(tmp_path, "loss", [5.0, 4.0, 3.0])
  (file,) = tmp_path.iterdir()
  file.write_bytes(file.read_bytes()[:-7])
  steps, values = plots.read_scalars(tmp_path)["loss"]
  assert (list(steps), list(values)) == ([1, 2], [5.0, 4.0])
  write(tmp_path, "loss", [4.0, 3.0, 2.0], first=2)
  steps, values = plots.read_scalars(tmp_path)["loss"]
  assert (list(steps), list(values)) == ([1, 2, 3, 4], [5.0, 4.0, 3.0, 2.0])


@pytest.mark.fault("cut-events")
@pytest.mark.parametrize("old_name", ["events.out.tfevents.0",
                                      "events.out.tfevents.9"])  # fmt: skip
def test_steps_repeated_by_a_resumed_run_are_read_once(tmp_path, old_name):
  """The last time counts, however the files are called."""
  write(tmp_path, "loss", [5, 4, 3, 2])
  (file,) = tmp_path.iterdir()
  file.rename(tmp_path / old_name)
  write(tmp_path, "loss", [30, 20, 10], first=3)
  steps, values = plots.read_scalars(tmp_path)["loss"]
  assert steps.tolist() == [1, 2, 3, 4, 5]
  assert values.tolist() == [5, 4, 30, 20, 10]


def test_curves_show_the_numbers(tmp_path, agg):
  write(tmp_path, "train/loss", [2.0, 1.0])
  write(tmp_path, "train/accuracy", [0.25, 0.5])
  write(tmp_path, "validation/top1", [0.75], first=2)
  figure = plots.training_curves(tmp_path)
  loss, accuracy = figure.axes
  (line,) = loss.lines  # no validation loss was written
  assert line.get_xydata().tolist() == [[1, 2], [2, 1]]
  train, validation = accuracy.lines
  assert train.get_xydata().tolist() == [[1, 0.25], [2, 0.5]]
  assert validation.get_xydata().tolist() == [[2, 0.75]]
  assert validation.get_label() == "validation"
  assert pixels(agg(figure)).std() > 0


def test_curves_without_accuracy_have_no_empty_legend(tmp_path):
  """A run may have been stopped before: no warning, and no empty legend."""
  write(tmp_path, "train/loss", [2.0, 1.0])
  loss, accuracy = plots.training_curves(tmp_path).axes
  assert loss.get_legend() is not None
  assert accuracy.get_legend() is None


def test_missing_events_are_refused(tmp_path):
  for path in (tmp_path, tmp_path / "missing"):
    with pytest.raises(TrainingError, match="no TensorBoard events"):
      plots.training_curves(path)
  assert issubclass(TrainingError, MemoryVitError)


def test_events_without_the_loss_are_refused(tmp_path):
  write(tmp_path, "train/loss_of_nothing", [1.0])
  with pytest.raises(TrainingError, match=r"no tag train/loss, only"):
    plots.training_curves(tmp_path)


def test_sweep_is_drawn_by_cells_and_learning_rate(agg):
  def entry(rate, cells, val, test):
    return TrialResult(
      name="digits", learning_rate=rate, cells=cells, val=Scores(score=val),
      test=Scores(score=test),
    )  # fmt: skip

  tasks = (
    entry(0.1, 5, 0.75, None),
    entry(0.01, 5, 0.25, None),
    entry(0.1, 0, 0.5, 0.5),
    entry(0.1, 0, 0.25, 0.5),  # another seed
    entry(0.1, 1, 0.625, None),
  )
  sweep = SweepResult(task="digits")
  result = RunResult(tasks=tasks, sweep=sweep, wall_seconds=1.0)
  figure = plots.sweep_figure(result)
  validation, test = figure.axes
  lines = {c.get_label(): c.lines[0] for c in validation.containers}
  assert list(lines) == ["0 cells", "1 cell", "5 cells"]
  assert len({line.get_marker() for line in lines.values()}) == 3
  assert lines["0 cells"].get_xydata().tolist() == [[0.1, 0.375]]
  assert lines["5 cells"].get_xydata().tolist() == [[0.01, 0.25], [0.1, 0.75]]
  assert len(test.containers) == 1
  assert pixels(agg(figure)).std() > 0


def test_sweep_shows_the_standard_error_of_its_scores(agg):
  """A bar of one standard error on each side; a tick at each learning rate."""
  tasks = tuple(
    TrialResult(name=f"t{rate}", learning_rate=rate, cells=1,
                val=Scores(score=0.5, examples=25),
                test=Scores(score=0.5, examples=100))
    for rate in (0.1, 0.3)
  )  # fmt: skip
  result = RunResult(tasks=tasks, sweep=SweepResult(task="t"), wall_seconds=1.0)
  figure = plots.sweep_figure(result)
  pixels(agg(figure))
  for axes, error in zip(figure.axes, (0.1, 0.05), strict=True):
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.1", "0.3"]
    assert not axes.get_xticklabels(minor=True)
    (bars,) = axes.containers[0].lines[2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, [[0.5 - error, 0.5 + error]] * 2)
