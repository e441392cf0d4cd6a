"""Runs of labels and of values: scores, thresholds, statistics, same bits."""

import dataclasses
import json
import types

import fake_data
import numpy as np
import pytest
import sklearn.metrics
from conftest import random_task, tiny_backbone
from kinds_of_tasks import of_outputs
from run_inputs import run_inputs
from test_best_params import evaluated, trained

import memory_vit as mv
from memory_vit import plots
from memory_vit.config import Config
from memory_vit.data import batching, datasets
from memory_vit.data.memory_source import MemorySource
from memory_vit.data.split import Split
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.kinds import KINDS, TaskKind, label_metrics
from memory_vit.kinds.scores import Scores
from memory_vit.model import trees
from memory_vit.run_result import read_result
from memory_vit.train import (
  batches,
  dry_run,
  results,
  run,
  run_pictures,
  settle,
  state,
  summary,
  sweep,
)
from memory_vit.train.fit import PackResult
from memory_vit.train.step import Step

NAMES = {"labels": ("even", "above 4", "prime"), "values": ("angle",)}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(depth=1), path)
  return path


def config_of(kind, backbone, **changes):
  """Six steps; images are never cropped at random, and so can be cached."""
  return Config().replaced(
    {
      "backbone": str(backbone), "batch_size": 8, "batch_size_eval": 8,
      "total_steps": 6, "eval_every": 2, "checkpoint_every": 3, "log_every": 1,
      "learning_rate": 0.05, "export_orbax": False, "task.name": "t",
      "task.kind": kind, "task.cells": 2, "data.train_crop": "resize",
      "data.name": "digits" if kind == "labels" else "glyphs:angle",
      "data.train": "train[:64]", "data.validation": "train[64:96]",
      "data.test": "test[:24]", "data.flip": False, **changes,
    }
  )  # fmt: skip


@pytest.fixture(scope="module", params=["labels", "values"])
def finished(request, backbone, tmp_path_factory):
  """A configuration, its result, and where that lies."""
  units = ("degrees",) if request.param == "values" else ()
  config = config_of(request.param, backbone, **{"task.units": units})
  workdir = tmp_path_factory.mktemp("run")
  return config, run.train_and_evaluate(config, workdir), workdir


def task_of(workdir, backbone, name="t"):
  return mv.load_task(workdir / "tasks" / name, mv.load_backbone(backbone))


def outputs_of(task, backbone, split):
  """Outputs of the exported task, and the labels, from images."""
  loaded, found, labels = mv.load_backbone(backbone), [], []
  for batch in batching.eval_batches(
    split, task.spec.preprocessing, batch_size=8
  ):
    found.append(mv.forward(loaded, [task], batch["image"])["t"])
    labels.append(batch["label"])
  return np.concatenate(found), np.concatenate(labels)


def test_result_of_a_run_equals_its_exported_task(finished, backbone):
  """Its numbers, counted here again from the exported task."""
  config, result, workdir = finished
  kind = config.task.kind
  assert result == read_result(workdir)
  (trial,) = result.tasks
  assert (trial.kind, trial.test.examples) == (kind, 24)
  assert trial.val.examples == 32
  assert trial.chance is trial.majority is None
  with pytest.raises(TaskError, match=r"no accuracy .*read \.score"):
    assert trial.test.accuracy
  assert not (workdir / "hits.json").exists()
  task = task_of(workdir, backbone)
  assert task.spec.class_names == NAMES[kind]
  stored = json.loads(json.dumps(dataclasses.asdict(trial)))
  assert task.provenance["metrics"] == stored

  def counted(role):
    ref = {"name": config.data.name, "split": getattr(config.data, role)}
    split = datasets.open_split(**ref, kind=kind)
    outputs, truth = outputs_of(task, backbone, split)
    return task.spec.kind.activate(outputs), truth, outputs

  predicted, truth, _ = counted("test")
  if kind == "labels":
    means = sklearn.metrics.average_precision_score(truth, predicted)
    assert trial.test.score == pytest.approx(means)
    above = predicted >= np.array(task.spec.kind.thresholds)
    f1 = sklearn.metrics.f1_score(truth, above, average=None)
    assert trial.test.per_output["f1"] == pytest.approx(f1.tolist())
    # The thresholds are those of the validation at the step of the task.
    _, truth, outputs = counted("validation")
    rows = of_outputs(
      task.spec.kind, outputs, truth, np.ones(len(truth), np.float32)
    )
    expected = label_metrics.evaluation_of(rows).thresholds
    np.testing.assert_allclose(task.spec.kind.thresholds, expected, rtol=1e-4)
    assert len({*expected}) > 1
  else:
    r2 = sklearn.metrics.r2_score(truth, predicted)
    assert trial.test.score == pytest.approx(r2, rel=1e-4)
    error = sklearn.metrics.mean_absolute_error(truth, predicted)
    assert trial.test.metrics["mae"] == pytest.approx(error, rel=1e-5)
    assert task.spec.kind.units == ("degrees",)
    # In the units of the values, and not in those of the outputs.
    _, truth, _ = counted("train")
    assert task.spec.kind.mean == pytest.approx([truth.mean()], rel=1e-5)
    assert task.spec.kind.std == pytest.approx([truth.std()], rel=1e-5)


