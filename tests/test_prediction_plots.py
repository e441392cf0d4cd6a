"""Figures of predictions and of times: what is drawn is what was given."""

import itertools

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import memory_vit as mv
from memory_vit import evaluation, plots
from memory_vit.errors import ConfigError, DataError
from memory_vit.evaluation import timing

NAMES = {"old": ("0", "1"), "new": ("1", "2", "3")}


def random_images(count, size=8):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (count, size, size, 3)).astype(np.float32)


def of_class(index, classes):
  """Logits of one image, with 90 % for a class."""
  rest = 0.1 / (classes - 1)
  return np.log([0.9 if i == index else rest for i in range(classes)])


def lines_of(figure):
  """The lines under each image."""
  return [
    [text.get_text() for text in axes.texts] for axes in figure.axes[1::2]
  ]


def test_predictions_of_every_task_are_under_each_image():
  logits = {
    "old": np.stack([of_class(1, 2), of_class(0, 2), of_class(0, 2)]),
    "new": np.stack([of_class(0, 3), of_class(2, 3), of_class(1, 3)]),
    "unshown": np.zeros((3, 9)),
  }
  images = random_images(3)
  figure = plots.prediction_grid(images, logits, NAMES, ["1", "2", "0"])
  assert lines_of(figure) == [
    ["is: 1", "✓ old: 1 90%", "✓ new: 1 90%"],  # both know it
    ["is: 2", "old: 0 90%", "✗ new: 3 90%"],  # one cannot be right
    ["is: 0", "✓ old: 0 90%", "new: 2 90%"],
  ]
  pixels = np.round((images + 1) * 127.5).astype(np.uint8)
  of_pixels = plots.prediction_grid(pixels, logits, NAMES)
  for drawn in (figure, of_pixels):
    for axes, image in zip(drawn.axes[::2], pixels, strict=True):
      (shown,) = axes.images
      np.testing.assert_array_equal(shown.get_array(), image)


def test_labels_and_values_are_drawn_by_their_kind():
  names = {"tags": ("even", "prime"), "size": ("angle",)}
  kinds = {
    "tags": mv.TaskKind(name="labels"),
    "size": mv.TaskKind(name="values", mean=(10,), std=(2,), units=("mm",)),
  }
  logits = {
    "tags": np.array([[np.log(3), -1], [-1, -1]]), "size": np.ones((2, 1))
  }  # fmt: skip
  figure = plots.prediction_grid(
    random_images(2), logits, names, ["prime", "even"], kinds
  )
  assert lines_of(figure) == [
    ["is: prime", "tags: even 75.0 %", "size: angle 12 mm"],
    ["is: even", "tags: no label", "size: angle 12 mm"],
  ]


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_outputs_are_not_shown_as_predictions(value):
  """Of what is no number the first class would be the best."""
  logits = {
    "old": np.stack([of_class(1, 2), of_class(0, 2)]),
    "new": np.stack([of_class(0, 3), of_class(0, 3)]),
  }
  logits["old"][1, 0] = logits["new"][1, 2] = value
  figure = plots.prediction_grid(random_images(2), logits, NAMES, ["1", "0"])
  assert lines_of(figure) == [
    ["is: 1", "✓ old: 1 90%", "✓ new: 1 90%"],
    ["is: 0", "✗ old: not finite", "✗ new: not finite"],
  ]
  figure = plots.prediction_grid(random_images(2), logits, {"new": "123"})
  assert lines_of(figure) == [["1 90%"], ["✗ not finite"]]


def test_names_may_be_letters_and_truths_an_array():
  """ "01" is no class of "0123", whose classes are its letters."""
  logits = {"old": np.stack([of_class(1, 4), of_class(3, 4)])}
  figure = plots.prediction_grid(
    random_images(2), logits, {"old": "0123"}, np.array(["01", "3"])
  )
  assert lines_of(figure) == [["is: 01", "1 90%"], ["is: 3", "✓ 3 90%"]]
  for none in ([], np.array([], str)):
    figure = plots.prediction_grid(
      random_images(2), logits, {"old": "0123"}, none
    )
    assert lines_of(figure) == [["1 90%"], ["3 90%"]]


def test_single_task_is_unnamed_and_truth_optional():
  figure = plots.prediction_grid(
    random_images(1), {"new": of_class(2, 3)[None]}, {"new": NAMES["new"]}
  )
  assert lines_of(figure) == [["3 90%"]]


