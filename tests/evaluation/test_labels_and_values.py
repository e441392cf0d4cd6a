"""Metrics of labels and values, against cases worked out by hand."""

import contextlib
import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from conftest import one_device
from fake_data import numbered_source
from faults import Process
from kinds_of_tasks import of_outputs
from two_processes import kept_port

import memory_vit as mv
from memory_vit.errors import BrokenDataError, DataError, TaskError
from memory_vit.evaluation import evaluate
from memory_vit.kinds import label_metrics as labels
from memory_vit.kinds import value_metrics as values
from memory_vit.kinds.labels import chosen as chosen_labels

PLAIN = mv.EvalPreprocessing(image_size=8)
LABELS = mv.TaskKind(name="labels")
# Four examples, three labels; the second has ties, the third no example.
PROBABILITY = np.array(
  [[0.9, 0.6, 0.3], [0.8, 0.6, 0.3], [0.7, 0.2, 0.3], [0.1, 0.2, 0.7]]
)
HAS = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32)
VALUES = mv.TaskKind(
  name="values", mean=(2, 15, 5), std=(2, 5, 1), units=("mm", "g", "s")
)
TARGET = np.array([[1, 10, 7], [2, 10, 7], [3, 20, 7], [4, 20, 7]], np.float32)
FOUND = np.array([[1, 12, 6], [2, 10, 7], [4, 10, 7], [3, 20, 8]], np.float32)


def logit(probability):
  return np.log(probability / (1 - probability)).astype(np.float32)


def standardized(found, kind=VALUES):
  return (found - np.array(kind.mean)) / np.array(kind.std)


def label_predictions(outputs, label, kind=LABELS):
  return of_outputs(kind, outputs, label, np.ones(len(label), np.float32))


def value_predictions(found, target, kind=VALUES):
  outputs = standardized(found, kind)
  return of_outputs(kind, outputs, target, np.ones(len(target), np.float32))


def test_labels_by_hand():
  evaluation = labels.evaluation_of(label_predictions(logit(PROBABILITY), HAS))
  found, metrics = evaluation.scores, evaluation.scores.metrics
  # Precision (recall) from above: 1 (1/2), 1/2 (1/2), 2/3 (1), 1/2 (1).
  first = 1 * 1 / 2 + 2 / 3 * 1 / 2
  # Of ties: 1/2 (1/2), 1/2 (1).
  second = 1 / 2 * 1 / 2 + 1 / 2 * 1 / 2
  average = found.per_output["average_precision"]
  assert average == pytest.approx([first, second, None])
  assert metrics["map"] == pytest.approx((first + second) / 2)
  assert found.score == metrics["map"]
  # At 0.5: 2 of 3 right, both found; 1 of 2 right, 1 of 2 found; one wrong.
  f1 = found.per_output["f1"]
  assert f1 == pytest.approx([2 * 2 / 3 / (5 / 3), 0.5, 0])
  assert metrics["f1_macro"] == pytest.approx((0.8 + 0.5 + 0) / 3)
  # F1 from above: 2/3, 1/2, 4/5, 2/3, and 1/2, 2/3: half way to the next.
  thresholds = (0.7 + 0.1) / 2, 0.2 / 2, 0.5
  assert evaluation.thresholds == pytest.approx(thresholds)
  right = [0.9, 0.2, 0.7, 0.9, 0.6, 0.4, 0.8, 0.2, 0.7, 0.7, 0.7, 0.3]
  assert found.loss == pytest.approx(-np.log(right).mean(), rel=1e-5)
  # Pairs of 0.9, 0.8, 0.1; two of 0.7, 0.6 and 0.2, half of them right; three
  # of 0.3, none of them right.
  gaps = 0.1 + 0.8 + 0.1 + 2 * (0.2 + 0.1 + 0.3) + 3 * 0.3
  assert metrics["calibration_error"] == pytest.approx(gaps / 12, rel=1e-5)
  assert (found.examples, found.not_finite) == (4, 0)
  assert not evaluation.undefined


