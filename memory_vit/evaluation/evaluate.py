"""Evaluate outputs of a model on a split: every example exactly once."""

import dataclasses
import hashlib
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Float

from memory_vit.data import batching
from memory_vit.data.batch import inputs_of
from memory_vit.data.split import Split
from memory_vit.errors import DataError, TaskError
from memory_vit.evaluation.hits import Hits
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.kinds.kind import Batch
from memory_vit.kinds.scores import Also, Evaluation
from memory_vit.kinds.state import BITS, State
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing, Task
from memory_vit.runtime import processes, sharding
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks.program import make_program

# Images in [-1, 1], or cached inputs -> {name: logits}.
Predict = Callable[[Any], dict[str, Float[Array, "b c"]]]


def evaluate(
  predict: Predict,
  batches: Iterable[dict[str, Any]],
  mesh: Mesh,
  *,
  kinds: Mapping[str, TaskKind] = {},
  also: Collection[Also] = (),
  predictions_of: str | Collection[str] | None = None,
  bar: ProgressBar | None = None,
) -> dict[str, Evaluation]:
  """Evaluate all outputs of a model on one data set.

  Args:
    predict: the model.
    batches: {"image", "label", "mask"}, the rows of this process; or "inputs"
      in place of "image", cached inputs of the model.
    mesh: over which batches are split.
    kinds: of the outputs; one that it does not name is of classes.
    also: further fields. "digest" brings all outputs to the host, and is equal
      for two models whose outputs are bitwise identical.
    predictions_of: the outputs with "predictions"; None for all.
    bar: counts images of all processes.

  Returns:
    {name: its evaluation}; "hits" are int8 (rows of all batches,), see
    `class_sums.example_hits`, and "predictions" are of these rows.
  """
  states: dict[str, State] = {}
  digests: dict[str, Any] = {}
  if isinstance(predictions_of, str):
    predictions_of = [predictions_of]

  def asked(name: str) -> Collection[Also]:
    if predictions_of is None or name in predictions_of:
      return also
    return [what for what in also if what != "predictions"]

  for batch in sharding.prefetch(map(_with_bits, batches), mesh):
    for name, outputs in predict(inputs_of(batch)).items():
      if "digest" in also:
        rows = multihost_utils.process_allgather(outputs, tiled=True)
        hashed = digests.setdefault(name, hashlib.sha256())
        hashed.update(np.asarray(rows).data)
      stated = kinds.get(name, CLASSES)
      state = stated.kind.state(
        stated, Batch(outputs, batch["label"], batch["mask"]), mesh, asked(name)
      )
      states[name] = states[name].merge(state) if name in states else state
    if bar:
      bar.update(len(batch["mask"]))
  return {
    name: _as_asked(state.compute(), digests.get(name), asked(name))
    for name, state in states.items()
  }


def _as_asked(
  found: Evaluation, hashed: Any, also: Collection[Also]
) -> Evaluation:
  return dataclasses.replace(
    found,
    digest=hashed.hexdigest() if hashed else None,
    predictions=found.predictions if "predictions" in also else None,
    held_out=found.held_out if "held_out" in also else None,
  )


def _with_bits(batch: dict[str, Any]) -> dict[str, Any]:
  """Replace values of float64, which devices would round, by their bits."""
  label = batch["label"]
  if label.dtype != np.float64:
    return batch
  return {**batch, "label": np.ascontiguousarray(label).view(BITS)}


