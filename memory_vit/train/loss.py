"""The loss of a head on a batch: which classes count, and how much."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# The logit of a class that a task does not have. It is finite: a target of 0
# times an infinite loss would be NaN.
_NEVER = -1e9
# Apart from the keys of other random numbers of the same seed.
_MIXUP = 0x6D69


class Labels(NamedTuple):
  """Labels of mixed images; see `mixup.mix`.

  Attributes:
    first: int32 (b,), of the images of which there is at least as much.
    second: int32 (b,), of those that were mixed into them.
    share: float32 (b,), of the first.
  """

  first: jax.Array
  second: jax.Array
  share: jax.Array


class HeadClasses(NamedTuple):
  """Classes of a data set, as the loss of a head counts them.

  Attributes:
    is_class: bool (c,), False for outputs that only fill up a padded head;
      None where all outputs are classes.
    weights: float32 (c,), of the loss of an example of each class; None where
      all count the same.
  """

  is_class: Any = None
  weights: Any = None


def balanced_weights(counts: Any) -> Any:
  """Weights of classes by which all contribute alike to the mean loss.

  They are n / (c * count): on average over the examples 1 where every class has
  some, so that the scale of the loss stays. A class without any has weight 0.

  Args:
    counts: int (c,), of the examples of each class, as NumPy's.

  Returns:
    float32 (c,).
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
  """Mean cross-entropy of a batch, and the share that is right.

  Args:
    logits: (b, c).
    labels: int32 (b,), or those of mixed images, of which each counts by its
      share.
    smoothing: so much of the probability is spread over all classes.
    classes: of the data set.

  Returns:
    Two float32 ().
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
  """Cross-entropy of each example (b,), and whether it is right."""
  targets = _targets(labels, logits.shape[-1], smoothing, classes.is_class)
  loss = optax.softmax_cross_entropy(logits, targets)
  if classes.weights is not None:
    loss = loss * classes.weights[labels]
  return loss, logits.argmax(-1) == labels


def _targets(
  labels: jax.Array, c: int, smoothing: float, is_class: jax.Array | None
) -> jax.Array:
  """Probabilities (b, c) that a head should give."""
  sharp = jax.nn.one_hot(labels, c)
  if is_class is None:
    return optax.smooth_labels(sharp, smoothing)
  spread = is_class / is_class.sum()
  return (1 - smoothing) * sharp + smoothing * spread[None]


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
