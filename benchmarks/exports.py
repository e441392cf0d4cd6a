"""Measure exported models on real images: differences, sizes, speed.

  python -m benchmarks.exports --backbone=NPZ --task=DIR --data=DIR
    [--images=200] [--format stablehlo saved_model onnx] [--json=FILE]

DIR is a version of a TFDS data set, such as tfds/tiny_imagenet_a/1.0.0. Each
exported model runs in a process without this package, on the first images of
the test split: preprocessed as in evaluation, and for a SavedModel also as
files. Differences are relative to the largest output of `mv.forward`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

import memory_vit as mv
from memory_vit.exports import check, onnx_file, saved_model, stablehlo
from memory_vit.runtime.tables import table
from memory_vit.tasks import model_loading

_FILES = {
  "stablehlo": stablehlo.FILE,
  "saved_model": saved_model.DIRECTORY,
  "onnx": onnx_file.FILE,
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Export, run, compare, print a table; returns --json."""
  arguments = _arguments(sys.argv[1:] if argv is None else argv)
  backbone, tasks = model_loading.load_model(
    arguments.backbone, arguments.task, arguments.dtype, any_regime=True
  )
  files = _image_files(arguments.data, arguments.images)
  images = mv.preprocess(files, tasks)
  expected = mv.forward(backbone, tasks, images)
  result = {}
  for format in arguments.format:
    with tempfile.TemporaryDirectory() as folder:
      out = Path(folder) / "out"
      report = mv.export_model(backbone, tasks, out, format=format)
      given = files if format == "saved_model" else []
      found, _ = check.run(format, out / _FILES[format], images, given)
    compared = report.comparison
    result[format] = {
      "images": len(files),
      "max_difference": _differences(found, expected),
      "mebibytes": sum(f["bytes"] for f in report.files.values()) / 2**20,
      **{k: v for k, v in compared.items() if k.endswith("_seconds")},
    }
  _print(result)
  if arguments.json:
    Path(arguments.json).write_text(json.dumps(result, indent=2))
  return result


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.exports", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--backbone", required=True)
  add("--task", required=True, action="append")
  add("--data", required=True, help="a version of a TFDS data set")
  add("--images", type=int, default=200)
  add("--format", nargs="+", choices=_FILES, default=["stablehlo"])
  add("--dtype", default="float32")
  add("--json", help="file for the numbers")
  return parser.parse_args(argv)


def _image_files(path: str, count: int) -> list[bytes]:
  """The first files of the test split, as stored in the data set."""
  builder = tfds.builder_from_directory(path)
  decoders = {"image": tfds.decode.SkipDecoding()}
  examples = builder.as_dataset(split="test", decoders=decoders).take(count)
  return [example["image"].numpy() for example in examples]


def _differences(
  found: Mapping[str, Mapping[str, np.ndarray]], expected: Mapping[str, Any]
) -> dict[str, float]:
  """{signature: the largest difference of all outputs}."""
  return {
    signature: max(
      check.difference(outputs.get(name), np.asarray(values))
      for name, values in expected.items()
    )
    for signature, outputs in found.items()
  }


def _print(result: Mapping[str, Any]) -> None:
  header = ("", "difference", "MiB", "load s", "first s", "8 images", "ours")
  rows = [
    (
      format,
      ", ".join(f"{d:.1e}" for d in row["max_difference"].values()),
      f"{row['mebibytes']:.1f}",
      *(
        f"{row[f'{key}_seconds']:.3f}"
        for key in ("load", "first_call", "call", "memory_vit_call")
      ),
    )
    for format, row in result.items()
  ]
  print(table(header, rows))


if __name__ == "__main__":
  main()
