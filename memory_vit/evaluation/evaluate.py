"""Evaluate outputs of a model on a split: every example counts exactly once."""

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

# Function that takes images in [-1, 1], or cached backbone outputs, and returns
# {name: logits}.
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
    batches: {"image", "label", "mask"}, the rows of this process; or "inputs",
      cached inputs of the model, in place of "image".
    mesh: devices over which batches are sharded.
    kinds: {name: kind of the output}; by default, outputs predict classes.
    also: optional fields of `Evaluation`. "digest" copies all outputs to the
      host; it is equal for models whose outputs are bitwise identical.
    predictions_of: names of the outputs with "predictions"; None for all.
    bar: progress bar that counts images of all processes.

  Returns:
    {name: evaluation of the output}; "hits" are int8 (rows of all batches,),
    see `class_sums.example_hits`, and "predictions" have the same rows.
  """
  states: dict[str, State] = {}
  digests: dict[str, Any] = {}
  if isinstance(predictions_of, str):
    predictions_of = [predictions_of]

  def asked(name: str) -> Collection[Also]:
    if predictions_of is None or name in predictions_of:
      return also
    return [field for field in also if field != "predictions"]

  for batch in sharding.prefetch(map(_with_bits, batches), mesh):
    for name, outputs in predict(inputs_of(batch)).items():
      if "digest" in also:
        rows = multihost_utils.process_allgather(outputs, tiled=True)
        hashed = digests.setdefault(name, hashlib.sha256())
        hashed.update(np.asarray(rows).data)
      kind = kinds.get(name, CLASSES)
      state = kind.kind.state(
        kind, Batch(outputs, batch["label"], batch["mask"]), mesh, asked(name)
      )
      states[name] = states[name].merge(state) if name in states else state
    if bar:
      bar.update(len(batch["mask"]))
  return {
    name: _as_asked(state.compute(), digests.get(name), asked(name))
    for name, state in states.items()
  }


def _as_asked(
  result: Evaluation, hashed: Any, also: Collection[Also]
) -> Evaluation:
  return dataclasses.replace(
    result,
    digest=hashed.hexdigest() if hashed else None,
    predictions=result.predictions if "predictions" in also else None,
    held_out=result.held_out if "held_out" in also else None,
  )


def _with_bits(batch: dict[str, Any]) -> dict[str, Any]:
  """Return `batch`; view float64 labels as uint32, which no device rounds."""
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
  """Evaluate outputs on a split, see `evaluate`; each process reads its share.

  `batch_size` is the total of all processes. If `batches` are passed, `source`
  is not read. "hits" is a `Hits`; "predictions" is a `SplitPredictions`,
  `LabelPredictions` or `ValuePredictions`. Both hold all examples of the split
  in order. With `other_classes`, outputs and labels may have different classes:
  then scores are None, and `also` may contain only "digest".

  Raises:
    TaskError: if an output has another kind, or another number of classes,
      labels or values, than the data set.
    DataError: if the score of a kind is undefined on the split.
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
  result: Evaluation, source: Split, other_classes: bool
) -> Evaluation:
  """Return `result` without padding examples; raise if a score is undefined.

  With `other_classes`, the result has only the digest and the example counts.
  """
  if result.undefined:
    raise DataError(
      f"{source.full_name!r}, split {source.split!r}: {result.undefined}. "
      f"Expected a split whose {source.kind} vary."
    )
  scores = dataclasses.replace(
    result.scores, skipped=source.size - result.scores.examples
  )
  if other_classes:
    unknown = dict.fromkeys(scores.metrics)
    scores = dataclasses.replace(
      scores, score=None, loss=None, metrics=unknown, per_output={}
    )
    return Evaluation(scores=scores, digest=result.digest)
  hits, predictions = result.hits, result.predictions
  if hits is not None:
    rows = hits[: source.size]
    hits = Hits(right=rows == 1, counted=rows >= 0)
  if predictions is not None:
    predictions = predictions.first(source.size)
  return dataclasses.replace(
    result, scores=scores, hits=hits, predictions=predictions
  )


def _some_readable(
  batches: Iterable[dict[str, Any]], source: Split
) -> Iterator[dict[str, Any]]:
  """Yield batches; raise at the end if no process could read any example."""
  readable: list[int] = []
  for batch in batches:
    if not readable and batch["mask"].any():
      readable = [1]
    yield batch
  if not processes.union_over_processes(readable):
    raise source.nothing_readable()


def _require_classes(
  name: str, kind: TaskKind, outputs: int, source: Split
) -> None:
  """Raise `TaskError` unless `source` has this `kind` and number of outputs."""
  if (kind.name, outputs) != (source.kind, source.num_classes):
    raise TaskError(
      f"the output {name!r} has {outputs:,} {kind.name}, but the data set "
      f"{source.full_name!r} has {source.num_classes:,} {source.kind}: "
      "expected the data set that the output was trained for."
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
    backbone: the backbone of all tasks, on the devices of the mesh.
    tasks: the tasks, with all tasks that they attend to, see `make_program`;
      empty for the backbone alone.
    mesh: devices to put the tasks on.
    outputs: names of the outputs; by default all tasks. `BACKBONE` is the
      original output, for tasks that can share a pass.
    slots: minimum number of slots, see `fill_slots`.
    cells: minimum number of memory cells, see `fill_slots`.
    classes: minimum number of classes, see `fill_slots`.
    cached: whether the function takes the cached outputs of the frozen pass in
      place of images; logits of masked tasks are bitwise identical. This is
      not possible for `BACKBONE`, nor for regimes without a frozen pass.

  Returns:
    The function, which returns the outputs that `outputs` names.
  """
  if outputs is None:
    outputs = [task.name for task in tasks]
  # Put tasks onto the mesh, because a program is compiled for the devices of
  # its arrays.
  placed = sharding.put(tuple(tasks), mesh)
  program = make_program(
    backbone, placed, slots=slots, cells=cells, classes=classes
  )
  run = program.read if cached else program

  def predict(inputs: Any) -> dict[str, Float[Array, "b _"]]:
    logits = run(backbone, inputs)
    return {name: logits[name] for name in outputs}

  return predict
