"""Answer images by a changing set of tasks, in programs of fixed shapes."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.kinds.guesses import Guess
  from memory_vit.prediction.config import PredictorConfig
  from memory_vit.prediction.predictions import Predictions
  from memory_vit.prediction.predictor import Predictor
  from memory_vit.prediction.task_set import Change, TaskDescription, TaskSet

__all__ = [
  "Change",
  "Guess",
  "Predictions",
  "Predictor",
  "PredictorConfig",
  "TaskDescription",
  "TaskSet",
]
