"""Loss of a head by kind of task: cross-entropy, binary, squared and Huber.

With label smoothing, class weights and mixup.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from memory_vit.config import Config

# Logit of padding outputs. It is finite: a target of 0 times an infinite loss
# would be NaN.
_NEVER = -1e9
# Separates the random numbers of mixup from others of the same seed.
_MIXUP = 0x6D69


class Labels(NamedTuple):
  """Classes of mixed images.

  `first` counts by `share` (b,), at least one half.
  """

  first: jax.Array
  second: jax.Array
  share: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLoss:
  """The options of a loss on which its program depends."""

  kind: str = "classes"
  smoothing: float = 0.0
  weighted: bool = False
  huber: bool = False

  @classmethod
  def of(cls, config: Config) -> "HeadLoss":
    return cls(
      kind=config.task.kind,
      smoothing=config.optim.label_smoothing,
      weighted=config.optim.class_weights == "balanced",
      huber=config.task.loss == "huber",
    )

  @property
  def metric(self) -> str:
    """The name of the metric beside the loss."""
    return "mae" if self.kind == "values" else "accuracy"


class HeadOutputs(NamedTuple):
  """Arrays of a loss that describe the outputs of a head."""

  is_class: Any = None  # bool (c,), False for padding; None if all are classes
  # float32 (c,), of classes, or of examples with a label; None if all are 1
  weights: Any = None


def balanced_weights(counts: Any) -> Any:
  """Class weights n / (c * count), by which all classes contribute alike.

  Their mean over the examples is 1 if every class has some, so the scale of the
  loss stays. A class without examples has weight 0.
  """
  found = counts > 0
  weights = counts.sum() / (len(counts) * counts.clip(1))
  return (weights * found).astype("float32")


def positive_weights(positives: Any, examples: int) -> Any:
  """Weights (c,) by which examples with a label count as those without it.

  A label that all examples have, or none, has weight 1.
  """
  negatives = examples - positives
  weights = negatives / positives.clip(1)
  weights[(positives == 0) | (negatives == 0)] = 1
  return weights.astype("float32")


def loss_and_metric(
  logits: jax.Array,
  labels: jax.Array | Labels,
  head: HeadLoss,
  outputs: HeadOutputs,
) -> tuple[jax.Array, jax.Array]:
  """Mean loss and `head.metric` of a batch, for outputs (b, c).

  Values are standardized, see `Trainer.train_batches`.
  Accuracy is the share of images, or of pairs of image and label, that are
  right; "mae" is the mean absolute error in standard deviations.
  """
  if isinstance(labels, Labels) or head.kind == "classes":
    loss, metric = _of_classes(logits, labels, head, outputs)
  else:
    logits = logits[:, : labels.shape[-1]]  # without padding
    if head.kind == "labels":
      loss, metric = _of_labels(logits, labels, head, outputs)
    else:
      loss, metric = _of_values(logits, labels, head)
  return loss.mean(), metric.mean()


def _of_classes(
  logits: jax.Array,
  labels: jax.Array | Labels,
  head: HeadLoss,
  outputs: HeadOutputs,
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy (b,), and whether the right class is predicted.

  Both classes of a mixed image count, each by its share.
  """
  if outputs.is_class is not None:
    logits = jnp.where(outputs.is_class[None], logits, _NEVER)
  if not isinstance(labels, Labels):
    return _of_class(logits, labels, head, outputs)
  first, second = (
    _of_class(logits, one, head, outputs)
    for one in (labels.first, labels.second)
  )
  loss, right = (
    labels.share * a + (1 - labels.share) * b
    for a, b in zip(first, second, strict=True)
  )
  return loss, right


def _of_class(
  logits: jax.Array, labels: jax.Array, head: HeadLoss, outputs: HeadOutputs
) -> tuple[jax.Array, jax.Array]:
  targets = _targets(labels, logits.shape[-1], head.smoothing, outputs.is_class)
  loss = optax.softmax_cross_entropy(logits, targets)
  if head.weighted:
    loss = loss * outputs.weights[labels]
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


def _of_labels(
  logits: jax.Array, targets: jax.Array, head: HeadLoss, outputs: HeadOutputs
) -> tuple[jax.Array, jax.Array]:
  """Binary cross-entropy (b, c), and by how much a prediction is right."""
  yes, no = jax.nn.softplus(-logits), jax.nn.softplus(logits)
  if head.weighted:
    yes = yes * outputs.weights[None]
  smooth = (1 - head.smoothing) * targets + head.smoothing / 2
  right = jnp.where(logits >= 0, targets, 1 - targets)
  return smooth * yes + (1 - smooth) * no, right


def _of_values(
  logits: jax.Array, values: jax.Array, head: HeadLoss
) -> tuple[jax.Array, jax.Array]:
  """Squared or Huber loss (b, c) of standardized values, and absolute error."""
  error = logits - values
  loss = optax.huber_loss(error) if head.huber else error**2
  return loss, jnp.abs(error)


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
  alone: a resumed run mixes alike. Labels and values are mixed as images are.
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
  return {"image": image, "label": Labels(label, jnp.roll(label, 1), shares)}
