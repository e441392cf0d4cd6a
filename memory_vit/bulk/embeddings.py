"""Embed images into rows: inputs of heads and probes on a frozen backbone."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jaxtyping import Array, Float, Float32

from memory_vit.backbones import load
from memory_vit.bulk.make_shards import image_reader
from memory_vit.errors import TaskError
from memory_vit.model.backbone import Backbone, rounded
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks import find, split_forward


@dataclasses.dataclass(frozen=True)
class EmbeddingJob:
  """A job that embeds images; it can be pickled for another process.

  Attributes:
    backbone: any source that `load_backbone` takes.
    task: path of a task, whose image size and preprocessing are used; "" for
      the image size and preprocessing of the backbone. If the preprocessing is
      unknown, images are squeezed.
    batch_size: number of images per pass.
    dtype: compute dtype, "float32" or "bfloat16"; or "auto", see
      `dtypes.resolve`.
    stored: dtype of the written values, "float32" or "bfloat16".
    memory_mib: memory for images and their decoding together, in MiB.
  """

  backbone: str
  task: str = ""
  batch_size: int = 32
  dtype: str = "float32"
  stored: str = "bfloat16"
  memory_mib: int = 2048

  def open(self) -> EmbeddingModel:
    """Load the backbone; nothing is compiled yet.

    Raises:
      MemoryVitError: if the backbone or the task cannot be read.
    """
    size = gelu = preprocessing = None
    if self.task:
      tasks = find.find_tasks([self.task])
      if len(tasks) > 1:
        raise TaskError(
          f"{self.task} holds {len(tasks)} tasks: expected one task, whose "
          "image size and preprocessing are used."
        )
      spec = tasks[0][1].spec
      size, gelu = spec.backbone.image_size, spec.backbone.gelu
      preprocessing = spec.preprocessing
    published = load.read_published(self.backbone)
    # Use the task's variant of GELU only if the backbone's files lack a config.
    gelu = None if published.states_config else gelu
    backbone = rounded(load.to_backbone(published, size, self.dtype, gelu=gelu))
    side = backbone.config.image_size
    preprocessing = (
      preprocessing
      or backbone.preprocessing
      or EvalPreprocessing(image_size=side)
    )
    return EmbeddingModel(self, backbone, preprocessing)


class EmbeddingModel:
  """A frozen backbone that makes rows; see `make_shards.Model`.

  Its columns are "pooled" (the input of a head) and "layers" (the input of a
  probe). A cell holds the flattened values of an image as little-endian bytes.
  """

  def __init__(
    self,
    job: EmbeddingJob,
    backbone: Backbone,
    preprocessing: EvalPreprocessing,
  ) -> None:
    self._job, self._backbone = job, backbone
    config = backbone.config
    self.preprocessing = preprocessing
    self.images = image_reader(
      job.memory_mib, job.batch_size, preprocessing.image_size
    )
    self._stored = np.dtype(jnp.dtype(job.stored))
    shapes = {
      "pooled": (config.width,),
      "layers": (config.summary_tokens, config.width),
    }
    self.schema = pa.schema([
      (name, pa.binary(math.prod(shape) * self._stored.itemsize))
      for name, shape in shapes.items()
    ])  # fmt: skip
    self.facts: dict[str, Any] = {
      "rows": "embeddings",
      "backbone": dataclasses.asdict(backbone.id),
      "dtype": config.dtype,
      "preprocessing": dataclasses.asdict(preprocessing),
      "values": {
        "dtype": job.stored,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
      },
    }

  def columns(
    self, pixels: Float32[np.ndarray, "k side side 3"]
  ) -> list[pa.Array]:
    # Pad to a fixed shape, so that only one program is compiled.
    images = np.zeros((self._job.batch_size, *pixels.shape[1:]), np.float32)
    images[: len(pixels)] = pixels
    arrays = embed_program(
      self._backbone.for_programs, images, config=self._backbone.config
    )
    return [
      _as_bytes(np.asarray(array)[: len(pixels)].astype(self._stored))
      for array in arrays
    ]


@functools.partial(jax.jit, static_argnames="config")
def embed_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> tuple[Float32[Array, "b d"], Float32[Array, "b n d"]]:
  """Return the inputs of heads and of probes, from one pass.

  `encode` and `summarize` run the same blocks, which XLA computes only once.
  """
  model = MemoryViT(split_forward.headless(config))
  backbone = {"backbone": params}
  pooled, _ = apply(model, backbone, images, method="encode")
  return pooled, apply(model, backbone, images, method="summarize")


def _as_bytes(values: np.ndarray) -> pa.Array:
  """Return an array (k, ...) as k binary values, one for each `values[i]`."""
  width = values[0].nbytes
  buffer = pa.py_buffer(np.ascontiguousarray(values).view(np.uint8))
  return pa.Array.from_buffers(pa.binary(width), len(values), [None, buffer])
