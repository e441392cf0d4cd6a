"""The report of a task of labels: average precision, F1, figures, tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memory_vit import plots as figures_lib
from memory_vit.kinds import label_metrics
from memory_vit.kinds.calibration import BINS, Calibration
from memory_vit.kinds.label_metrics import LabelMetrics
from memory_vit.kinds.predictions import LabelPredictions
from memory_vit.reports import tables
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
from memory_vit.reports.task_evaluation import TaskEvaluation, overall
from memory_vit.runtime.messages import shortened

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_MOST_CURVES = 10
_MEANINGS = {
  "AP": "average precision of a label: the precision at the highest threshold "
  "that finds an example, averaged over all examples of the label.",
  "mAP": "mean AP over the labels that have examples.",
  "threshold": "the lowest probability at which the task predicts a label: the "
  "one with the greatest F1 on its validation split, or 0.5.",
  "precision, recall, F1": "for a label at its threshold: the share of its "
  "predictions that are right, the share of its examples for which it is "
  "predicted, and the harmonic mean of both.",
  "macro F1": "mean F1 over the labels that have examples or are predicted.",
  "log loss": "mean binary cross-entropy over all pairs of an example and a "
  "label, in nats: 0 is best.",
  "ECE": "expected calibration error: the difference between the probability "
  f"of a label and the share of examples that have it, in {BINS} bins of equal "
  "width, averaged over all pairs of an example and a label.",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LabelEvaluation(TaskEvaluation):
  """Evaluation of a task of labels."""

  kind, noun = "labels", "label"
  in_index = ("mAP", "macro F1", "ECE")
  meanings = _MEANINGS
  confidence = "probability of a label"
  predictions: LabelPredictions

  @functools.cached_property
  def each(self) -> LabelMetrics:
    return label_metrics.label_metrics(self.predictions)

  @functools.cached_property
  def summary(self) -> Mapping[str, Any]:
    return overall(
      self, label_metrics.evaluation_of(self.predictions, self.each)
    )

  @functools.cached_property
  def calibration(self) -> Calibration:
    return label_metrics.label_calibration(self.predictions)

  @functools.cached_property
  def _errors(self) -> np.ndarray:
    predictions = self.predictions
    wrong = predictions.predicted_labels != (predictions.label > 0.5)
    wrong &= predictions.has_prediction[:, None]
    return np.where(
      wrong, np.abs(predictions.probability - predictions.label), 0
    )

  def _mistake_texts(self, number: int) -> tuple[str, str, str]:
    predictions = self.predictions
    wrong = int(self._errors[number].argmax())
    share = 100 * predictions.probability[number, wrong]
    right, predicted = (
      ", ".join(self.class_names[i] for i in np.flatnonzero(chosen))
      or "no label"
      for chosen in (
        predictions.label[number] > 0.5,
        predictions.predicted_labels[number],
      )
    )
    note = f"{shortened(self.class_names[wrong])} {share:.1f} %"
    return right, predicted, note

  def numbers(self) -> list[Number]:
    summary = self.summary
    return [
      ("mAP", percent(summary["map"]), ""),
      ("macro F1", percent(summary["f1_macro"]), ""),
      ("log loss", number(summary["loss"]), ""),
      ("ECE", percent(summary["calibration_error"]), ""),
    ]

  def sections(
    self, plots: Mapping[str, bytes]
  ) -> dict[str, tuple[str, list[Html]]]:
    curves = plot(plots["precision_recall"], "Precision and recall of labels")
    calibration = reliability(
      "Do images have a label as often as its predicted probability says?",
      self.summary["calibration_error"],
      plots["calibration"],
    )
    return {
      "curves": ("Precision and recall", [curves]),
      "calibration": ("Calibration", calibration),
      "labels": ("Labels", _labels(self)),
    }

  def figures(self) -> dict[str, Figure]:
    """Draw precision-recall curves of the labels with the lowest AP."""
    average = self.each.average_precision
    # `argsort` puts NaN, the AP of labels without examples, last.
    lowest = np.argsort(average, kind="stable")[:_MOST_CURVES]
    shown = [i for i in lowest if not np.isnan(average[i])]
    curves = figures_lib.precision_recall_figure(
      [label_metrics.curve(self.predictions, int(i)) for i in shown],
      [f"{self.class_names[i]} ({100 * average[i]:.0f} %)" for i in shown],
    )
    return {"precision_recall": curves}

  def write_predictions(self, folder: Path) -> None:
    tables.write_labels(folder, self)


def _labels(evaluation: LabelEvaluation) -> list[Html]:
  metrics, names = evaluation.each, evaluation.class_names
  order = np.argsort(metrics.average_precision, kind="stable")[:MOST_ROWS]
  rows = [
    (
      names[i], f"{metrics.support[i]:,}", f"{metrics.predicted[i]:,}",
      percent(metrics.average_precision[i], 1),
      percent(metrics.precision[i], 1), percent(metrics.recall[i], 1),
      percent(metrics.f1[i], 1), f"{metrics.threshold[i]:.3f}",
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
