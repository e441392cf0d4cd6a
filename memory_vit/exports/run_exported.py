"""Run an exported model in a separate process.

  python run_exported.py FORMAT MODEL FOLDER

FOLDER has `images.npy`, and for a SavedModel also image files in `files/`. The
outputs are written to FOLDER/SIGNATURE/NAME.npy, and seconds are printed as
JSON. Like users of an exported file, the script does not need memory_vit.
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

# Function that takes images, or the bytes of image files, and returns
# {name of an output: array (b, c)}.
Call = Callable[[Any], Mapping[str, Any]]
# A measurement of time ends after this many seconds, or this many calls.
_TIMING_SECONDS, _CALLS = 10.0, 5


def load_stablehlo(model: Path) -> dict[str, Call]:
  """Read `model.stablehlo`; needs only jax."""
  import jax
  from jax import export

  exported = export.deserialize(bytearray(model.read_bytes()))
  return {"serving_default": jax.jit(exported.call)}


def load_saved_model(model: Path) -> dict[str, Call]:
  """Read `saved_model/`; needs only TensorFlow."""
  import tensorflow as tf

  loaded = tf.saved_model.load(str(model))

  # Both functions refer to `loaded`, because a signature alone would not keep
  # the variables of the model alive.
  def serve(images: np.ndarray) -> Mapping[str, Any]:
    call = loaded.signatures["serving_default"]
    return call(images=tf.constant(images))

  def decode(files: list[bytes]) -> Mapping[str, Any]:
    return loaded.signatures["encoded"](encoded=tf.constant(files))

  return {"serving_default": serve, "encoded": decode}


def load_onnx(model: Path) -> dict[str, Call]:
  """Read `model.onnx`; needs only onnxruntime."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # log errors, but no warnings
  session = onnxruntime.InferenceSession(
    model, options, providers=["CPUExecutionProvider"]
  )
  names = [output.name for output in session.get_outputs()]

  def call(images: np.ndarray) -> dict[str, Any]:
    return dict(zip(names, session.run(names, {"images": images}), strict=True))

  return {"serving_default": call}


# {format: (library to import before timing, function that reads the model)}.
LOADERS = {
  "stablehlo": ("jax", load_stablehlo),
  "saved_model": ("tensorflow", load_saved_model),
  "onnx": ("onnxruntime", load_onnx),
}


def main(kind: str, model: Path, folder: Path) -> dict[str, float]:
  """Save the outputs of all signatures; return times of the first signature."""
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
  """Return the median seconds of several calls; `call` must be compiled."""
  times: list[float] = []
  while len(times) < _CALLS and sum(times) < _TIMING_SECONDS:
    began = time.perf_counter()
    arrays(call(images))
    times.append(time.perf_counter() - began)
  return statistics.median(times)


def arrays(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Wait for outputs, and return them as NumPy arrays."""
  return {name: np.asarray(value) for name, value in outputs.items()}


def _save(folder: Path, outputs: Mapping[str, np.ndarray]) -> None:
  folder.mkdir()
  for name, values in outputs.items():
    np.save(folder / f"{name}.npy", values)


if __name__ == "__main__":
  print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
