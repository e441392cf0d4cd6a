"""Loss of a head: cross-entropy, label smoothing, class weights and mixup."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Logit of padding outputs. It is finite: a target of 0 times an infinite loss
# would be NaN.
_NEVER = -1e9
# Separates the random numbers of mixup from others of the same seed.
_MIXUP = 0x6D69


class Labels(NamedTuple):
  """Labels of mixed images.

  `first` counts by `share` (b,), at least one half.
  """

  first: jax.Array
  second: jax.Array
  share: jax.Array


class HeadClasses(NamedTuple):
  """Which outputs of a head are classes, and their weights in the loss."""

  is_class: Any = None  # bool (c,), False for padding; None if all are classes
  weights: Any = None  # float32 (c,); None if all classes count the same


def balanced_weights(counts: Any) -> Any:
  """Class weights n / (c * count), by which all classes contribute alike.

  Their mean over the examples is 1 if every class has some, so the scale of the
  loss stays. A class without examples has weight 0.
  """
  found = counts > 0
  weights = counts.sum() / (len(counts) * counts.clip(1))
  return (weights * found).astype("float32")


def loss_and_accuracy(
  logits: jax.Array,
  labels: jax.Array | Labels,
  *,
  smoothing: float,
  classes: HeadClasses,
) -> tuple[jax.Array, jax.Array]:
  """Mean cross-entropy and accuracy of a batch, for logits (b, c).

  Both labels of a mixed image count, each by its share.
  """
  if classes.is_class is not None:
    logits = jnp.where(classes.is_class[None], logits, _NEVER)
  if isinstance(labels, Labels):
    first, second = (
      _each(logits, one, smoothing, classes)
      for one in (labels.first, labels.second)
    )
    loss, right = (
      labels.share * a + (1 - labels.share) * b
      for a, b in zip(first, second, strict=True)
    )
  else:
    loss, right = _each(logits, labels, smoothing, classes)
  return loss.mean(), right.mean()


def _each(
  logits: jax.Array, labels: jax.Array, smoothing: float, classes: HeadClasses
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each example (b,), and whether its class is predicted."""
  targets = _targets(labels, logits.shape[-1], smoothing, classes.is_class)
  loss = optax.softmax_cross_entropy(logits, targets)
  if classes.weights is not None:
    loss = loss * classes.weights[labels]
  return loss, logits.argmax(-1) == labels


def _targets(
  labels: jax.Array, c: int, smoothing: float, is_class: jax.Array | None
) -> jax.Array:
  """Target probabilities (b, c)."""
  sharp = jax.nn.one_hot(labels, c)
  if is_class is None:
    return optax.smooth_labels(sharp, smoothing)
  spread = is_class / is_class.sum()
  return (1 - smoothing) * sharp + smoothing * spread[None]


@dataclasses.dataclass(frozen=True)
class Mixup:
  """Shares are drawn from Beta(alpha, alpha)."""

  alpha: float
  seed: int


def mix(
  batch: dict[str, jax.Array], step: jax.Array, mixup: Mixup
) -> dict[str, jax.Array | Labels]:
  """Mix each image of a batch with its neighbor (Zhang et al., 2018).

  Batches are in random order, so a neighbor is a random image. The share is the
  same for a whole batch, at least one half, and follows from seed and step
  alone: a resumed run mixes alike.
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