def test_summary_and_plots_show_the_score_of_the_kind(finished):
  config, result, workdir = finished
  kind, (trial,) = config.task.kind, result.tasks
  shown = summary.summary(result, workdir)
  score = KINDS[kind].score_name
  assert f"validation {score}" in shown
  assert f"test {'macro F1' if kind == 'labels' else 'MAE'}" in shown
  assert "chance" not in shown
  assert "a standard error" not in shown
  scalars = plots.read_scalars(workdir)
  key = {"labels": "map", "values": "r2"}[kind]
  steps, values = scalars[f"validation/{key}"]
  assert steps.tolist() == [2, 4, 6]
  assert max(values) == pytest.approx(trial.val.score)
  assert values[trial.best_step // 2 - 1] == pytest.approx(trial.val.score)
  metric = "mae" if kind == "values" else "accuracy"
  assert {"validation/loss", f"train/{metric}"} <= scalars.keys()
  loss, curve = plots.training_curves(workdir).axes
  assert (curve.get_title(), len(curve.lines)) == (score, 1)
  result = dataclasses.replace(result, tasks=(trial, trial))
  axes, _ = plots.sweep_figure(result).axes
  assert axes.get_ylabel() == score
  (line,) = (c.lines[0] for c in axes.containers)
  assert line.get_ydata() == pytest.approx([trial.val.score])


def parts(workdir, backbone, name="t"):
  task = task_of(workdir, backbone, name)
  return trees.flatten(task.params), task.spec.kind


def assert_same_bits(found, expected):
  assert found[1] == expected[1]
  for name, value in expected[0].items():
    assert found[0][name].tobytes() == value.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "disk"])
