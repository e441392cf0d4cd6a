"""The report of a task of classes: metrics, confusions, figures, tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memory_vit import plots as figures_lib
from memory_vit.kinds import class_metrics, confusion
from memory_vit.kinds.calibration import BINS, Calibration, calibrate
from memory_vit.kinds.class_metrics import (
  ClassMetrics,
  Proportion,
  SplitMetrics,
)
from memory_vit.kinds.confusion import largest_confusions
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.reports import tables
from memory_vit.reports.document import (
  MISSING,
  MOST_ROWS,
  Number,
  cut_table,
  number,
  percent,
  plot,
  reliability,
  table,
)
from memory_vit.reports.markup import Html, element
from memory_vit.reports.task_evaluation import TaskEvaluation

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_MOST_CONFUSIONS = 10
_MEANINGS = {
  "top-1": "share of the examples whose most probable class is right. The "
  "range is the 95 % Wilson score interval, which covers the choice of "
  "examples, but not the variation between trainings.",
  "top-5": "share whose class is among the five most probable.",
  "unknown": "share of the examples that the task rejects as images of none of "
  "its classes, although each is of one; top-1 ignores the rejection.",
  "largest class": "the accuracy of always predicting the most frequent class.",
  "precision, recall, F1": "for a class: the share of its predictions that are "
  "right, the share of its examples that are found, and their harmonic mean.",
  "macro F1": "mean F1 over the classes that have examples or are predicted: "
  "rare classes count as much as frequent ones.",
  "balanced accuracy": "mean recall over the classes that have examples.",
  "log loss": "mean cross-entropy (negative log-likelihood) in nats: 0 is "
  "best.",
  "Brier score": "squared error of the probabilities, summed over the classes "
  "and averaged over the examples: 0 is best, 2 worst.",
  "ECE": "expected calibration error: the difference between confidence and "
  f"accuracy in {BINS} bins of equal width, averaged over the examples.",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ClassEvaluation(TaskEvaluation):
  """Evaluation of a task of classes."""

  kind, noun = "classes", "class"
  in_index = ("top-1", "macro F1", "ECE")
  meanings = _MEANINGS
  confidence = "confidence in the predicted class"
  predictions: SplitPredictions

  @functools.cached_property
  def each(self) -> ClassMetrics:
    return class_metrics.class_metrics(self.predictions)

  @functools.cached_property
  def metrics(self) -> SplitMetrics:
    return class_metrics.split_metrics(self.predictions, self.each)

  @property
  def summary(self) -> Mapping[str, Any]:
    names = ("unknown", "top1_of_others")
    rejected = dict(zip(names, self._rejected, strict=False))
    return {**dataclasses.asdict(self.metrics), **rejected}

  @property
  def _rejected(self) -> tuple[float | None, ...]:
    """(rejected share, accuracy on accepted images); () if rejection is off."""
    predictions = self.predictions
    if predictions.unknown_below is None:
      return ()
    counted, unknown = predictions.counted, predictions.unknown
    right = predictions.correct[counted & ~unknown]
    accuracy = float(right.mean()) if right.size else None
    return float(unknown[counted].mean()), accuracy

  @functools.cached_property
  def confusion(self) -> Any:
    """Sparse confusion matrix, see `confusion.confusion_matrix`."""
    return confusion.confusion_matrix(self.predictions)

  @functools.cached_property
  def calibration(self) -> Calibration:
    predicted = self.predictions.predicted
    return calibrate(
      self.predictions.confidence[predicted],
      self.predictions.correct[predicted],
    )

  @property
  def worst(self) -> np.ndarray:
    return self.predictions.mistakes

  def _mistake_texts(self, number: int) -> tuple[str, str, str]:
    predictions, names = self.predictions, self.class_names
    return (
      names[predictions.label[number]],
      names[predictions.top_classes[number, 0]],
      f"{100 * predictions.confidence[number]:.1f} %",
    )

  def numbers(self) -> list[Number]:
    metrics = self.metrics
    top1, top5 = metrics.top1, metrics.top5
    return [
      ("top-1", percent(top1.share), _interval(top1)),
      *([("top-5", percent(top5.share), _interval(top5))] if top5 else []),
      ("macro F1", percent(metrics.macro_f1), ""),
      ("balanced accuracy", percent(metrics.balanced_accuracy), ""),
      ("largest class", percent(metrics.majority), ""),
      *self._rejection(),
      ("log loss", number(metrics.loss), ""),
      ("Brier score", number(metrics.brier), ""),
      ("ECE", percent(metrics.calibration_error), ""),
    ]

  def _rejection(self) -> list[Number]:
    """Return numbers about rejected images; [] if rejection is off."""
    titles = ("unknown", "top-1 of the others")
    shares = zip(titles, self._rejected, strict=False)
    return [(title, percent(share), "") for title, share in shares]

  def sections(
    self, plots: Mapping[str, bytes]
  ) -> dict[str, tuple[str, list[Html]]]:
    calibration = reliability(
      "Is the model right as often as its confidence (the probability of the "
      "predicted class) says?",
      self.metrics.calibration_error,
      plots["calibration"],
    )
    return {
      "confusions": ("Confusions", _confusions(self, plots)),
      "calibration": ("Calibration", calibration),
      "classes": ("Classes", _classes(self)),
    }

  def figures(self) -> dict[str, Figure]:
    figure = figures_lib.confusion_matrix_figure(
      self.confusion, self.class_names
    )
    return {"confusion_matrix": figure}

  def write_predictions(self, folder: Path) -> None:
    tables.write_confusions_csv(folder / "confusion_matrix.csv", self)
    tables.write_predictions_csv(folder / tables.CSV, self)
    tables.write_predictions_parquet(folder / tables.PARQUET, self)


def _interval(proportion: Proportion) -> str:
  return f"{100 * proportion.low:.1f} to {percent(proportion.high, 1)}"


def _confusions(
  evaluation: ClassEvaluation, plots: Mapping[str, bytes]
) -> list[Html]:
  names, support = evaluation.class_names, evaluation.each.support
  largest = largest_confusions(evaluation.confusion, _MOST_CONFUSIONS)
  rows = [
    (
      names[pair.label],
      names[pair.predicted],
      f"{pair.examples:,}",
      percent(pair.examples / support[pair.label], 1),
    )
    for pair in largest
  ]
  header = ("class", "predicted as", "examples", "share of class")
  figure = plot(plots["confusion_matrix"], "Confusion matrix")
  if not rows:
    return [figure, element("p", "There are no confusions.")]
  title = element("h3", f"The {len(rows)} largest")
  return [figure, title, table(header, rows, names=(0, 1), label="confusions")]


def _classes(evaluation: ClassEvaluation) -> list[Html]:
  """Return a note and a table: metrics of each class, the lowest F1 first."""
  classes, names = evaluation.each, evaluation.class_names
  # Use NaN for classes without examples, because `argsort` puts NaN last.
  f1 = np.where(classes.support > 0, classes.f1, np.nan)
  order = np.argsort(f1, kind="stable")[:MOST_ROWS]
  taken = _most_taken_for(evaluation)
  worst = _worst_mistakes(evaluation)
  rows = [
    (
      names[i], f"{classes.support[i]:,}", percent(classes.precision[i], 1),
      percent(classes.recall[i], 1), percent(classes.f1[i], 1),
      taken.get(int(i), MISSING), worst.get(int(i), MISSING),
    )
    for i in order
  ]  # fmt: skip
  header = ("class", "examples", "precision", "recall", "F1",
            "most often confused with", "most confident mistake")  # fmt: skip
  return cut_table(
    header,
    rows,
    total=len(names),
    file="per_class.csv",
    order="The lowest F1 comes first, classes without examples last.",
    names=(0, 5, 6),
    label="classes",
  )


def _most_taken_for(evaluation: ClassEvaluation) -> dict[int, str]:
  """Return {class: the most frequent wrong prediction, with its count}."""
  texts: dict[int, str] = {}
  matrix = evaluation.confusion
  for pair in largest_confusions(matrix, matrix.nnz):
    name = evaluation.class_names[pair.predicted]
    texts.setdefault(pair.label, f"{name} ({pair.examples:,})")
  return texts


def _worst_mistakes(evaluation: ClassEvaluation) -> dict[int, str]:
  mistakes = evaluation.predictions.mistakes
  labels, first = np.unique(
    evaluation.predictions.label[mistakes], return_index=True
  )
  texts = {}
  for label, place in zip(labels.tolist(), first.tolist(), strict=True):
    mistake = evaluation.mistake(int(mistakes[place]))
    texts[label] = (
      f"{mistake.predicted}, {mistake.note}, example {mistake.example}"
    )
  return texts
