"""Heads in closed form: a single step solves them, without a gradient."""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import psutil
from jax.experimental import multihost_utils

from memory_vit.config import data_seed
from memory_vit.data import batching
from memory_vit.errors import ConfigError, DataError
from memory_vit.evaluation.evaluate import evaluate
from memory_vit.kinds import closed_form
from memory_vit.kinds.scores import Evaluation
from memory_vit.kinds.state import BITS
from memory_vit.runtime import messages, processes, sharding
from memory_vit.train.inputs import RunInputs
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import Trial

logger = logging.getLogger(__name__)

# Free memory required to hold the features and solve a head, as a multiple of
# the size of the features in float64. As measured, solving takes 5.4 times this
# size with "ridge", and 3.1 times with "lda"; the features take memory as well.
_COPIES = 7


class ClosedFormStep:
  """Step that solves heads on the cached features of all training images.

  It takes the place of a `Step`, but ignores the initial parameters of trials.
  """

  optimizer = optax.identity()

  def __init__(self, inputs: RunInputs, trials: Sequence[Trial]) -> None:
    """Store inputs and trials; the features are read when first needed."""
    self._inputs, self._trials = inputs, trials

  def create_state(self, params: Any) -> TrainState:
    """Return the state at step 0, on the devices of the mesh."""
    begun = TrainState(jnp.int32(0), params, self.optimizer.init(params))
    state: TrainState = sharding.put(begun, self._inputs.mesh)
    return state

  def __call__(
    self, state: TrainState, frozen: Any, batch: Mapping[str, Any]
  ) -> tuple[TrainState, dict[str, dict[str, float]]]:
    """Return (state with all heads solved, {trial: metrics}).

    The metrics are `Solution.strength`, and "skipped", which is always 0.

    Raises:
      DataError: if a head cannot be solved from the features and targets.
    """
    heads: dict[str, Any] = {}
    metrics: dict[str, dict[str, float]] = {}
    for trial in self._trials:
      self._inputs.stop.check()
      width = self._rows[0].shape[1]
      head = {
        "kernel": np.zeros((width, self._count), np.float32),
        "bias": np.zeros(self._count, np.float32),
      }
      strength = processes.on_process_0(
        functools.partial(self._solve, trial, head)
      )
      head = multihost_utils.broadcast_one_to_all(head)
      heads[trial.name] = {"head": head}
      metrics[trial.name] = {"skipped": 0.0, **strength}
    placed = sharding.put(heads, self._inputs.mesh)
    return TrainState(state.step + 1, placed, state.opt_state), metrics

  @functools.cached_property
  def cross_validation(self) -> dict[str, Evaluation]:
    """Cross-validated evaluations on the training images, with outputs.

    Each image is evaluated by a head not trained on it. A trial is left out if
    there are too few images, see `closed_form.cross_validated`.
    """
    inputs, labels = self._inputs, self._rows[1]
    evaluations: dict[str, Evaluation] = {}
    for trial in self._trials:
      inputs.stop.check()
      logger.info("%s: cross-validation on the training images", trial.name)
      outputs = np.zeros((len(labels), self._count), np.float32)
      validated = processes.on_process_0(
        functools.partial(self._cross_validate, trial, outputs)
      )
      if not validated:
        logger.warning(
          "%s is not cross-validated: a class has a single image, or too few "
          "images remain when a fold is left out", trial.name,
        )  # fmt: skip
        continue
      outputs = multihost_utils.broadcast_one_to_all(outputs)
      name = trial.name
      evaluations |= evaluate(
        lambda rows, name=name: {name: rows},  # type: ignore[misc]
        _batches(outputs, labels, inputs.config.batch_size_eval),
        inputs.mesh,
        kinds={name: inputs.kind},
        also=["held_out"],
      )
    return evaluations

  def _solve(
    self, trial: Trial, head: Mapping[str, np.ndarray]
  ) -> dict[str, float]:
    """Fill the arrays of `head` with a solution; return `Solution.strength`."""
    try:
      self._require_each_class()
      solution = closed_form.solve(
        self._solver(trial), self._rows[0], self._targets, self._count
      )
    except DataError as error:
      method, train = trial.config.optim.name, self._inputs.splits["train"]
      raise DataError(
        f"{train}: no head can be computed in closed form "
        f"(config.optim.name {method!r}): {error}."
      ) from error
    head["kernel"][:], head["bias"][:] = solution.kernel, solution.bias
    return dict(solution.strength)

  def _require_each_class(self) -> None:
    """Raise if a class has no image: a solution needs images of all classes."""
    if not self._inputs.kind.kind.one_is_right:
      return
    names = self._inputs.splits["train"].class_names
    counts = np.bincount(self._rows[1], minlength=len(names))
    missing = [names[i] for i in np.flatnonzero(counts == 0)]
    if missing:
      raise DataError(
        "some classes have no image: "
        f"{messages.brief(messages.name_list(missing))} ({len(missing):,} of "
        f"{len(names):,} classes); expected images of each class"
      )

  def _cross_validate(self, trial: Trial, outputs: np.ndarray) -> bool:
    """Fill `outputs` by cross-validation; return False if it is impossible."""
    validated = closed_form.cross_validated(
      self._solver(trial), self._rows[0], self._targets, self._count,
      data_seed(self._inputs.config),
    )  # fmt: skip
    if validated is not None:
      outputs[:] = validated
    return validated is not None

  def _solver(self, trial: Trial) -> closed_form.Solver:
    return self._inputs.kind.kind.solver(trial.config.optim.name)

  @property
  def _count(self) -> int:
    return self._inputs.splits["train"].num_classes

  @property
  def _targets(self) -> np.ndarray:
    stated = self._inputs.kind
    return stated.kind.standardized(stated, self._rows[1])

  def _require_memory(self) -> None:
    """Raise if a process has too little free RAM to solve a head.

    All processes must call this method, because it compares their free RAM.
    """
    split = self._inputs.splits["train"]
    width = self._inputs.backbone.config.width
    needed = _COPIES * 8 * split.size * width
    free = min(processes.gather(psutil.virtual_memory().available))
    if needed > free:
      raise ConfigError(
        f"a head in closed form for {split.size:,} images of {width} features "
        f"takes {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB is free. "
        "Expected fewer images (config.data.per_class, config.data.first), or "
        "config.optim.name 'sgd'."
      )

  @functools.cached_property
  def _rows(self) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, d) and labels (n, ...) of all readable training images."""
    inputs = self._inputs
    assert inputs.cache is not None
    self._require_memory()
    rows = inputs.cache.rows("train", inputs.splits["train"])
    share, _ = batching.share(inputs.config.batch_size)
    batches = -(-inputs.splits["train"].size // inputs.config.batch_size)
    columns_by_batch = []
    for i in range(batches):
      numbers = np.arange(i * share, (i + 1) * share)
      places = np.minimum(numbers, len(rows.labels) - 1)
      labels = rows.labels[places]
      if labels.dtype == np.float64:  # JAX would round labels to float32
        labels = np.ascontiguousarray(labels).view(BITS)
      counts = (numbers < len(rows.labels)) * rows.masks[places]
      placed = sharding.shard_batch((labels, counts), inputs.mesh)
      taken = sharding.to_host((rows.take(places)["pooled"], *placed))
      columns_by_batch.append([column[taken[2] > 0] for column in taken[:2]])
    features, labels = map(np.concatenate, zip(*columns_by_batch, strict=True))
    is_bits = inputs.splits["train"].label_dtype.base == np.float64
    return features, labels.view(np.float64) if is_bits else labels


def _batches(
  outputs: np.ndarray, labels: np.ndarray, size: int
) -> Iterator[dict[str, Any]]:
  """Yield evaluation batches: this process's share of outputs and labels."""
  count, first = batching.share(size)
  for start in range(0, len(labels), size):
    numbers = np.arange(count) + start + first
    places = np.minimum(numbers, len(labels) - 1)
    yield {
      "inputs": outputs[places],
      "label": labels[places],
      "mask": (numbers < len(labels)).astype(np.float32),
    }