def test_labels_at_thresholds():
  """The greatest F1 is that of the thresholds that are chosen."""
  outputs = logit(PROBABILITY)
  chosen = labels.evaluation_of(label_predictions(outputs, HAS)).thresholds
  kind = mv.TaskKind(name="labels", thresholds=chosen)
  found = labels.label_metrics(label_predictions(outputs, HAS, kind))
  assert found.support.tolist() == [2, 2, 0]
  assert found.predicted.tolist() == [3, 4, 1]
  nan = np.nan
  np.testing.assert_allclose(found.precision, [2 / 3, 1 / 2, 0])
  np.testing.assert_allclose(found.recall, [1, 1, nan])
  np.testing.assert_allclose(found.f1, [0.8, 2 / 3, 0])
  rng = np.random.default_rng(0)
  has = (rng.random((50, 2)) < 0.3).astype(np.float32)
  outputs = (rng.standard_normal((50, 2)) + has).astype(np.float32)
  first, _ = labels.evaluation_of(label_predictions(outputs, has)).thresholds
  shares = LABELS.activate(outputs[:, 0].astype(np.float64))
  f1 = [sklearn.metrics.f1_score(has[:, 0], shares >= cut) for cut in shares]
  assert sklearn.metrics.f1_score(has[:, 0], shares >= first) == max(f1)


