"""The part of a report's page about labels: average precision and F1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memory_vit.evaluation.calibration import BINS
from memory_vit.reports.document import (
  MOST_ROWS,
  Number,
  cut_table,
  number,
  percent,
  plot,
  reliability,
)
from memory_vit.reports.markup import Html
from memory_vit.reports.task_evaluation import LabelEvaluation

WORST = "Most confident mistakes"
IN_INDEX = ("mAP", "macro F1", "ECE")
MEANINGS = {
  "AP": "average precision of a label: the mean of the precision over all its "
  "examples, each at the threshold that just finds it.",
  "mAP": "mean AP over the labels that have examples.",
  "threshold": "the probability from which a label is predicted, stored in the "
  "task: that with the greatest F1 on the validation split, else 0.5.",
  "precision, recall, F1": "of a label at its threshold: the share of its "
  "predictions that are right, the share of its examples that are found, and "
  "their harmonic mean.",
  "macro F1": "mean F1 over the labels that have examples or are predicted.",
  "log loss": "mean binary cross-entropy over all pairs of an example and a "
  "label, in nats: 0 is best.",
  "ECE": "expected calibration error: how far probabilities of labels are from "
  f"the share of pairs that have the label, in {BINS} bins of equal width, "
  "weighted by their pairs.",
}


def numbers(evaluation: LabelEvaluation) -> list[Number]:
  found = evaluation.summary
  return [
    ("mAP", percent(found["map"]), ""),
    ("macro F1", percent(found["f1_macro"]), ""),
    ("log loss", number(found["loss"]), ""),
    ("ECE", percent(found["calibration_error"]), ""),
  ]


def sections(
  evaluation: LabelEvaluation, plots: Mapping[str, bytes]
) -> dict[str, tuple[str, list[Html]]]:
  """{anchor: (title, content)}."""
  curves = plot(plots["precision_recall"], "Precision and recall of labels")
  calibration = reliability(
    "How often do images have a label whose probability is this high?",
    evaluation.summary["calibration_error"],
    plots["calibration"],
  )
  return {
    "curves": ("Precision and recall", [curves]),
    "calibration": ("Calibration", calibration),
    "labels": ("Labels", _labels(evaluation)),
  }


def _labels(evaluation: LabelEvaluation) -> list[Html]:
  found, names = evaluation.each, evaluation.class_names
  # NaN is sorted last.
  order = np.argsort(found.average_precision, kind="stable")[:MOST_ROWS]
  rows = [
    (
      names[i], f"{found.support[i]:,}", f"{found.predicted[i]:,}",
      percent(found.average_precision[i], 1), percent(found.precision[i], 1),
      percent(found.recall[i], 1), percent(found.f1[i], 1),
      f"{found.threshold[i]:.3f}",
    )
    for i in order
  ]  # fmt: skip
  header = ("label", "examples", "predicted", "AP", "precision", "recall",
            "F1", "threshold")  # fmt: skip
  return cut_table(
    header,
    rows,
    total=len(names),
    file="per_label.csv",
    order="The lowest AP comes first, labels without examples last.",
    names=(0,),
    label="labels",
  )