def test_run_with_cached_contexts_equals_run_without(
  finished, backbone, tmp_path, where
):
  config, result, workdir = finished
  cache_options = {"cache.what": "contexts", "cache.where": where}
  if where == "disk":
    cache_options["cache.dir"] = str(tmp_path / "cache")
  found = run.train_and_evaluate(
    config.replaced(cache_options), tmp_path / "run"
  )
  assert found.tasks == result.tasks
  assert_same_bits(parts(tmp_path / "run", backbone), parts(workdir, backbone))


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted(
  finished, backbone, tmp_path, monkeypatch
):
  config, result, workdir = finished
  real, steps = Step.__call__, []

  def stops_in_step_5(self, *args):
    steps.append(1)
    if len(steps) == 5:
      raise KeyboardInterrupt
    return real(self, *args)

  monkeypatch.setattr(Step, "__call__", stops_in_step_5)
  with pytest.raises(KeyboardInterrupt):
    run.train_and_evaluate(config, tmp_path)
  found = run.train_and_evaluate(config, tmp_path)
  assert len(steps) == 5 + 2  # from the state of the evaluation at step 4
  assert found.tasks == result.tasks
  assert_same_bits(parts(tmp_path, backbone), parts(workdir, backbone))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "overrides"),
  [
    ("labels", ({"optim.class_weights": "balanced"},
                {"optim.label_smoothing": 0.2})),
    ("values", ({"task.loss": "huber"}, {"task.loss": "squared"})),
  ],
)  # fmt: skip
def test_trial_of_a_sweep_equals_a_run_alone(
  kind, overrides, backbone, tmp_path
):
  config = config_of(kind, backbone, **{"data.test": ""})
  trials = config.replaced(
    {"sweep.overrides": overrides, "sweep.export": "all"}
  )
  result = run.train_and_evaluate(trials, tmp_path / "all")
  scores = {trial.name: trial.val.score for trial in result.tasks}
  assert len({*scores.values()}) == 2
  for i, changes in enumerate(overrides):
    alone = run.train_and_evaluate(config.replaced(changes), tmp_path / str(i))
    assert alone.tasks[0].val.score == pytest.approx(
      scores[f"t-0{i}"], abs=1e-6
    )
    found, found_kind = parts(tmp_path / "all", backbone, f"t-0{i}")
    expected, expected_kind = parts(tmp_path / str(i), backbone)
    assert found_kind.std == expected_kind.std
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dry_run_accepts_labels_of_the_kind(finished, tmp_path):
  config, *_ = finished
  config = config.replaced({"sweep.learning_rate": (0.1, 0.3)})
  assert "6 of 8 images, for 2 trials" in dry_run.dry_run(config, tmp_path)


@pytest.mark.slow
def test_padded_head_trains_to_the_same_score(finished, backbone, tmp_path):
  config, result, workdir = finished
  padded = config.replaced({"task.padded_classes": 5})
  found = run.train_and_evaluate(padded, tmp_path)
  one, other = (task_of(path, backbone) for path in (workdir, tmp_path))
  assert other.spec.class_names == one.spec.class_names
  assert (other.spec.kind.std, other.spec.kind.name) == (
    one.spec.kind.std, one.spec.kind.name,
  )  # fmt: skip
  assert found.tasks[0].test.score == pytest.approx(result.tasks[0].test.score)


def test_best_score_may_be_negative_or_missing(monkeypatch):
  """None is that of outputs that are not finite."""
  never = None
  past = trained({"a": [never, -2.0, -0.5, -1.0], "b": [never] * 4})
  assert (past.best["a"].step, past.best["a"].scores.score) == (3, -0.5)
  assert (past.best["b"].step, past.best["b"].scores) == (4, Scores())
  config = Config().replaced({"task.kind": "values"})
  trials = [sweep.Trial(name, {}, config) for name in "ba"]
  task = random_task(tiny_backbone(depth=1), "t")
  pack = PackResult(tasks=dict.fromkeys("ba", task), best=past.best, lost={})
  inputs = types.SimpleNamespace(config=config, trials=trials, splits={})
  found = evaluated(inputs, [pack], monkeypatch)
  ranked = results.rank(found, config, "t")
  assert [t.result.val.score for t in ranked] == [-0.5, None]


def split_of(kind, labels, names=("x", "y")):
  """A split of equal images."""
  rows = np.array(labels, KINDS[kind].target_type)
  images = [fake_data.encode(fake_data.picture(0), "PNG")] * len(labels)
  return Split(
    name="s", split="train", size=len(labels), class_names=names, kind=kind,
    source=MemorySource(images, rows),
  )  # fmt: skip


