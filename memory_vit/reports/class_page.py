"""The part of a report's page about classes: metrics and confusions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memory_vit.evaluation.calibration import BINS
from memory_vit.evaluation.classification import Proportion
from memory_vit.evaluation.confusion import largest_confusions
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
from memory_vit.reports.task_evaluation import ClassEvaluation

_MOST_CONFUSIONS = 10
WORST = "Most confident mistakes"
IN_INDEX = ("top-1", "macro F1", "ECE")
MEANINGS = {
  "top-1": "share of the examples whose most probable class is right. In "
  "brackets the 95 % Wilson score interval, for the examples as a sample of "
  "all: it says nothing of another training.",
  "top-5": "share whose class is among the five most probable.",
  "largest class": "the accuracy of always predicting the most frequent class.",
  "precision, recall, F1": "of a class: the share of its predictions that are "
  "right, the share of its examples that are found, and their harmonic mean.",
  "macro F1": "mean F1 over the classes that have examples or are predicted: "
  "rare classes count as much as frequent ones.",
  "balanced accuracy": "mean recall over the classes that have examples.",
  "log loss": "mean cross-entropy (negative log-likelihood) in nats: 0 is "
  "best.",
  "Brier score": "squared error of the probabilities, summed over the classes, "
  "mean over the examples: 0 is best, 2 worst.",
  "ECE": "expected calibration error: how far the confidence is from the "
  f"accuracy, in {BINS} bins of equal width, weighted by their examples.",
}


def sections(
  evaluation: ClassEvaluation, plots: Mapping[str, bytes]
) -> dict[str, tuple[str, list[Html]]]:
  """{anchor: (title, content)}."""
  calibration = reliability(
    "Is the model right as often as its confidence, the probability of the "
    "predicted class, says?",
    evaluation.metrics.calibration_error,
    plots["calibration"],
  )
  return {
    "confusions": ("Confusions", _confusions(evaluation, plots)),
    "calibration": ("Calibration", calibration),
    "classes": ("Classes", _classes(evaluation)),
  }


def numbers(evaluation: ClassEvaluation) -> list[Number]:
  found = evaluation.metrics
  top1, top5 = found.top1, found.top5
  return [
    ("top-1", percent(top1.share), _interval(top1)),
    *([("top-5", percent(top5.share), _interval(top5))] if top5 else []),
    ("macro F1", percent(found.macro_f1), ""),
    ("balanced accuracy", percent(found.balanced_accuracy), ""),
    ("largest class", percent(found.majority), ""),
    ("log loss", number(found.loss), ""),
    ("Brier score", number(found.brier), ""),
    ("ECE", percent(found.calibration_error), ""),
  ]


def _interval(found: Proportion) -> str:
  return f"{100 * found.low:.1f} to {percent(found.high, 1)}"


def _confusions(
  evaluation: ClassEvaluation, plots: Mapping[str, bytes]
) -> list[Html]:
  names, support = evaluation.class_names, evaluation.each.support
  largest = largest_confusions(evaluation.confusion, _MOST_CONFUSIONS)
  rows = [
    (
      names[one.label],
      names[one.predicted],
      f"{one.examples:,}",
      percent(one.examples / support[one.label], 1),
    )
    for one in largest
  ]
  header = ("class", "taken for", "examples", "of the class")
  figure = plot(plots["confusion_matrix"], "Confusion matrix")
  if not rows:
    return [figure, element("p", "There are no confusions.")]
  title = element("h3", f"The {len(rows)} largest")
  return [figure, title, table(header, rows, names=(0, 1), label="confusions")]


def _classes(evaluation: ClassEvaluation) -> list[Html]:
  """Metrics of each class, the lowest F1 first."""
  classes, names = evaluation.each, evaluation.class_names
  # NaN is sorted last.
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
            "most often taken for", "most confident mistake")  # fmt: skip
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
  """{class: the class that most of its examples are confused with}."""
  found: dict[int, str] = {}
  matrix = evaluation.confusion
  for one in largest_confusions(matrix, matrix.nnz):
    name = evaluation.class_names[one.predicted]
    found.setdefault(one.label, f"{name} ({one.examples:,})")
  return found


def _worst_mistakes(evaluation: ClassEvaluation) -> dict[int, str]:
  mistakes = evaluation.predictions.mistakes
  labels, first = np.unique(
    evaluation.predictions.label[mistakes], return_index=True
  )
  found = {}
  for label, place in zip(labels.tolist(), first.tolist(), strict=True):
    mistake = evaluation.mistake(int(mistakes[place]))
    found[label] = (
      f"{mistake.predicted}, {mistake.note}, example {mistake.example}"
    )
  return found
