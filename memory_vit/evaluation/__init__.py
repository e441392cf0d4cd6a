"""Evaluation of tasks: every example of a split counts exactly once."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
  from memory_vit.evaluation.hits import (
    Hits,
    PairedDifference,
    paired_difference,
    read_hits,
  )
  from memory_vit.evaluation.timing import median_seconds
  from memory_vit.evaluation.verify import Evaluator
  from memory_vit.kinds.calibration import Calibration, calibrate
  from memory_vit.kinds.predictions import (
    LabelPredictions,
    SplitPredictions,
    ValuePredictions,
  )

__all__ = [
  "Calibration",
  "Evaluator",
  "Hits",
  "LabelPredictions",
  "PairedDifference",
  "SplitPredictions",
  "ValuePredictions",
  "calibrate",
  "evaluate_source",
  "median_seconds",
  "paired_difference",
  "predict_fn",
  "read_hits",
]
