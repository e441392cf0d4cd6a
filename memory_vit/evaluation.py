"""Evaluation: every example of a split, exactly once."""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from memory_vit import data, metrics, sharding
from memory_vit.tasks import EvalPreprocessing

Predict = Callable[[jax.Array], dict[str, jax.Array]]


def evaluate(
  predict: Predict,
  batches: Iterable[dict[str, np.ndarray]],
  mesh: Mesh,
  *,
  digest: bool = False,
) -> dict[str, dict[str, Any]]:
  """Evaluates all outputs of a model on one data set.

  Args:
    predict: images (b, s, s, 3) -> {name: logits (b, c)}.
    batches: {"image", "label", "mask"}, the rows of this process.
    mesh: over which batches are split.
    digest: whether the outputs are brought to the host and hashed.

  Returns:
    For every name `metrics.summarise`; and where it is asked for "digest", a
    SHA-256 over the bytes of all its outputs: two models have the same digest
    where their outputs are equal to the bit.
  """
  totals: dict[str, dict] = {}
  digests: dict[str, Any] = {}
  replicated = sharding.replicated(mesh)
  for batch in sharding.prefetch(iter(batches), mesh):
    for name, logits in predict(batch["image"]).items():
      sums = _batch_sums(replicated)(logits, batch["label"], batch["mask"])
      totals[name] = metrics.add(totals.get(name), sums)
      if digest:
        rows = multihost_utils.process_allgather(logits, tiled=True)
        hashed = digests.setdefault(name, hashlib.sha256())
        hashed.update(np.asarray(rows).data)
  results = {name: metrics.summarise(total) for name, total in totals.items()}
  for name, hashed in digests.items():
    results[name]["digest"] = hashed.hexdigest()
  return results


def evaluate_source(
  predict: Predict,
  source: data.Source,
  preprocessing: EvalPreprocessing,
  *,
  batch_size: int,
  mesh: Mesh,
  digest: bool = False,
) -> dict[str, dict[str, Any]]:
  """`evaluate`, on a split; each process reads its share.

  Args:
    predict: see `evaluate`.
    source: the split.
    preprocessing: of its pictures.
    batch_size: of all processes together.
    mesh: see `evaluate`.
    digest: see `evaluate`.

  Returns:
    As `evaluate`, with "skipped": how many examples could not be read, and are
    not among the "examples" on which the numbers stand.
  """
  batches = data.eval_batches(
    source,
    preprocessing,
    batch_size=batch_size,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  results = evaluate(predict, batches, mesh, digest=digest)
  for result in results.values():
    # Of all processes, as the sums are.
    result["skipped"] = source.size - result["examples"]
  return results


@functools.cache
def _batch_sums(replicated: Any) -> Callable[..., dict[str, jax.Array]]:
  """`metrics.batch_sums`, compiled to leave its results on every device."""
  return jax.jit(metrics.batch_sums, out_shardings=replicated)
