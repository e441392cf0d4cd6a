"""Metrics by name: how they are called, and how their numbers are written."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
  """A number over the examples of a split.

  Attributes:
    title: for logs and tables.
    meaning: for people who do not know the title.
    is_share: whether it is written as a percentage.
  """

  title: str
  meaning: str
  is_share: bool = False

  def text(self, number: float | None, digits: int = 2) -> str:
    """The number for people; "-" if it is not known."""
    if number is None:
      return "-"
    if self.is_share:
      return f"{100 * number:.{digits}f} %"
    return f"{number:.4g}"


# The first of a kind is its score.
CLASSES = {
  "top1": Metric("top-1", "accuracy", is_share=True),
  "top5": Metric("top-5", "top-5 accuracy", is_share=True),
}
LABELS = {
  "map": Metric("mAP", "mean average precision", is_share=True),
  "f1_macro": Metric("macro F1", "F1, mean over labels", is_share=True),
  "calibration_error": Metric(
    "calibration error", "calibration error", is_share=True
  ),
}
VALUES = {
  "r2": Metric("R2", "R2, mean over values"),
  "mae": Metric("MAE", "mean absolute error, mean over values"),
  "rmse": Metric("RMSE", "root of the mean squared error, mean over values"),
  "spearman": Metric("Spearman", "Spearman correlation, mean over values"),
}
METRICS = {**CLASSES, **LABELS, **VALUES}


def tells_top5(classes: int) -> bool:
  """Whether "top5" is not always 1: of 5 classes, one of 5 guesses is right."""
  return classes > 5
