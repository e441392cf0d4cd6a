"""Training batches of a run, from images or from rows of its cache."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.cache.run_cache import Needs
from memory_vit.config import data_seed
from memory_vit.data import batching
from memory_vit.tasks.split_forward import frozen_pass
from memory_vit.train.inputs import RunInputs


def train_batches(inputs: RunInputs, step: int) -> Iterator[dict[str, Any]]:
  """Return the batches after a step; compute missing cached rows first.

  Labels of the kind "values" are standardized. A head in closed form gets one
  empty batch, because it reads all rows at once.
  """
  if inputs.config.optim.in_closed_form:
    return iter([{}][step:])
  stated = inputs.kind
  return (
    {**batch, "label": stated.kind.standardized(stated, batch["label"])}
    for batch in _batches(inputs, step)
  )


def _batches(inputs: RunInputs, step: int) -> Iterator[dict[str, Any]]:
  config, splits, cache = inputs.config, inputs.splits, inputs.cache
  if step == config.total_steps:  # no step is left, so read nothing
    return iter(())
  start = step * config.batch_size
  if cache is None:
    return image_batches(inputs, start)
  cache.require_free_space(cache_needs(inputs))
  if "validation" in splits:
    # Fill the cache of the validation split before training begins.
    cache.rows("validation", splits["validation"])
  return cache.train_batches(splits["train"], start)


def image_batches(inputs: RunInputs, start: int) -> Iterator[dict[str, Any]]:
  """Return the batches of images that follow the first `start` examples."""
  config = inputs.config
  decodes = config.cache.what == "images"
  return batching.train_batches(
    inputs.decoded() if decodes else inputs.splits["train"],
    config.data,
    image_size=config.image_size,
    batch_size=config.batch_size,
    seed=data_seed(config),
    start=start,
    interpolation=inputs.preprocessing.interpolation,
  )


def train_examples(inputs: RunInputs, step: int) -> list[str]:
  """Name the examples in the batch of a step; steps count from 1."""
  config, train = inputs.config, inputs.splits["train"]
  if inputs.cache:
    return inputs.cache.train_examples(train, step)
  return batching.train_examples(
    train, seed=data_seed(config), batch_size=config.batch_size, step=step
  )


def cache_needs(inputs: RunInputs) -> list[Needs]:
  """Return the space that each split's rows need; all processes must call."""
  if not inputs.cache:
    return []
  roles = ["train", "validation"]
  if inputs.splits["train"].embedded:
    # Embeddings have no images, so the test split is evaluated from the cache.
    roles.append("test")
  return [
    inputs.cache.needs(role, inputs.splits[role])
    for role in roles
    if role in inputs.splits
  ]


def batch_shapes(inputs: RunInputs) -> Mapping[str, Any]:
  """Return shapes and dtypes of a training batch over all processes."""
  config = inputs.config
  shape = (config.batch_size, config.image_size, config.image_size, 3)
  image = jax.ShapeDtypeStruct(shape, jnp.float32)
  label = inputs.splits["train"].label_dtype
  dtype = jax.dtypes.canonicalize_dtype(label.base)  # float64 becomes float32
  labels = jax.ShapeDtypeStruct((config.batch_size, *label.shape), dtype)
  if not config.cache.has_rows:
    return {"image": image, "label": labels}
  prepare = frozen_pass(inputs.backbone.config, [config.learned])
  cached = jax.eval_shape(prepare, inputs.frozen, image)
  return {"inputs": cached, "label": labels}