def evaluate_source(
  predict: Predict,
  source: Split,
  preprocessing: EvalPreprocessing,
  *,
  batch_size: int,
  mesh: Mesh,
  kinds: Mapping[str, TaskKind] = {},
  also: Collection[Also] = (),
  batches: Iterable[dict[str, Any]] | None = None,
  predictions_of: str | Collection[str] | None = None,
  other_classes: bool = False,
) -> dict[str, Evaluation]:
  """`evaluate`, on a split; each process reads its share.

  `batch_size` is that of all processes together. With `batches` nothing is
  read. "hits" are a `Hits`, and "predictions" are `SplitPredictions`,
  `LabelPredictions` or `ValuePredictions`, of all examples of the split in
  their order. With `other_classes` the outputs may be of other classes than the
  labels: scores are None, and only "digest" may be asked for.

  Raises:
    TaskError: for an output of another kind, or another number of classes,
      labels or values, than the data set.
    DataError: for a split on which the score of a kind is undefined.
  """

  def predict_classes(inputs: Any) -> dict[str, Float[Array, "b _"]]:
    outputs = predict(inputs)
    if not other_classes:
      for name, logits in outputs.items():
        kind = kinds.get(name, CLASSES)
        _require_classes(name, kind, logits.shape[-1], source)
    return outputs

  if batches is None:
    batches = batching.eval_batches(
      source, preprocessing, batch_size=batch_size
    )
  title = f"evaluating {source.full_name} {source.split}"
  with ProgressBar(title, source.size) as bar:
    results = evaluate(
      predict_classes,
      _some_readable(batches, source),
      mesh,
      kinds=kinds,
      also=also,
      predictions_of=predictions_of,
      bar=bar,
    )
  return {
    name: _of_split(result, source, other_classes)
    for name, result in results.items()
  }


def _of_split(
  found: Evaluation, source: Split, other_classes: bool
) -> Evaluation:
  """Without the rows beyond a split, which pad the last batch."""
  if found.undefined:
    raise DataError(
      f"{source.full_name!r}, split {source.split!r}: {found.undefined}. "
      f"Expected a split whose {source.kind} vary."
    )
  scores = dataclasses.replace(
    found.scores, skipped=source.size - found.scores.examples
  )
  if other_classes:
    unknown = dict.fromkeys(scores.metrics)
    scores = dataclasses.replace(
      scores, score=None, loss=None, metrics=unknown, per_output={}
    )
    return Evaluation(scores=scores, digest=found.digest)
  hits, predictions = found.hits, found.predictions
  if hits is not None:
    rows = hits[: source.size]
    hits = Hits(right=rows == 1, counted=rows >= 0)
  if predictions is not None:
    predictions = predictions.first(source.size)
  return dataclasses.replace(
    found, scores=scores, hits=hits, predictions=predictions
  )


def _some_readable(
  batches: Iterable[dict[str, Any]], source: Split
) -> Iterator[dict[str, Any]]:
  """Raise at the end if no process could read any example."""
  own: list[int] = []
  for batch in batches:
    if not own and batch["mask"].any():
      own = [1]
    yield batch
  if not processes.union_over_processes(own):
    raise source.nothing_readable()


def _require_classes(
  name: str, kind: TaskKind, outputs: int, source: Split
) -> None:
  """A label beyond the classes of an output would have no loss."""
  if (kind.name, outputs) != (source.kind, source.num_classes):
    raise TaskError(
      f"the output {name!r} has {outputs:,} {kind.name}, the data set "
      f"{source.full_name!r} has {source.num_classes:,} {source.kind}: "
      "expected the data set that it was trained for."
    )


def predict_fn(
  backbone: Backbone,
  tasks: Sequence[Task],
  mesh: Mesh,
  outputs: Sequence[str] | None = None,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
  cached: bool = False,
) -> Predict:
  """Build the function from images to logits of tasks of any regime.

  Args:
    backbone: of all tasks, on the devices of the mesh.
    tasks: with those that they attend to, see `make_program`; none for the
      backbone alone.
    mesh: on whose devices the tasks are put.
    outputs: names of the outputs; by default all tasks. With tasks that
      compose, `BACKBONE` is the original output.
    slots: see `fill_slots`, as the next two.
    cells: of the longest memory, at least.
    classes: of the widest head, at least.
    cached: whether the function takes the cached outputs of the frozen pass in
      place of images; the logits of masked tasks are bitwise identical. Not for
      `BACKBONE`, nor for regimes without a frozen pass.

  Returns:
    The function, which returns the outputs that `outputs` names.
  """
  if outputs is None:
    outputs = [task.name for task in tasks]
  # A program is compiled for the devices of its arrays, too.
  placed = sharding.put(tuple(tasks), mesh)
  program = make_program(
    backbone, placed, slots=slots, cells=cells, classes=classes
  )
  run = program.read if cached else program

  def predict(inputs: Any) -> dict[str, Float[Array, "b _"]]:
    logits = run(backbone, inputs)
    return {name: logits[name] for name in outputs}

  return predict
