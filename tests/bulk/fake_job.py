"""A bulk job without a model: the mean of the pixels of an image."""

import dataclasses

import numpy as np
import pyarrow as pa

from memory_vit.bulk.make_shards import image_reader
from memory_vit.model.task import EvalPreprocessing


@dataclasses.dataclass(frozen=True)
class MeanJob:
  batch_size: int = 4
  version: int = 0

  def open(self) -> "MeanModel":
    return MeanModel(self)


class MeanModel:
  schema = pa.schema([("mean", pa.float32())])

  def __init__(self, job: MeanJob) -> None:
    self.facts = {"rows": "means", "version": job.version}
    self.batches: list[int] = []
    self.images = image_reader(64, job.batch_size, 8)
    self.preprocessing = EvalPreprocessing(image_size=8)

  def columns(self, pixels: np.ndarray) -> list[pa.Array]:
    self.batches.append(len(pixels))
    return [pa.array(pixels.mean(axis=(1, 2, 3)), pa.float32())]
