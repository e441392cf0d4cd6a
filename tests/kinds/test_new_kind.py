"""What docs/dev/adding.md says of a new kind and a new metric is all there is.

A kind is registered that only this file knows, and goes through a run, an
evaluation, a file, a prediction, a summary, a model card and a report.
"""

import dataclasses
import functools
import json
import re

import fake_data
import numpy as np
import pytest
from conftest import ROOT, tiny_backbone

import memory_vit as mv
from memory_vit import reports
from memory_vit.commands import inspect
from memory_vit.data import in_memory
from memory_vit.evaluation import evaluate
from memory_vit.exports import model_card
from memory_vit.kinds import KINDS, value_metrics
from memory_vit.kinds.kind import Metric
from memory_vit.kinds.state import OutputState
from memory_vit.kinds.values import Values
from memory_vit.reports.document import percent
from memory_vit.reports.pages import PAGES
from memory_vit.reports.task_evaluation import overall
from memory_vit.reports.value_page import ValueEvaluation
from memory_vit.run_result import read_result
from memory_vit.runtime import sharding
from memory_vit.train import summary

PIXELS = np.stack([fake_data.noise(i, 8, 8) for i in range(48)])
RUN = {"name": "pets", "epochs": 2, "batch_size": 16, "progress": False}
ANGLES = (np.arange(len(PIXELS)) * 7.5).tolist()
WITHIN = 30


class Angles(Values):
  """Numbers of degrees, of which 360 are 0."""

  name, noun = "angles", "angle"
  metrics = {
    "within": Metric("within 30", "share within 30 degrees", is_share=True),
    "mae": Metric("degrees", "mean difference, in degrees"),
  }
  in_tables = ("within", "mae")
  score_name = "within 30"
  least_score = 0.0

  def activate(self, stated, outputs, xp):
    return super().activate(stated, outputs, xp) % 360

  def state(self, stated, batch, mesh, also):
    rows = sharding.to_host(tuple(batch))
    return OutputState(functools.partial(evaluation_of, stated), rows)


def evaluation_of(stated, outputs, targets, counted):
  found = value_metrics.evaluation_of_rows(stated, outputs, targets, counted)
  predictions = found.predictions
  away = np.abs(predictions.predicted - predictions.target)[counted] % 360
  away = np.minimum(away, 360 - away)
  within = float((away <= WITHIN).mean())
  scores = dataclasses.replace(
    found.scores, score=within,
    metrics={"within": within, "mae": float(away.mean())},
    per_output={"mae": away.mean(axis=0).tolist()},
  )  # fmt: skip
  return dataclasses.replace(found, scores=scores, undefined="")


class AngleEvaluation(ValueEvaluation):
  """The page of a task of angles."""

  kind, noun = "angles", "angle"
  in_index = ("within 30",)
  meanings = {"within 30": "share of the images within 30 degrees."}

  @functools.cached_property
  def summary(self):
    rows = self.predictions
    found = evaluation_of(rows.kind, rows.outputs, rows.target, rows.counted)
    return overall(self, found)

  def numbers(self):
    return [("within 30", percent(self.summary["within"]), "")]


@pytest.fixture
def angles(monkeypatch):
  monkeypatch.setitem(KINDS, Angles.name, Angles())
  monkeypatch.setitem(PAGES, Angles.name, AngleEvaluation)


