"""Run an exported model by itself, in a process of its own.

  python run_exported.py FORMAT MODEL FOLDER

FOLDER has `images.npy`, and for a SavedModel also image files in `files/`. The
outputs are written to FOLDER/SIGNATURE/NAME.npy, and seconds are printed as
JSON. It imports nothing of this package, as any user of the exported file.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# {name: outputs (b, c)} of images, or of the content of image files.
Call = Callable[[Any], Mapping[str, Any]]
# Calls are timed until this number of seconds, or of calls, is reached.
_TIMING_SECONDS, _CALLS = 10.0, 5


def load_stablehlo(model: Path) -> dict[str, Call]:
  """Read `model.stablehlo`; needs jax alone."""
  import jax
  from jax import export

  exported = export.deserialize(bytearray(model.read_bytes()))
  return {"serving_default": jax.jit(exported.call)}


def load_saved_model(model: Path) -> dict[str, Call]:
  """Read `saved_model/`; needs TensorFlow alone."""
  import tensorflow as tf

  loaded = tf.saved_model.load(str(model))

  # Both hold `loaded`: signatures do not keep their variables alive.
  def serve(images: np.ndarray) -> Mapping[str, Any]:
    call = loaded.signatures["serving_default"]
    return call(images=tf.constant(images))

  def decode(files: list[bytes]) -> Mapping[str, Any]:
    return loaded.signatures["encoded"](encoded=tf.constant(files))

  return {"serving_default": serve, "encoded": decode}


def load_onnx(model: Path) -> dict[str, Call]:
  """Read `model.onnx`; needs onnxruntime alone."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # no line for each omitted constant
  session = onnxruntime.InferenceSession(
    model, options, providers=["CPUExecutionProvider"]
  )
  names = [output.name for output in session.get_outputs()]

  def call(images: np.ndarray) -> dict[str, Any]:
    return dict(zip(names, session.run(names, {"images": images}), strict=True))

  return {"serving_default": call}


# Format -> its library, imported before time is measured, and the reader.
LOADERS = {
  "stablehlo": ("jax", load_stablehlo),
  "saved_model": ("tensorflow", load_saved_model),
  "onnx": ("onnxruntime", load_onnx),
}


def main(kind: str, model: Path, folder: Path) -> dict[str, float]:
  """Run all signatures once, and the first several times."""
  images = np.load(folder / "images.npy")
  library, load = LOADERS[kind]
  importlib.import_module(library)
  began = time.perf_counter()
  signatures = load(model)
  loaded = time.perf_counter()
  outputs = arrays(signatures["serving_default"](images))
  first = time.perf_counter()
  _save(folder / "serving_default", outputs)
  if "encoded" in signatures:
    files = [file.read_bytes() for file in sorted(folder.glob("files/*"))]
    _save(folder / "encoded", arrays(signatures["encoded"](files)))
  return {
    "load_seconds": loaded - began,
    "first_call_seconds": first - loaded,
    "call_seconds": call_seconds(signatures["serving_default"], images),
  }


def call_seconds(call: Call, images: np.ndarray) -> float:
  """The median of several calls, after compilation."""
  times: list[float] = []
  while len(times) < _CALLS and sum(times) < _TIMING_SECONDS:
    began = time.perf_counter()
    arrays(call(images))
    times.append(time.perf_counter() - began)
  return statistics.median(times)


def arrays(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Wait for outputs, as arrays of NumPy."""
  return {name: np.asarray(value) for name, value in outputs.items()}


def _save(folder: Path, outputs: Mapping[str, np.ndarray]) -> None:
  folder.mkdir()
  for name, values in outputs.items():
    np.save(folder / f"{name}.npy", values)


if __name__ == "__main__":
  print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