@pytest.mark.parametrize(
  "levels", [2, 5, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_labels_as_scikit_learn_measures_them(levels):
  """With ties, a label without examples, and outputs that are not finite."""
  rng = np.random.default_rng(levels)
  shares = [0.0, 0.02, 0.3, 0.5, 1.0]
  has = (rng.random((300, 5)) < shares).astype(np.float32)
  outputs = rng.integers(-levels, levels, has.shape) / levels * 6 + has
  outputs[:3, 1], outputs[3, 2] = np.nan, np.inf
  thresholds = (0.5, 0.001, 0.9, 0.5, 1.0)
  kind = mv.TaskKind(name="labels", thresholds=thresholds)
  predictions = label_predictions(outputs, has, kind)
  found = labels.label_metrics(predictions)
  scores = np.nan_to_num(predictions.probability, nan=-1)
  for i in range(5):
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    chosen = scores[:, i].astype(np.float32) >= np.float32(thresholds[i])
    expected = sklearn.metrics.precision_recall_fscore_support(
      has[:, i], chosen, average="binary", zero_division=np.nan
    )
    same([found.precision[i], found.recall[i], found.f1[i]], expected[:3])
    assert found.predicted[i] == chosen.sum()
    if not has[:, i].any():
      assert np.isnan(found.average_precision[i])
      continue
    average = sklearn.metrics.average_precision_score(has[:, i], scores[:, i])
    same(found.average_precision[i], average)
    cuts = [found.best_threshold[i], *np.unique(scores[scores[:, i] >= 0, i])]
    best, *others = [
      sklearn.metrics.f1_score(has[:, i], scores[:, i] >= cut) for cut in cuts
    ]
    same(best, max(others))


@pytest.mark.parametrize(
  ("outputs", "has", "chosen"),
  [
    ([18, 20, 25, 30], [0, 0, 1, 1], [1, 1, 1, 1]),  # all 1.0 in float32
    ([15, 17, 18, 30], [0, 0, 1, 1], [0, 0, 1, 1]),  # 1.0 and its neighbour
    ([16, 16.3, 17, 17.9], [0, 0, 0, 1], [0, 0, 0, 1]),
    # Adjacent, and the upper one is odd: the middle would be the lower one.
    ([-1, 2**-21, 3 * 2**-22, 1], [0, 0, 1, 1], [0, 0, 1, 1]),
    ([-2, -1, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1]),
    ([-80, -70, -60, -50], [0, 0, 1, 1], [0, 0, 1, 1]),
    ([-800, -700, -600, -500], [0, 0, 1, 1], [1, 1, 1, 1]),  # all 0
  ],
)
def test_a_threshold_means_the_same_in_float32(outputs, has, chosen):
  """Of exports, whose probabilities are float32, and of everything here."""
  outputs = np.float32(outputs)[:, None]
  column = np.float32(has)[:, None]
  [cut] = labels.evaluation_of(label_predictions(outputs, column)).thresholds
  kind = mv.TaskKind(name="labels", thresholds=(cut,))
  wide = kind.activate(outputs.astype(np.float64))
  narrow = kind.activate(outputs)
  compiled = np.asarray(kind.activate(jnp.asarray(outputs), jnp))
  for shares in (wide, narrow, compiled):
    assert (shares >= cut)[:, 0].tolist() == chosen
    assert chosen_labels(kind, shares)[:, 0].tolist() == chosen
  assert (narrow >= np.float32(cut))[:, 0].tolist() == chosen


def test_label_without_answers_has_no_f1():
  few = label_predictions(np.full((2, 2), -3.0), np.array([[1.0, 0], [1, 0]]))
  found = labels.evaluation_of(few).scores
  assert found.per_output["f1"] == [0, None]
  assert (found.metrics["f1_macro"], found.metrics["map"]) == (0, 1)


def test_values_by_hand():
  evaluation = values.evaluation_of(value_predictions(FOUND, TARGET))
  found = evaluation.scores
  first = {
    "mae": (1 + 1) / 4,
    "rmse": np.sqrt(2 / 4),
    "r2": 1 - 2 / 5,  # squares about the mean 2.5: 2.25 + 0.25 + 0.25 + 2.25
    "spearman": 1 - 6 * 2 / (4 * 15),  # ranks differ by 0, 0, 1, -1
  }
  second = {
    "mae": (2 + 10) / 4,
    "rmse": np.sqrt(104 / 4),
    "r2": 1 - 104 / 100,
    # Ranks 1.5 1.5 3.5 3.5 and 3 1.5 1.5 4: products of the differences from
    # 2.5 add up to 1, their squares to 4 and 4.5.
    "spearman": 1 / np.sqrt(4 * 4.5),
  }
  third = {"mae": 0.5, "rmse": np.sqrt(0.5), "r2": None, "spearman": None}
  for name, value in first.items():
    each = [value, second[name], third[name]]
    assert found.per_output[name] == pytest.approx(each)
    known = [one for one in each if one is not None]
    assert found.metrics[name] == pytest.approx(np.mean(known))
  assert found.score == found.metrics["r2"]
  assert found.loss == pytest.approx((2 / 4 + 104 / 25 + 2) / 12)
  assert (found.examples, found.not_finite) == (4, 0)
  assert not evaluation.undefined


def test_equal_predictions_have_no_spearman():
  constant = np.full_like(FOUND, 5)
  found = values.evaluation_of(value_predictions(constant, TARGET)).scores
  assert found.metrics["spearman"] is None
  # About 2.5 and 15: 1 - 30 / 5 and 1 - 250 / 100 ... of the right values.
  squares = [16 + 9 + 4 + 1, 25 + 25 + 225 + 225]
  expected = [1 - squares[0] / 5, 1 - squares[1] / 100]
  assert found.metrics["r2"] == pytest.approx(np.mean(expected))


def test_values_beyond_float32_are_measured():
  """Of the greatest scale that a task file may state."""
  kind = mv.TaskKind(name="values", mean=(1e30,), std=(1e30,))
  outputs = np.full((2, 1), 1e20, np.float32)
  found = values.evaluation_of(
    of_outputs(kind, outputs, TARGET[1:3, :1], np.ones(2, np.float32))
  ).scores
  assert found.metrics["mae"] == pytest.approx(1e50)
  assert found.score < -1e90


@pytest.mark.fault("non-finite-outputs")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outputs_of_labels_and_values_that_are_not_finite(value):
  outputs = logit(PROBABILITY)
  outputs[0, 2] = value
  evaluation = labels.evaluation_of(label_predictions(outputs, HAS))
  found = evaluation.scores
  assert found.not_finite == 1
  # The first example comes last: from above 0 (0), 1/2 (1/2), 1/3, 2/4 (1).
  average = found.per_output["average_precision"][0]
  assert average == pytest.approx(1 / 2 * 1 / 2 + 2 / 4 * 1 / 2)
  assert found.per_output["f1"][0] == pytest.approx(0.5)  # 1 of 2 is right
  # Not below 0: the example with outputs of no number cannot be found.
  assert all(0 < cut < 1 for cut in evaluation.thresholds)
  assert found.metrics["calibration_error"] is found.loss is None
  none = labels.evaluation_of(label_predictions(np.full((4, 3), value), HAS))
  assert (none.scores.not_finite, none.scores.metrics["f1_macro"]) == (4, 0)
  assert none.thresholds == (0.5,) * 3

  outputs = standardized(FOUND)
  outputs[1, 0] = value
  evaluation = values.evaluation_of(
    of_outputs(VALUES, outputs, TARGET, np.ones(4, np.float32))
  )
  found = evaluation.scores
  assert found.score is found.loss is None
  assert found.not_finite == 1
  names = ("r2", "mae", "rmse", "spearman")
  assert found.metrics == dict.fromkeys(names)
  assert found.per_output == dict.fromkeys(names, [None] * 3)
  # A score of other outputs on these examples is defined.
  assert not evaluation.undefined


def evaluated(mesh, kinds, rows, label, **options):
  """Of four examples among six that cannot be read, in two batches of 8.

  The cached inputs of the model are its outputs.
  """
  places = [0, 3, 8, 9][: len(rows)]

  def spread(found, rest):
    whole = np.full((16, *found.shape[1:]), rest, found.dtype)
    whole[places] = found
    return whole.reshape(2, 8, *found.shape[1:])

  arrays = {
    "inputs": spread(rows.astype(np.float32), np.nan),
    "label": spread(label, 0),
    "mask": spread(np.ones(len(rows), np.float32), 0),
  }
  batches = [{key: rows[i] for key, rows in arrays.items()} for i in range(2)]
  source = dataclasses.replace(
    numbered_source(10), class_names=("a", "b", "c"),
    kind=options.pop("of", kinds["x"].name),
  )  # fmt: skip
  result = evaluate.evaluate_source(
    lambda inputs: {name: inputs for name in kinds},
    source, PLAIN, batch_size=8, mesh=mesh, kinds=kinds, batches=batches,
    **options,
  )  # fmt: skip
  return result, places


def test_labels_of_a_split(mesh):
  result, places = evaluated(
    mesh, {"x": LABELS, "y": LABELS}, logit(PROBABILITY), HAS,
    also=["predictions", "hits", "digest"], predictions_of="x",
  )  # fmt: skip
  found, predictions = result["x"], result["x"].predictions
  alone = labels.evaluation_of(label_predictions(logit(PROBABILITY), HAS))
  assert len(found.digest) == 64
  assert found.scores == dataclasses.replace(alone.scores, skipped=6)
  assert found.thresholds == alone.thresholds
  assert found.hits is found.majority is None
  assert not found.undefined
  assert result["y"].predictions is None
  assert np.flatnonzero(predictions.counted).tolist() == places
  assert len(predictions.label) == 10
  np.testing.assert_array_equal(predictions.label[places], HAS)
  np.testing.assert_allclose(
    predictions.probability[places], PROBABILITY, rtol=1e-6
  )


def test_values_of_a_split(mesh):
  result, places = evaluated(
    mesh, {"x": VALUES}, standardized(FOUND), TARGET, also=["predictions"]
  )
  scores, predictions = result["x"].scores, result["x"].predictions
  alone = values.evaluation_of(value_predictions(FOUND, TARGET)).scores
  assert (scores.examples, scores.skipped, scores.not_finite) == (4, 6, 0)
  assert scores.score == pytest.approx(alone.score, rel=1e-6)
  assert scores.loss == pytest.approx(alone.loss, rel=1e-6)
  assert scores.metrics == pytest.approx(alone.metrics, rel=1e-6)
  np.testing.assert_array_equal(predictions.target[places], TARGET)
  np.testing.assert_allclose(predictions.predicted[places], FOUND, rtol=1e-6)
  assert np.isnan(predictions.predicted[1]).all()


@pytest.mark.parametrize(
  ("offset", "scale"), [(1e6, 1), (1.7e9, 10), (-1e12, 1), (0, 1e-12)]
)
def test_values_keep_what_they_mean(mesh, offset, scale):
  """Float32 has neither the seconds of a day nor the euros of a budget."""
  target = offset + scale * TARGET.astype(np.float64)
  kind = dataclasses.replace(
    VALUES,
    mean=tuple(offset + scale * np.array(VALUES.mean)),
    std=tuple(scale * np.array(VALUES.std)),
  )
  outputs = standardized(FOUND).astype(np.float32)
  result, places = evaluated(
    mesh, {"x": kind}, outputs, target, also=["predictions"]
  )
  scores, predictions = result["x"].scores, result["x"].predictions
  np.testing.assert_array_equal(predictions.target[places], target)
  alone = values.evaluation_of(value_predictions(FOUND, TARGET)).scores
  assert scores.score == pytest.approx(alone.score, rel=1e-3)
  assert scores.loss == pytest.approx(alone.loss, rel=1e-3)
  mae = scale * alone.metrics["mae"]
  assert scores.metrics["mae"] == pytest.approx(mae, rel=1e-3, abs=0)
  np.testing.assert_array_equal(
    kind.activate(outputs), predictions.predicted[places]
  )


def test_an_evaluation_says_why_there_is_no_score():
  none = labels.evaluation_of(label_predictions(logit(PROBABILITY), HAS * 0))
  assert none.undefined.startswith("no example has any label")
  same = TARGET[:1].repeat(4, axis=0)
  constant = values.evaluation_of(value_predictions(FOUND, same))
  assert constant.undefined.startswith("all examples have the same values")
  one = values.evaluation_of(value_predictions(FOUND[:1], TARGET[:1]))
  assert one.undefined.startswith("it has only one image, but R2")
  for found in (none, constant, one):
    assert found.scores.score is None
    assert found.scores.loss > 0


def test_a_split_without_a_score_is_refused():
  mesh = one_device()
  with pytest.raises(
    DataError, match="'numbered', .*: no example has any label"
  ):
    evaluated(mesh, {"x": LABELS}, logit(PROBABILITY), HAS * 0)
  with pytest.raises(DataError, match="all examples have the same values"):
    evaluated(mesh, {"x": VALUES}, FOUND, TARGET[:1].repeat(4, axis=0))
  with pytest.raises(DataError, match="it has only one image, but R2"):
    evaluated(mesh, {"x": VALUES}, FOUND[:1], TARGET[:1])
  for kind in (LABELS, VALUES):
    with pytest.raises(BrokenDataError, match="none of its 10 examples"):
      evaluated(mesh, {"x": kind}, FOUND[:0], TARGET[:0])
  several = {"x": LABELS, "y": VALUES}
  with pytest.raises(TaskError, match="'y' has 3 values, .* has 3 labels"):
    evaluated(mesh, several, FOUND, TARGET)
  with pytest.raises(TaskError, match="'x' has 3 labels, .* has 3 classes"):
    evaluated(mesh, {"x": LABELS}, FOUND, TARGET, of="classes")


# Each of two processes has half of the rows of each batch.
ONE_OF_TWO = """
import dataclasses, json, sys
import numpy as np
from memory_vit.evaluation import evaluate
from memory_vit.kinds import TaskKind
from memory_vit.runtime import launch, sharding
number, port, rows = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
launch.start(launch.Options(
  coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number))
outputs, label = (np.array(rows[key], np.float32) for key in ("outputs", "has"))
own = slice(4 * number, 4 * number + 4)
batches = [
  {"inputs": outputs[i:i + 8][own], "label": label[i:i + 8][own],
   "mask": np.ones(4, np.float32)} for i in (0, 8)]
found = evaluate.evaluate(
  lambda inputs: {"x": inputs}, batches, sharding.make_mesh(),
  kinds={"x": TaskKind(name="labels")}, also=["predictions"])["x"]
print(json.dumps({
  "scores": dataclasses.asdict(found.scores), "thresholds": found.thresholds,
  "outputs": found.predictions.outputs.tolist()}))
"""


@pytest.mark.processes
def test_two_processes_find_what_one_finds(tmp_path):
  rng = np.random.default_rng(0)
  has = (rng.random((16, 3)) < 0.5).astype(np.float32)
  outputs = rng.standard_normal((16, 3)).astype(np.float32)
  rows = json.dumps({"outputs": outputs.tolist(), "has": has.tolist()})
  with kept_port() as port, contextlib.ExitStack() as stack:
    both = [
      stack.enter_context(
        Process(ONE_OF_TWO, [str(i), str(port), rows], tmp_path / f"{i}.log")
      )
      for i in range(2)
    ]
    for process in both:
      assert process.wait() == 0, process.text
  alone = labels.evaluation_of(label_predictions(outputs, has))
  for process in both:
    found = json.loads(process.printed.splitlines()[-1])
    assert found["outputs"] == outputs.tolist()
    assert found["scores"] == dataclasses.asdict(alone.scores)
    assert found["thresholds"] == list(alone.thresholds)
