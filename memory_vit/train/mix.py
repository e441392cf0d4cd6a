"""Mixup: mix images of a batch, and their labels."""

import dataclasses

import jax
import jax.numpy as jnp

from memory_vit.kinds.classes import MixedClasses

# Number folded into the seed, so that mixup draws its own random numbers.
_MIXUP = 0x6D69


@dataclasses.dataclass(frozen=True)
class Mixup:
  """Options of mixup; mixing weights are drawn from Beta(alpha, alpha)."""

  alpha: float
  seed: int


def mix(
  batch: dict[str, jax.Array], step: jax.Array, mixup: Mixup
) -> dict[str, jax.Array | MixedClasses]:
  """Mix each image of a batch with its neighbor (Zhang et al., 2018).

  Batches are in random order, so a neighbor is a random image. The weight of
  the image itself is at least one half, and the same for a whole batch. The
  weight depends only on seed and step, so a resumed run mixes identically.
  Labels and values are mixed like images.
  """
  key = jax.random.fold_in(jax.random.key(mixup.seed), _MIXUP)
  share = jax.random.beta(
    jax.random.fold_in(key, step), mixup.alpha, mixup.alpha
  )
  share = jnp.maximum(share, 1 - share)

  def mixed(rows: jax.Array) -> jax.Array:
    return share * rows + (1 - share) * jnp.roll(rows, 1, axis=0)

  image, label = mixed(batch["image"]), batch["label"]
  if jnp.issubdtype(label.dtype, jnp.floating):
    return {"image": image, "label": mixed(label)}
  shares = jnp.full(label.shape, share)
  return {
    "image": image,
    "label": MixedClasses(label, jnp.roll(label, 1), shares),
  }