def test_statistics_of_values_are_those_of_the_training_split():
  config = Config().replaced({"task.kind": "values", "task.units": ("mm", "g")})
  split = split_of("values", [[1, 10], [3, 30]])
  found = settle.task_kind(config, split)
  assert (found.mean, found.std) == ((2, 20), (1, 10))
  assert found.units == ("mm", "g")
  with pytest.raises(DataError, match="value 'y' is the same for all examples"):
    settle.task_kind(config, split_of("values", [[1, 4], [2, 4]]))
  for constant in (0, 0.1):  # the mean of three 0.1 is another number
    same = split_of("values", [[constant, i] for i in range(3)])
    with pytest.raises(DataError, match="value 'x' is the same"):
      settle.task_kind(config, same)
  for scale in (1e-31, 1e31):
    other = split_of("values", [[i, scale * i] for i in range(3)])
    with pytest.raises(DataError, match="'y' has mean .* in another unit"):
      settle.task_kind(config, other)
  config = config.replaced({"task.units": ("mm",)})
  with pytest.raises(ConfigError, match=r"\('mm',\), but .* has 2 values"):
    settle.task_kind(config, split)
  # A resumed run must find the same ones.
  made = inputs_of(Config(image_size=8), split, found)
  assert state.describe(made, [])["data"] == {
    "classes": ["x", "y"], "mean": [2, 20], "std": [1, 10],
  }  # fmt: skip


@pytest.mark.parametrize(
  ("offset", "scale"), [(0, 1), (1e6, 1), (1.7e9, 3600), (0, 1e-12), (1e12, 9)]
)
def test_values_are_standardized_before_they_are_rounded(offset, scale):
  rows = np.random.default_rng(0).random((8, 2))
  split = split_of("values", offset + scale * rows)
  config = Config().replaced(
    {"task.kind": "values", "batch_size": 8, "image_size": 8}
  )
  found = settle.task_kind(config, split)
  made = inputs_of(config, split, found)
  label = next(iter(batches.train_batches(made, 0)))["label"]
  assert label.dtype == np.float32
  expected = (rows - rows.mean(axis=0)) / rows.std(axis=0)
  np.testing.assert_allclose(
    np.sort(label, axis=0), np.sort(expected, axis=0), atol=1e-3
  )


def inputs_of(config, split, kind):
  config = config.replaced({"data.validation": ""})
  return run_inputs(config, tiny_backbone(depth=1), kind=kind, train=split)


def test_balanced_labels_are_weighted_by_examples_without_the_label():
  config = Config().replaced(
    {"task.kind": "labels", "optim.class_weights": "balanced", "image_size": 8}
  )
  split = split_of("labels", [[1, 0], [1, 0], [1, 0], [0, 0]])
  made = inputs_of(config, split, TaskKind(name="labels"))
  weights = made.frozen["outputs"].weights
  np.testing.assert_allclose(weights, [1 / 3, 1])


def test_splits_of_another_kind_or_other_names_are_refused():
  config = Config().replaced({"task.kind": "values"})
  train = split_of("values", [[1, 2], [3, 4]])
  settle._require_same_outputs(config, {"train": train, "upstream": None})
  for other, message in (
    (split_of("labels", [[1, 0]]), "'values', but .* has labels: expected"),
    (
      split_of("values", [[1, 0]], ("x", "z")),
      "'test'.* has 2 values, and .* has 2, but their names differ",
    ),
  ):
    with pytest.raises(DataError, match=message):
      settle._require_same_outputs(config, {"train": train, "test": other})


@pytest.mark.parametrize(
  ("kind", "outputs", "truth", "expected"),
  [
    (TaskKind(name="labels", thresholds=(0.9, 0.4)), [0.0, 0.0], [1, 0],
     "x\n→ y 50.0 %"),
    (TaskKind(name="labels"), [-9.0, -9.0], [1, 1], "x, y\n→ no label"),
    (TaskKind(name="values", mean=(1, 2), std=(1, 2), units=("mm", "g")),
     [0.5, 0.0], [1, 3], "1 mm, 3 g\n→ 1.5 mm, 2 g"),
  ],
)  # fmt: skip
def test_titles_of_images_state_truth_and_prediction(
  kind, outputs, truth, expected
):
  task = random_task(tiny_backbone(depth=1), "t", classes=2)
  spec = dataclasses.replace(task.spec, kind=kind, class_names=("x", "y"))
  rows = of_outputs(
    kind, np.float32([outputs]), np.float32([truth]), np.ones(1, np.float32)
  )
  task = dataclasses.replace(task, spec=spec)
  assert run_pictures._answers(task, rows, [0]) == [expected]
  assert run_pictures.confusion_figures(task, rows) == {}
