"""Evaluation: every example of a split, exactly once."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Float

from memory_vit.data import batching
from memory_vit.data.reader import Reader
from memory_vit.evaluation import metrics
from memory_vit.evaluation.hits import Hits
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import REGIMES
from memory_vit.model.task import EvalPreprocessing, Task
from memory_vit.runtime import sharding
from memory_vit.tasks import inference, split_forward

# Images that `data` has scaled -> {name: logits}; or what is kept of them.
Predict = Callable[[Any], dict[str, Float[Array, "b c"]]]


def evaluate(
  predict: Predict,
  batches: Iterable[dict[str, Any]],
  mesh: Mesh,
  *,
  digest: bool = False,
  hits: bool = False,
) -> dict[str, dict[str, Any]]:
  """Evaluate all outputs of a model on one data set.

  Args:
    predict: the model.
    batches: {"image", "label", "mask"}, the rows of this process; or "inputs",
      what is kept of the images, which is then what the model takes.
    mesh: over which batches are split.
    digest: whether the outputs are brought to the host and hashed.
    hits: whether the results say which examples are right.

  Returns:
    For every name `metrics.summarise`; and where it is asked for "digest", a
    SHA-256 over the bytes of all its outputs: two models have the same digest
    where their outputs are equal to the bit. And "hits", int8 (rows of all
    batches,), see `metrics.example_hits`.
  """
  totals: dict[str, metrics.Totals] = {}
  digests: dict[str, Any] = {}
  right: dict[str, list[np.ndarray]] = {}
  replicated = sharding.replicated(mesh)
  for batch in sharding.prefetch(iter(batches), mesh):
    inputs = batch["inputs"] if "inputs" in batch else batch["image"]
    for name, logits in predict(inputs).items():
      sums = _batch_sums(replicated)(logits, batch["label"], batch["mask"])
      totals[name] = metrics.add(totals.get(name), sums)
      if hits:
        rows = _batch_hits(replicated)(logits, batch["label"], batch["mask"])
        right.setdefault(name, []).append(np.asarray(rows))
      if digest:
        rows = multihost_utils.process_allgather(logits, tiled=True)
        hashed = digests.setdefault(name, hashlib.sha256())
        hashed.update(np.asarray(rows).data)
  results = {name: metrics.summarise(total) for name, total in totals.items()}
  for name, hashed in digests.items():
    results[name]["digest"] = hashed.hexdigest()
  for name, parts in right.items():
    results[name]["hits"] = np.concatenate(parts)
  return results


def evaluate_source(
  predict: Predict,
  source: Reader,
  preprocessing: EvalPreprocessing,
  *,
  batch_size: int,
  mesh: Mesh,
  digest: bool = False,
  hits: bool = False,
  batches: Iterable[dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
  """`evaluate`, on a split; each process reads its share.

  `batch_size` is that of all processes together. Where `batches` are kept,
  nothing is read. The results also have
  "skipped": how many examples could not be read, and are not among the
  "examples" on which the numbers stand. "hits" are a `Hits`, of all examples of
  the split in their order.
  """
  if batches is None:
    batches = batching.eval_batches(
      source, preprocessing, batch_size=batch_size
    )
  results = evaluate(predict, batches, mesh, digest=digest, hits=hits)
  for result in results.values():
    # Of all processes, as the sums are.
    result["skipped"] = source.size - result["examples"]
    if hits:
      rows = result["hits"][: source.size]
      result["hits"] = Hits(right=rows == 1, counted=rows >= 0)
  return results


@functools.cache
def _batch_sums(replicated: Any) -> Callable[..., dict[str, jax.Array]]:
  """`metrics.batch_sums`, compiled to leave its results on every device."""
  return jax.jit(metrics.batch_sums, out_shardings=replicated)


@functools.cache
def _batch_hits(replicated: Any) -> Callable[..., jax.Array]:
  """`metrics.example_hits`, compiled as `_batch_sums` is."""
  return jax.jit(metrics.example_hits, out_shardings=replicated)


def predict_fn(
  backbone: Backbone,
  tasks: Sequence[Task],
  mesh: Mesh,
  outputs: Sequence[str] | None = None,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
  kept: bool = False,
) -> Predict:
  """Build the function from images to logits of tasks of any regime.

  Args:
    backbone: of all tasks, on the devices of the mesh.
    tasks: all that share a pass, with what they read; none for the backbone
      alone.
    mesh: on whose devices the tasks are put.
    outputs: names of what is predicted; by default all tasks. Beside tasks that
      compose, `BACKBONE` is the original output.
    slots: see `inference.fill_slots`, as the next two.
    cells: of the longest memory, at least.
    classes: of the widest head, at least.
    kept: whether the function takes, in place of images, what the frozen pass
      of training makes of them; the logits are the same to the bit. Not for
      `BACKBONE`, nor for regimes that have no such pass.

  Returns:
    The function, of what is named by `outputs`.
  """
  if outputs is None:
    outputs = [task.name for task in tasks]
  # All at one place: a program is compiled for where its arrays are as well.
  placed = [
    dataclasses.replace(task, params=sharding.put(task.params, mesh))
    for task in tasks
  ]
  forward: Callable[[Any], dict[str, Array]]
  if all(REGIMES[task.spec.regime].composes for task in tasks):
    filled = (
      inference.fill_slots(
        backbone, placed, slots=slots, cells=cells, classes=classes
      )
      if tasks
      else ()
    )
    forward = functools.partial(
      inference.forward, backbone, filled, check=False
    )
    if kept:
      forward = functools.partial(inference.read, backbone, filled)
  else:  # they take the place of the head
    forward = functools.partial(
      split_forward.read if kept else split_forward.forward, backbone, placed
    )

  def predict(inputs: Any) -> dict[str, Float[Array, "b _"]]:
    logits = forward(inputs)
    return {name: logits[name] for name in outputs}

  return predict
