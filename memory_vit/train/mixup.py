"""Mixup (Zhang et al., 2018): each image is mixed with another of its batch."""

import dataclasses

import jax
import jax.numpy as jnp

from memory_vit.train.loss import Labels

# Apart from the keys of other random numbers of the same seed.
_MIXUP = 0x6D69


@dataclasses.dataclass(frozen=True)
class Mixup:
  """How the images of a batch are mixed.

  Attributes:
    alpha: shares are drawn from Beta(alpha, alpha).
    seed: of the shares.
  """

  alpha: float
  seed: int


def mix(
  batch: dict[str, jax.Array], step: jax.Array, mixup: Mixup
) -> dict[str, jax.Array | Labels]:
  """Mix each image of a batch with its neighbour.

  Batches are in random order, so that the neighbour is any image. The share is
  the same for a batch, at least one half, and follows from seed and step alone:
  a run that goes on mixes as one that was not interrupted.

  Args:
    batch: "image" (b, side, side, 3), "label" int (b,).
    step: int32 (), steps done.
    mixup: of the run.

  Returns:
    "image", and "label" as `Labels`.
  """
  key = jax.random.fold_in(jax.random.key(mixup.seed), _MIXUP)
  share = jax.random.beta(
    jax.random.fold_in(key, step), mixup.alpha, mixup.alpha
  )
  share = jnp.maximum(share, 1 - share)
  image, label = batch["image"], batch["label"]
  shares = jnp.full(label.shape, share)
  other = jnp.roll(image, 1, axis=0)
  return {
    "image": share * image + (1 - share) * other,
    "label": Labels(label, jnp.roll(label, 1), shares),
  }
