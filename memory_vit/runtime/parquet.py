"""Parquet files of ours: checked pages, and what their metadata says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# The key of a description in the metadata of a file, as JSON.
METADATA = b"memory_vit"


def checked(path: Path) -> pq.ParquetFile:
  """Open a file so that whatever is read of it is what was written."""
  return pq.ParquetFile(path, page_checksum_verification=True)


def described(schema: pa.Schema) -> Mapping[str, Any]:
  """What the metadata of a file says of it.

  Raises:
    LookupError: where it says nothing; or `TypeError`, or `ValueError`.
  """
  found = json.loads((schema.metadata or {})[METADATA])
  if not isinstance(found, dict):
    raise TypeError(f"it is a {type(found).__name__}, expected a dictionary")
  return found
