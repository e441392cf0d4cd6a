"""Predict or embed millions of images into Parquet shards; runs can resume."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.bulk.embeddings import EmbeddingJob
  from memory_vit.bulk.predictions import PredictionJob
  from memory_vit.bulk.run import run_bulk

__all__ = [
  "EmbeddingJob",
  "PredictionJob",
  "run_bulk",
]
