"""Embeddings of images, read back from Parquet in place of the images."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.embeddings.arrays import Embeddings, read_embeddings
  from memory_vit.embeddings.embedded_rows import EmbeddedRows
  from memory_vit.embeddings.embedding_files import EmbeddingFiles, open_files

__all__ = [
  "EmbeddedRows",
  "EmbeddingFiles",
  "Embeddings",
  "open_files",
  "read_embeddings",
]
