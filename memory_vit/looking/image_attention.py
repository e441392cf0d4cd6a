"""Attention of tasks over images: mean shares, and maps of the first images."""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jaxtyping import Float32, Float64

from memory_vit.errors import TaskError
from memory_vit.images.image_files import ImageFile
from memory_vit.images.reader import LoadedImage
from memory_vit.looking.attention_rollout import (
  AttentionRollout,
  attention_rollout,
)
from memory_vit.looking.attention_shares import (
  AttentionShares,
  attention_shares,
  join_shares,
)
from memory_vit.looking.token_attention import TokenAttention, read_attention
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks import program
from memory_vit.tasks.slots import Slots, fill_slots


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class ImageAttention:
  """The attention of tasks in one image.

  Attributes:
    path: path of the file.
    pixels: pixels in [-1, 1], as the model takes them.
    attention: {task name: attention in this image}.
    rollouts: {task name: rollout for this image}.
    answers: {task name: its probabilities or values (c,), see
      `TaskKind.activate`}.
  """

  path: str
  pixels: Float32[np.ndarray, "side side 3"]
  attention: dict[str, TokenAttention]
  rollouts: dict[str, AttentionRollout]
  answers: dict[str, Float64[np.ndarray, " c"]]


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class CollectedAttention:
  """The result of `collect_attention`.

  Attributes:
    shares: {task name: mean over all images}; empty without images.
    images: attention in each of the first images.
    skipped: images that could not be read, with the reason.
  """

  shares: dict[str, AttentionShares]
  images: list[ImageAttention]
  skipped: list[ImageFile]


def collect_attention(
  backbone: Backbone,
  tasks: Sequence[Task],
  batches: Iterable[Sequence[LoadedImage]],
  *,
  shown: int,
  total: int | None = None,
) -> CollectedAttention:
  """Compute the attention of tasks over batches of images.

  Args:
    backbone: the frozen ViT.
    tasks: at least one task; all tasks that they attend to must be among them.
    batches: result of `ImageReader.read_files`. The first batch is the largest,
      and all others are padded to its size.
    shown: number of images whose attention is returned. Only these get a
      rollout, which takes another pass of the backbone.
    total: number of images for the progress bar, if it is known.
  """
  slots = fill_slots(backbone, tasks)
  shares: dict[str, AttentionShares] = {}
  images: list[ImageAttention] = []
  skipped: list[ImageFile] = []
  size = 0
  with ProgressBar("attention of images", total) as bar:
    for batch in batches:
      size = size or len(batch)
      good = [image for image in batch if image.pixels is not None]
      skipped += [image.entry for image in batch if image.pixels is None]
      bar.update(len(batch))
      if not good:
        continue
      seen, first_images = _batch_attention(
        backbone, tasks, slots, good, size, shown - len(images)
      )
      images += first_images
      # Keep only a running mean, so that RAM use does not grow with the images.
      for name, attention in seen.items():
        parts = [shares[name]] if name in shares else []
        shares[name] = join_shares([*parts, attention_shares(attention)])
  return CollectedAttention(shares, images, skipped)


def _batch_attention(
  backbone: Backbone,
  tasks: Sequence[Task],
  slots: Slots,
  images: Sequence[LoadedImage],
  size: int,
  shown: int,
) -> tuple[dict[str, TokenAttention], list[ImageAttention]]:
  """Return ({task: attention in a batch}, [attention in each shown image])."""
  pixels = np.stack([i.pixels for i in images if i.pixels is not None])
  # Pad with the last image, so that all batches run in one compiled program.
  filled = np.pad(
    pixels, [(0, size - len(pixels)), (0, 0), (0, 0), (0, 0)], "edge"
  )
  _, context = program.encode(backbone, filled)
  logits = jax.device_get(program.read(backbone, slots, context))
  for name, values in logits.items():
    if not np.isfinite(values).all():
      raise TaskError(f"outputs of task {name!r} are not finite.")
  real = slice(len(pixels))
  seen = {
    name: attention.of_images(real)
    for name, attention in read_attention(backbone, slots, context).items()
  }
  shown = min(shown, len(pixels))
  if shown <= 0:
    return seen, []
  rollouts = attention_rollout(backbone, slots, filled)
  return seen, [
    ImageAttention(
      path=images[i].entry.path,
      pixels=pixels[i],
      attention={n: a.of_images(slice(i, i + 1)) for n, a in seen.items()},
      rollouts={n: a.of_images(slice(i, i + 1)) for n, a in rollouts.items()},
      answers={
        task.name: task.spec.kind.activate(
          logits[task.name][i].astype(np.float64)
        )
        for task in tasks
      },
    )
    for i in range(shown)
  ]
