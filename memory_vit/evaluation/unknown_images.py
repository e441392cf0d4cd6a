"""Evaluate tasks of classes on images that belong to none of their classes."""

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
from memory_vit.model.task import TaskSpec
from memory_vit.runtime import sharding
from memory_vit.runtime.progress_bar import ProgressBar

# Memory in MiB for decoding images, in addition to the memory for batches.
_DECODING_MIB = 2048


@dataclasses.dataclass(frozen=True)
class UnknownImages:
  """Result of a task on images that belong to none of its classes.

  Attributes:
    directory: directory of the images.
    images: the number of images that were read and have finite outputs.
    skipped: the number of all other images.
    area: area under the ROC curve of `Kind.known_score`, between these images
      and the evaluated examples: 1 if all examples have higher scores, 0.5 is
      chance.
    rejected: share of the images that the task rejects as unknown; None if it
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
    predict: images (b, side, side, 3) -> {task: outputs}.
    directory: a directory of images that belong to none of the classes.
    specs: specs of tasks of classes that share their preprocessing.
    known: {task: predictions for examples of its classes}.
    mesh: devices over which batches are sharded.
    batch_size: b.

  Raises:
    DataError: if no image can be read, or no output of a task is finite.
  """
  by_task, unreadable = _outputs(predict, directory, specs, mesh, batch_size)
  results = {}
  for spec in specs:
    outputs, examples = by_task[spec.name], known[spec.name]
    finite = np.isfinite(outputs).all(axis=1)
    scores = spec.kind.kind.known_score(outputs[finite], np)
    of_known = examples.known_score[examples.predicted]
    if not scores.size or not of_known.size:
      raise DataError(
        f"--unknown_data {directory}: the outputs of task {spec.name!r} are "
        "not finite for any image in this directory, or not finite for any "
        "example of the evaluation."
      )
    area = sklearn.metrics.roc_auc_score(
      np.repeat([1, 0], [len(of_known), len(scores)]),
      np.concatenate([of_known, scores]),
    )
    rejection = spec.kind.rejection(outputs[finite])
    results[spec.name] = UnknownImages(
      directory=str(directory),
      images=len(scores),
      skipped=unreadable + int((~finite).sum()),
      area=float(area),
      rejected=float(rejection["unknown"].mean()) if rejection else None,
    )
  return results


def _outputs(
  predict: Callable[[Any], Mapping[str, Any]],
  directory: Path,
  specs: Sequence[TaskSpec],
  mesh: jax.sharding.Mesh,
  batch_size: int,
) -> tuple[dict[str, np.ndarray], int]:
  """Return ({task: outputs of readable images}, count of unreadable images)."""
  entries = list(image_files.find_images([str(directory)]))
  preprocessing = specs[0].preprocessing
  side = preprocessing.image_size
  batch_mib = batch_size * side**2 * 12 // 2**20
  memory = _DECODING_MIB + (reader.COPIES_OF_A_BATCH + 1) * batch_mib
  images = reader.ImageReader(memory, batch_size, side)
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
        outputs = predict(placed)
        batches.append(
          {
            spec.name: sharding.to_host(outputs[spec.name])[:count]
            for spec in specs
          }
        )
        read += count
  if not batches:
    raise DataError(
      f"--unknown_data {directory}: no image can be read; {reason}."
    )
  by_task = {
    name: np.concatenate([batch[name] for batch in batches])
    for name in batches[0]
  }
  return by_task, len(entries) - read