@pytest.mark.parametrize("count", [1, 6, 13])
def test_lines_and_images_do_not_overlap(count):
  names = ("a class with a long name", "another\nclass $x_1$")
  tasks = ("a-task-with-a-long-name", "b-task-with-a-long-name")
  logits = dict.fromkeys(tasks, np.tile(of_class(1, 2), (count, 1)))
  figure = plots.prediction_grid(
    random_images(count), logits, dict.fromkeys(tasks, names),
    [names[0]] * count,
  )  # fmt: skip
  FigureCanvasAgg(figure)
  figure.canvas.draw()
  boxes = [axes.get_window_extent() for axes in figure.axes[::2]]
  boxes += [
    text.get_window_extent()
    for axes in figure.axes[1::2]
    for text in axes.texts
  ]
  for a, b in itertools.combinations(boxes, 2):
    assert not a.padded(-0.25).overlaps(b.padded(-0.25))
  for box in boxes:
    assert figure.bbox.padded(0.25).x0 <= box.x0
    assert box.x1 <= figure.bbox.padded(0.25).x1
    assert box.y0 >= -0.25


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"images": random_images(2)[0]}, "images have shape"),
    ({"truths": ["1"]}, "the number of true classes is 1, expected 2"),
    ({"logits": {"old": np.zeros((2, 2))}}, "no logits of 'new', only of"),
    (
      {"logits": {"old": np.zeros((2, 2)), "new": np.zeros((2, 4))}},
      r"'new' have shape \(2, 4\), expected 2 rows \(images\) and 3 columns",
    ),
    ({"logits": {"old": np.zeros((1, 2))}}, r"logits of 'old' have shape"),
  ],
)
def test_mismatched_predictions_are_refused(change, message):
  values = {
    "images": random_images(2),
    "logits": {"old": np.zeros((2, 2)), "new": np.zeros((2, 3))},
    "class_names": NAMES,
    "truths": ["1", "2"],
  }
  with pytest.raises(DataError, match=message):
    plots.prediction_grid(**{**values, **change})


def test_bars_show_seconds_and_multiples_of_the_first():
  times = {"plain": 0.5, "with tasks": 0.6, "one by one": 8.0}
  figure = plots.timing_bars(times, title="a batch")
  (axes,) = figure.axes
  assert [bar.get_width() for bar in axes.patches] == list(times.values())
  assert [label.get_text() for label in axes.get_yticklabels()] == list(times)
  assert [text.get_text() for text in axes.texts] == [
    "0.5 s (1 x)", "0.6 s (1.2 x)", "8 s (16 x)",
  ]  # fmt: skip
  FigureCanvasAgg(figure)
  figure.canvas.draw()
  boxes = [text.get_window_extent() for text in axes.texts]
  assert all(box.x1 <= axes.get_window_extent().x1 for box in boxes)


def test_names_of_times_are_plain_text():
  """No formulas; and two that look the same are two bars."""
  times = {"$\\frac{x": 1.0, "a\nb": 2.0, "a\\nb": 3.0}
  figure = plots.timing_bars(times, title="$\\frac{x")
  (axes,) = figure.axes
  assert [bar.get_width() for bar in axes.patches] == [1, 2, 3]
  FigureCanvasAgg(figure).draw()
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["$\\frac{x", "a\\nb", "a\\nb"]
  assert axes.get_title() == "$\\frac{x"


@pytest.mark.parametrize("bad", [{}, {"a": 0.0}, {"a": float("nan")}])
def test_invalid_times_are_refused(bad):
  with pytest.raises(DataError, match="the times are"):
    plots.timing_bars(bad, title="")


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still; it goes on by `clock.now += seconds`."""

  class Clock:
    now = 100.0

  monkeypatch.setattr(timing.time, "perf_counter", lambda: Clock.now)
  return Clock


def test_functions_are_timed_in_turn_without_their_first_call(clock):
  calls = []

  def taking(name, seconds):
    def call():
      calls.append(name)
      clock.now += seconds[calls.count(name) - 1]
      return jax.numpy.zeros(())

    return call

  functions = {
    "a": taking("a", [50, 1, 9, 2]),
    "b": taking("b", [50, 4, 3, 4]),
  }
  found = evaluation.median_seconds(functions, rounds=3)
  assert calls == ["a", "b"] * 4
  assert found == {"a": 2, "b": 4}


def test_no_round_starts_after_the_budget(clock):
  calls = []

  def slow():
    calls.append(clock.now)
    clock.now += 7

  evaluation.median_seconds({"slow": slow}, rounds=9, budget=10)
  assert len(calls) == 3  # one that compiles, at 0 s, at 7 s
  evaluation.median_seconds({"slow": slow}, rounds=9, budget=0)
  assert len(calls) == 5
  with pytest.raises(ConfigError, match="rounds is 0, expected at least 1"):
    evaluation.median_seconds({"slow": slow}, rounds=0)


def test_processes_run_the_same_number_of_rounds(clock, monkeypatch):
  """By the clock of process 0: a function may wait for all of them."""
  calls, said = [], iter([False, False, True])
  monkeypatch.setattr(
    timing.processes, "broadcast_from_process_0", lambda own: next(said)
  )
  evaluation.median_seconds(
    {"slow": lambda: calls.append(clock.now)}, rounds=9, budget=10
  )
  assert len(calls) == 4  # one that compiles, and three rounds
