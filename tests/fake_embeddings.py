"""Images in folders, and what `memory-vit embed` makes of them."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import fake_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit.commands import embed

CLASSES = ("ants", "bees", "cats")
# Of a class, in train/ and in test/.
TRAIN, TEST = 11, 5


def write_images(root: pathlib.Path) -> pathlib.Path:
  """root/data/{train,test}/CLASS/NUMBER.png, each a picture of its own.

  Some lie in CLASS/more/deep/, which belong to the class as well.
  """
  for split, count, first in (("train", TRAIN, 0), ("test", TEST, 500)):
    for label, name in enumerate(CLASSES):
      folder = root / "data" / split / name
      (folder / "more" / "deep").mkdir(parents=True)
      for i in range(count):
        picture = fake_data.noise(first + 100 * label + i)
        picture[..., label] = 255  # something to learn
        file = folder / ("" if i % 4 else "more/deep") / f"{i:02}.png"
        file.write_bytes(fake_data.encode(picture, "PNG"))
  return root / "data"


def write_backbone(root: pathlib.Path, **options: Any) -> pathlib.Path:
  """A tiny backbone as a file."""
  path = root / "tiny.npz"
  mv.save_backbone(tiny_backbone(depth=1, **options), path)
  return path


def embedded(
  root: pathlib.Path, output: str, images: pathlib.Path, *flags: str
) -> pathlib.Path:
  """Runs `embed`, and requires that it could."""
  given = [
    f"--backbone={root / 'tiny.npz'}", f"--input={images}",
    f"--output={root / output}", "--stored=float32", "--batch_size=8",
    "--shard_images=16",
  ]  # fmt: skip
  assert embed.main([*given, *flags]) in (0, 1)
  return root / output


def rewritten(path: pathlib.Path, change: Any) -> None:
  """Changes the table of a file: a function of it, and of its metadata."""
  table = pq.read_table(path)
  about = json.loads(table.schema.metadata[b"memory_vit"])
  table, about = change(table, about)
  metadata = {b"memory_vit": json.dumps(about).encode()}
  pq.write_table(
    table.replace_schema_metadata(metadata), path, write_page_checksum=True
  )


def column_set(table: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
  """The table with other values in a column."""
  index = table.schema.get_field_index(name)
  kind = table.schema.field(index).type
  return table.set_column(index, name, pa.array(values, kind))


def with_values(
  table: pa.Table, name: str, values: Mapping[str, np.ndarray]
) -> pa.Table:
  """The table with the values of {path: array} in a column; others stay."""
  rows = zip(table["path"].to_pylist(), table[name].to_pylist(), strict=True)
  return column_set(
    table,
    name,
    [values[p].tobytes() if p in values else old for p, old in rows],
  )
