"""Plots at the end of a run: which are drawn; they change no bit."""

import dataclasses
import types

import numpy as np
import pytest
from conftest import class_evaluation, one_device, random_task, tiny_backbone
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

import memory_vit as mv
from memory_vit.config import Config, DataConfig, SweepConfig
from memory_vit.errors import DataError
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.kinds.scores import Scores
from memory_vit.model.regimes import get_regime
from memory_vit.train import run, run_pictures
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.sweep import Trial

TAGS = {
  "attention/overlays", "attention/shares", "test/answers", "test/confusions",
}  # fmt: skip


def reader(size=10, unreadable=(), embedded=None):
  return types.SimpleNamespace(
    size=size, unreadable=dict.fromkeys(unreadable, "broken"),
    embedded=embedded,
  )  # fmt: skip


def inputs(backbone, test, log_images=4):
  return types.SimpleNamespace(
    config=Config(log_images=log_images), backbone=backbone, parents=(),
    splits={"test": test} if test else {}, preprocessing=None,
    mesh=one_device(),
  )  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
  """The numbers of the images that are read; they are grey."""
  asked = []

  def eval_images(source, preprocessing, indices):
    asked.extend(indices)
    return np.zeros((len(indices), 8, 8, 3), np.float32)

  monkeypatch.setattr(run_pictures, "eval_images", eval_images)
  return asked


@pytest.mark.parametrize(
  ("size", "unreadable", "expected"),
  [
    (10, (), [0, 3, 6, 9]),
    (10, (0, 9), [1, 3, 6, 8]),
    (3, (), [0, 1, 2]),
    (3, (1,), [0, 2]),
  ],
)
def test_drawn_images_are_spread_over_the_split(size, unreadable, expected):
  """Files lie class by class."""
  source = reader(size, unreadable)
  assert run_pictures._some_examples(inputs(None, None), source) == expected


def test_no_attention_is_drawn_without_tokens_images_or_split(backbone, asked):
  """Of a regime without a token, of embeddings, and without a split."""
  task = random_task(backbone, "pets")
  head = types.SimpleNamespace(
    spec=types.SimpleNamespace(learned=get_regime("head")), name="pets"
  )
  for of, test in (
    (head, reader()), (task, reader(embedded="rows")), (task, None),
  ):  # fmt: skip
    found = run_pictures.attention_figures(inputs(backbone, test), of, None)
    assert found == {}
  assert asked == []


def predicted(label, best, share):
  ones, zeros = np.ones(len(label), bool), np.zeros(len(label), np.float32)
  return SplitPredictions(
    num_classes=3, label=np.array(label, np.int32), counted=ones, finite=ones,
    top_classes=np.array(best, np.int32)[:, None],
    top_probabilities=np.array(share, np.float32)[:, None], loss=zeros,
    brier=zeros, known_score=zeros,
  )  # fmt: skip


@pytest.mark.slow
def test_titles_of_images_state_class_and_prediction(backbone, asked):
  task = random_task(backbone, "pets", class_names=("cat", "dog", "ship"))
  predictions = predicted([0, 1, 2, 2], [0, 2, 1, 2], [0.5, 0.791, 1.0, 0.004])
  figures = run_pictures.attention_figures(
    inputs(backbone, reader(4), log_images=2), task, predictions
  )
  assert asked == [0, 3]
  titles = [axes.get_title() for axes in figures["attention/overlays"].axes]
  shown = [title for title in titles if "→" in title]
  assert shown == ["cat\n→ cat 50 %", "ship\n→ ship 0 %"]


def test_confusion_matrix_counts_the_predictions(backbone, monkeypatch):
  """Also of a task that does not name its classes."""
  shown = []
  monkeypatch.setattr(
    run_pictures, "plots",
    types.SimpleNamespace(
      confusion_matrix_figure=lambda *args: shown.append(args)
    ),
  )  # fmt: skip
  task = random_task(backbone, "pets", classes=3)
  predictions = predicted([0, 1, 2], [0, 2, 2], [1.0, 1.0, 1.0])
  run_pictures.confusion_figures(task, predictions)
  ((matrix, names),) = shown
  assert matrix.todense().tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
  assert [*names] == [*(task.spec.class_names or "012")]
  assert run_pictures.confusion_figures(task, None) == {}


def test_failed_drawing_does_not_end_the_run(
  backbone, monkeypatch, caplog, pictures
):
  def broken(*args):
    raise DataError("an image is broken")

  monkeypatch.setattr(run_pictures, "_some_examples", broken)
  task = random_task(backbone, "pets")
  assert run_pictures.pictures_of(inputs(backbone, reader()), task, None) == {}
  assert "plots are left out (DataError: an image is broken)" in caplog.text


