"""Read data sets into batches. Only data/ and exports/ import TensorFlow."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.data.batching import (
    eval_batches,
    train_batches,
    train_examples,
  )
  from memory_vit.data.data_record import data_differences, record_data
  from memory_vit.data.datasets import open_run_split, open_split
  from memory_vit.data.embeddings import Embeddings, read_embeddings
  from memory_vit.data.indexable import open_indexable
  from memory_vit.data.split import Split

__all__ = [
  "Embeddings",
  "Split",
  "data_differences",
  "eval_batches",
  "open_indexable",
  "open_run_split",
  "open_split",
  "read_embeddings",
  "record_data",
  "train_batches",
  "train_examples",
]