def test_new_kind_needs_a_file_and_a_page(angles, tmp_path, capsys):
  backbone, data = tiny_backbone(depth=1), (PIXELS, ANGLES)
  result = mv.train_task(
    backbone, data, test=data, kind="angles", class_names=("turn",),
    learning_rate=0.1, workdir=tmp_path / "run", **RUN,
  )  # fmt: skip
  assert result.scores.metrics.keys() == {"within", "mae"}
  assert 0 <= result.score == result.scores.metrics["within"] <= 1
  assert "validation/within" in result.history
  # Saved and read again, with its numbers.
  stored = read_result(tmp_path / "run").tasks[0]
  assert (stored.kind, stored.test) == ("angles", result.scores)
  task = mv.load_task(tmp_path / "run" / "tasks" / "pets", backbone)
  assert task.spec.kind.name == "angles"
  # Evaluated and answered as in the run.
  found = mv.evaluate_tasks(backbone, task, data, progress=False)["pets"]
  assert found.score == pytest.approx(result.score)
  logits = np.asarray(mv.forward(backbone, [task], PIXELS / 127.5 - 1)["pets"])
  turned = task.spec.kind.activate(logits)
  assert turned.dtype == np.float64
  assert ((turned >= 0) & (turned < 360)).all()
  [answer] = task.spec.kind.answers(("turn",), turned[:1])
  assert answer["values"][0]["value"] == turned[0, 0]
  # Said to people.
  shown = summary.summary(read_result(tmp_path / "run"), tmp_path)
  assert "test within 30" in shown
  assert f"{result.scores.metrics['mae']:.4g}  " in shown  # no percentage
  assert "share within 30 degrees, test" in model_card.to_text([task])
  assert inspect.main([str(tmp_path / "run" / "tasks" / "pets")]) == 0
  assert re.search(r"^test_within +\d+\.\d\d %$", capsys.readouterr().out, re.M)
  # And reported.
  split = in_memory.open_data(data, "pets", "test", ("turn",), kind="angles")
  predictions = evaluate.evaluate_source(
    evaluate.predict_fn(backbone, [task], sharding.make_mesh()), split,
    task.spec.preprocessing, batch_size=16, mesh=sharding.make_mesh(),
    kinds={"pets": task.spec.kind}, also=["predictions"],
  )["pets"].predictions  # fmt: skip
  report = reports.TaskEvaluation.of(task, split, predictions)
  reports.write_reports(tmp_path / "report", [report])
  written = json.loads((tmp_path / "report/pets/metrics.json").read_text())
  assert written["metrics"]["within"] == pytest.approx(result.score)
  assert (tmp_path / "report/pets/per_angle.csv").is_file()
  page = (tmp_path / "report/pets/report.html").read_text()
  assert "share of the images within 30 degrees." in page


def test_new_metric_needs_two_places(monkeypatch, tmp_path, capsys):
  """Where it is computed, and how it is called."""
  real = value_metrics.evaluation_of

  def with_bias(predictions):
    found = real(predictions)
    bias = float((predictions.predicted - predictions.target).mean())
    metrics = {**found.scores.metrics, "bias": bias}
    scores = dataclasses.replace(found.scores, metrics=metrics)
    return dataclasses.replace(found, scores=scores)

  bias = Metric("bias", "mean of predicted minus true")
  monkeypatch.setattr(value_metrics, "evaluation_of", with_bias)
  monkeypatch.setattr(Values, "metrics", {**Values.metrics, "bias": bias})
  monkeypatch.setattr(Values, "in_tables", ("r2", "bias"))
  backbone, data = tiny_backbone(depth=1), (PIXELS, ANGLES)
  result = mv.train_task(
    backbone, data, test=data, kind="values", class_names=("turn",),
    learning_rate=0.1, workdir=tmp_path / "run", **RUN,
  )  # fmt: skip
  assert "validation/bias" in result.history
  kind = result.task.spec.kind.kind
  shown = kind.table(result.scores.metrics, 1, ("degrees",))
  assert shown["bias"] == f"{result.scores.metrics['bias']:.4g}"
  assert "mean of predicted minus true, test" in model_card.to_text(
    [result.task]
  )
  assert inspect.main([str(tmp_path / "run" / "tasks" / "pets")]) == 0
  assert "test_bias" in capsys.readouterr().out


def test_the_page_names_the_places():
  text = (ROOT / "docs" / "dev" / "adding.md").read_text(encoding="utf-8")
  for what in ("a kind of task", "a metric", "a loss"):
    (row,) = re.findall(rf"^\| {what} \|.*$", text, re.M)
    for file in re.findall(r"`(memory_vit/[\w/]+\.py)`", row):
      assert (ROOT / file).is_file(), file
