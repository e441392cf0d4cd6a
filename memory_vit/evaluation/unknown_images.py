"""How well tasks of classes tell images of none of their classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sklearn.metrics

from memory_vit.errors import DataError
from memory_vit.images import image_files, reader
from memory_vit.kinds.predictions import SplitPredictions
from memory_vit.model.task import EvalPreprocessing, TaskSpec
from memory_vit.runtime import sharding
from memory_vit.runtime.progress_bar import ProgressBar

# For decoding, and batches of images.
_MEMORY_MIB = 2048


@dataclasses.dataclass(frozen=True)
class UnknownImages:
  """What a task says of images that are of none of its classes.

  Attributes:
    directory: of the images.
    images: the number that could be read.
    skipped: the number of others.
    area: under the ROC curve of `Kind.known_score`, between these images and
      the examples of the evaluation: 1 if all examples have a higher score,
      0.5 is chance.
    rejected: share of the images that are taken for unknown; None if the task
      has no threshold.
  """

  directory: str
  images: int
  skipped: int
  area: float
  rejected: float | None


def evaluate(
  predict: Callable[[Any], Mapping[str, Any]],
  directory: Path,
  specs: Sequence[TaskSpec],
  known: Mapping[str, SplitPredictions],
  *,
  mesh: jax.sharding.Mesh,
  batch_size: int,
) -> dict[str, UnknownImages]:
  """Compare images below a directory with the examples of an evaluation.

  Args:
    predict: images (b, side, side, 3) -> the outputs of tasks.
    directory: its images are of none of the classes.
    specs: of tasks of classes, which share their preprocessing.
    known: their predictions for examples of their classes.
    mesh: over which batches are split.
    batch_size: b.

  Raises:
    DataError: if no image below it can be read, or an output is not finite.
  """
  found, skipped = _outputs(
    predict, directory, specs[0].preprocessing, mesh, batch_size
  )
  results = {}
  for spec in specs:
    outputs, examples = found[spec.name], known[spec.name]
    scores = spec.kind.kind.known_score(outputs, np)
    of_known = examples.known_score[examples.predicted]
    if not np.isfinite(scores).all() or not of_known.size:
      raise DataError(
        f"--unknown_data {directory}: outputs of {spec.name!r} are not finite."
      )
    area = sklearn.metrics.roc_auc_score(
      np.repeat([1, 0], [len(of_known), len(scores)]),
      np.concatenate([of_known, scores]),
    )
    rejection = spec.kind.rejection(outputs)
    results[spec.name] = UnknownImages(
      directory=str(directory),
      images=len(scores),
      skipped=skipped,
      area=float(area),
      rejected=float(rejection["unknown"].mean()) if rejection else None,
    )
  return results


def _outputs(
  predict: Callable[[Any], Mapping[str, Any]],
  directory: Path,
  preprocessing: EvalPreprocessing,
  mesh: jax.sharding.Mesh,
  batch_size: int,
) -> tuple[dict[str, np.ndarray], int]:
  """Outputs float32 (n, c) of each task, and the number of skipped images."""
  entries = list(image_files.find_images([str(directory)]))
  side = preprocessing.image_size
  images = reader.ImageReader(_MEMORY_MIB, batch_size, side)
  batches: list[Mapping[str, np.ndarray]] = []
  read, reason = 0, ""
  with ProgressBar(f"reading {directory}", len(entries)) as bar:
    for loaded in images.read_files(entries, preprocessing):
      pixels = np.zeros((batch_size, side, side, 3), np.float32)
      count = 0
      for image in loaded:
        bar.update()
        if image.pixels is None:
          reason = reason or f"{image.entry.path}: {image.entry.reason}"
          continue
        pixels[count], count = image.pixels, count + 1
      if count:
        placed = sharding.shard_batch(pixels, mesh)
        outputs = sharding.to_host(predict(placed))
        batches.append({name: rows[:count] for name, rows in outputs.items()})
        read += count
  if not batches:
    raise DataError(
      f"--unknown_data {directory}: no image can be read; {reason}."
    )
  found = {
    name: np.concatenate([batch[name] for batch in batches])
    for name in batches[0]
  }
  return found, len(entries) - read
