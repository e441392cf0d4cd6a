"""Run an exported model without our code, and compare it with `mv.forward`."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from memory_vit.errors import ExportError
from memory_vit.exports import run_exported
from memory_vit.exports.exported_model import ExportedModel
from memory_vit.exports.image_input import ImageInput
from memory_vit.kinds import TaskKind
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.messages import escaped, shortened

# {dtype: maximum difference of outputs, as a share of the greatest output}.
# Outputs differ slightly, because each compiler adds numbers in its own order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
# Tolerances if images are resized with antialiasing: the export rounds some
# pixels to another grey level than Pillow does, see docs/export.md.
ANTIALIASED_TOLERANCE = {"float32": 1e-2, "bfloat16": 3e-2}
# Environment of the child process that runs an export. The child process cannot
# share the accelerator of its parent process, and TensorFlow's XLA aborts on
# flags that only jax knows.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "XLA_FLAGS": "",
  "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0",
}  # fmt: skip

Outputs = dict[str, Float[np.ndarray, "b _"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Differences of outputs between an export and `mv.forward`, and times."""

  images: int
  tolerance: Mapping[str, float]  # {signature: largest allowed difference}
  # {signature: {name of an output: result of `difference`}}
  max_difference: Mapping[str, Mapping[str, float]]
  load_seconds: float
  first_call_seconds: float  # includes compilation
  # Median seconds of the export and of `mv.forward` for a batch of all images.
  # The time of `mv.forward` does not include preprocessing.
  call_seconds: float
  memory_vit_call_seconds: float


def compare(
  exported: ExportedModel,
  kind: str,
  model: Path,
  images: ImageInput,
  count: int,
) -> Comparison:
  """Run an exported model on random images; raise if its outputs differ."""
  inputs, prepared = _random_images(exported.preprocessing, images, count)
  files = _random_files(count) if kind == "saved_model" else []
  expected = {
    "serving_default": run_exported.arrays(exported.call_own(prepared))
  }
  if files:
    outputs = exported.call_own(_preprocessed(files, exported.preprocessing))
    expected["encoded"] = run_exported.arrays(outputs)
  exported_outputs, seconds = run(kind, model, inputs, files)
  differences = {
    signature: {
      name: difference(
        exported_outputs[signature].get(name),
        outputs[name],
        exported.activated.get(name),
      )
      for name in exported.names
    }
    for signature, outputs in expected.items()
  }
  tolerance = {name: tolerance_of(exported, images, name) for name in expected}
  require_within(differences, tolerance)
  return Comparison(
    images=count,
    tolerance=tolerance,
    max_difference=differences,
    memory_vit_call_seconds=run_exported.call_seconds(
      exported.call_own, prepared
    ),
    **seconds,
  )


def tolerance_of(
  exported: ExportedModel, images: ImageInput, signature: str
) -> float:
  """Return the allowed difference of a signature's outputs, see `TOLERANCE`."""
  resizes = signature == "encoded" or images.kind == "uint8"
  dtype = exported.backbone.config.dtype
  if resizes and exported.preprocessing.interpolation != "bilinear":
    return ANTIALIASED_TOLERANCE[dtype]
  return TOLERANCE[dtype]


def run(
  kind: str, model: Path, images: np.ndarray, files: Sequence[bytes] = ()
) -> tuple[dict[str, Outputs], dict[str, float]]:
  """Run an exported model in a process; return {signature: outputs} and times.

  `kind` is a key of `run_exported.LOADERS`; `files` are the bytes of image
  files for the signature "encoded".
  """
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    np.save(folder / "images.npy", images)
    (folder / "files").mkdir()
    for i, content in enumerate(files):
      (folder / "files" / f"{i:08}").write_bytes(content)
    # -P keeps the script's directory, which has our modules, off sys.path.
    done = subprocess.run(
      [sys.executable, "-P", run_exported.__file__, kind, model, folder],
      capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT},
    )  # fmt: skip
    if done.returncode:
      lines = done.stderr.strip().splitlines() or ["no message"]
      raise ExportError(
        f"the exported {kind} cannot be run (exit status "
        f"{done.returncode}): {shortened(escaped(lines[-1]), 400)}"
      )
    outputs: dict[str, Outputs] = {}
    for file in folder.glob("*/*.npy"):
      outputs.setdefault(file.parent.name, {})[file.stem] = np.load(file)
  return outputs, json.loads(done.stdout.splitlines()[-1])


def difference(
  found: Any, logits: np.ndarray, activated: TaskKind | None = None
) -> float:
  """Return the greatest difference of outputs / the greatest logit.

  If `found` has activated outputs, such as probabilities, the differences are
  converted to differences of logits. The result is infinite if shapes differ or
  an output is not finite.
  """
  if found is None or found.shape != logits.shape:
    return float("inf")
  found, logits = found.astype(np.float64), logits.astype(np.float64)
  greatest = np.abs(logits).max()
  if activated is None:
    differences = np.abs(found - logits)
  else:
    differences, least = activated.kind.explained(activated, found, logits)
    greatest = max(greatest, least)
  share = float(differences.max() / max(greatest, 1e-30))
  return share if np.isfinite(share) else float("inf")


def require_within(
  differences: Mapping[str, Mapping[str, float]],
  tolerance: Mapping[str, float],
) -> None:
  """Raise if outputs of an export differ by more than the tolerance."""
  problems = [
    f"{name} of {signature} by {share:.3g} (at most {tolerance[signature]:g})"
    for signature, shares in differences.items()
    for name, share in shares.items()
    if not share <= tolerance[signature]
  ]
  if problems:
    raise ExportError(
      "outputs of the exported model differ from mv.forward: "
      f"{'; '.join(problems)}. These numbers are shares of the greatest "
      "output. Nothing was written: give another --format, and report this as "
      "a bug."
    )


def _random_images(
  preprocessing: EvalPreprocessing, images: ImageInput, count: int
) -> tuple[np.ndarray, np.ndarray]:
  """Return random images as (inputs of the export, inputs of `mv.forward`)."""
  rng = np.random.default_rng(0)
  side = preprocessing.image_size
  if images.kind == "float32":
    inputs = rng.uniform(-1, 1, (count, side, side, 3)).astype(np.float32)
    return inputs, inputs
  # If the export takes any image size, test with images that are not square.
  height, width = images.size or (side + side // 2, 2 * side + 1)
  inputs = rng.integers(0, 256, (count, height, width, 3)).astype(np.uint8)
  return inputs, _preprocessed(list(inputs), preprocessing)


def _random_files(count: int) -> list[bytes]:
  """Return the bytes of JPEG and PNG files, with images of different sizes."""
  rng = np.random.default_rng(1)
  files = []
  for i in range(count):
    pixels = rng.integers(0, 256, (40 + i % 7, 60 + i % 5, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG" if i % 2 else "JPEG")
    files.append(file.getvalue())
  return files


def _preprocessed(images: Any, preprocessing: EvalPreprocessing) -> np.ndarray:
  """Return images preprocessed as in evaluation; this may import TensorFlow."""
  from memory_vit.evaluation.preprocess import preprocess

  return preprocess(images, preprocessing)