def tags(folder):
  """{tag: its plot} of the events in a folder."""
  events = event_accumulator.EventAccumulator(
    str(folder), size_guidance={event_accumulator.TENSORS: 0}
  )
  events.Reload()
  try:
    found = events.PluginTagToContent("images")
  except KeyError:  # nothing was written for it
    return {}
  return {
    tag: tensor_util.make_ndarray(events.Tensors(tag)[-1].tensor_proto)
    for tag in found
  }


def small(tmp_path, **options):
  path = tmp_path / "vit.npz"
  mv.save_backbone(tiny_backbone(num_classes=5), path)
  return Config(
    backbone=str(path), image_size=8, batch_size=8, batch_size_eval=16,
    total_steps=3, eval_every=3, data=DataConfig(
      name="digits:5-9", train="train[:40]", validation="train[40:50]",
      test="test[:10]",
    ), **options,
  )  # fmt: skip


def result_of(config, workdir):
  """result.json without times; the digest of the task."""
  result = run.train_and_evaluate(config, workdir).to_json()
  for key in ("wall_seconds", "images_per_second"):
    result.pop(key)
  (task,) = workdir.glob("tasks/digits-5-9")
  backbone = mv.load_backbone(config.backbone)
  return result, mv.load_task(task, backbone).digest


@pytest.mark.slow
def test_plots_change_no_bit(tmp_path, pictures):
  config = small(tmp_path, log_images=3)
  with_them = result_of(config, tmp_path / "with")
  without = result_of(
    dataclasses.replace(config, log_images=0), tmp_path / "without"
  )
  assert with_them == without
  found = tags(tmp_path / "with")
  assert found.keys() == TAGS
  for plot in found.values():
    width, height, *drawn = plot
    assert min(int(width), int(height)) > 200
    assert len(drawn) == 1
    assert drawn[0].startswith(b"\x89PNG")
  assert tags(tmp_path / "without") == {}


def test_unwritable_plots_do_not_end_a_finished_run(
  tmp_path, monkeypatch, caplog, pictures
):
  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(run_pictures, "pictures_of", lambda *args: {"a": None})
  monkeypatch.setattr(MetricWriters, "write_images", full)
  trained = types.SimpleNamespace(
    trial=Trial("pets", {}, Config()), predictions=None,
    result=types.SimpleNamespace(steps=3),
  )  # fmt: skip
  drawn = types.SimpleNamespace(config=Config(log_images=1))
  (tmp_path / "attention.png").touch()  # of an earlier result
  run_pictures.show_best(
    drawn, None, trained, None, tmp_path, MetricWriters(), None
  )
  assert "plots cannot be written (OSError: " in caplog.text
  assert not (tmp_path / "attention.png").exists()


@pytest.mark.slow
def test_only_the_best_trial_of_a_sweep_is_drawn(tmp_path, pictures):
  config = small(
    tmp_path, log_images=1, sweep=SweepConfig(learning_rate=(1e-6, 0.3))
  )
  result = run.train_and_evaluate(config, tmp_path / "run")
  best, other = (trial.learning_rate for trial in result.tasks)
  folder = tmp_path / "run" / "sweep"
  assert tags(folder / f"learning_rate={best}").keys() == TAGS
  assert tags(folder / f"learning_rate={other}") == {}


def test_wandb_summary_names_the_best_trial(tmp_path):
  """By the name with which their keys begin, and by what it varies."""
  told = {}
  finished = types.SimpleNamespace(config=Config(log_images=0))
  wandb = types.SimpleNamespace(summarize=told.update)

  def show():
    run_pictures.show_best(
      finished, None, trained, None, tmp_path, MetricWriters(), wandb
    )

  result = types.SimpleNamespace(
    best_step=3, val=class_evaluation(0.5).scores, test=Scores()
  )
  trial = Trial("pets-03", {"learning_rate": 0.3, "task.cells": 5}, Config())
  trained = types.SimpleNamespace(trial=trial, result=result)
  show()
  assert told["best/trial"] == "pets-03"
  assert told["best/varied"] == "learning_rate=0.3,cells=5"
  assert told["best/validation_top1"] == 0.5
  result.val = Scores(score=0.5, metrics={"map": 0.5, "f1_macro": 0.25})
  show()
  assert told["best/validation_map"] == 0.5
