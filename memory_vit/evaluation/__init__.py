"""Images to logits to metrics: every example of a split counts once."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
  from memory_vit.evaluation.verify import Evaluator

__all__ = ["Evaluator", "evaluate_source", "predict_fn"]
