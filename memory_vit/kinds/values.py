"""Values: regression of c standardized numbers; squared or Huber loss."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.kinds.guesses import class_label
from memory_vit.kinds.kind import (
  Batch,
  HeadOutputs,
  Kind,
  LossOptions,
  Metric,
  Most,
  Names,
  Numbers,
)
from memory_vit.kinds.written import parts, row
from memory_vit.runtime.messages import number

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from memory_vit.kinds import closed_form, state, value_metrics
  from memory_vit.runtime import sharding

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from memory_vit.kinds.closed_form import Solver
  from memory_vit.kinds.scores import Also
  from memory_vit.kinds.state import State
  from memory_vit.kinds.task_kind import TaskKind

_IN_UNITS = ("mae", "rmse")
# The greatest float32: squares of values up to it are finite in float64.
_GREATEST = 3.4028234663852886e38


class Values(Kind):
  """Kind of tasks in which each output is a number."""

  name, noun = "values", "value"
  numbers = True
  # Targets stay float64 until they are standardized: in float32, Unix times
  # within the same minute would be equal.
  target_type = "float64"
  label_form = (
    "a number such as 1234.5 (without a unit or thousands separators), or "
    "several numbers, such as [1.5, 2] or several columns"
  )
  line_form = ("VALUES", rb"\S+", "1.5,2")
  wrong_target = "value is not finite"
  options = ("task.units", "task.loss")
  stated = ("mean", "std", "units")
  needed = ("mean", "std")
  metrics = {
    "r2": Metric("R2", "R2, mean over values"),
    "mae": Metric("MAE", "mean absolute error, mean over values"),
    "rmse": Metric("RMSE", "root of the mean squared error, mean over values"),
    "spearman": Metric("Spearman", "Spearman correlation, mean over values"),
  }
  in_tables = ("r2", "spearman", "mae", "rmse")
  beside_score = ("mae",)
  score_name = "R2"
  least_score = None
  trained_metric = "mae"
  not_finite = "there are no metrics"
  outputs_text = "standardized values"
  activated_text = "values"
  reads = "values"
  hub_pipeline = ""

  def _read(self, label: Any) -> np.ndarray:
    """Return values (c,); text without brackets is one value ("1,5" is 1.5)."""
    return row(parts(label, separators=False))

  def meaning(self, names: Sequence[str], target: np.ndarray) -> Any:
    return target.tolist()

  def check(self, targets: np.ndarray, outputs: int) -> tuple[np.ndarray, str]:
    right = (np.abs(targets) <= _GREATEST).all(axis=-1)
    return right, f"finite numbers of at most {_GREATEST:.3g}"

  def table(
    self, metrics: Numbers, outputs: int, units: Names
  ) -> dict[str, str]:
    """Return a row, with the unit of MAE and RMSE if all values share one."""
    texts = super().table(metrics, outputs, units)
    unit = units[0] if len({*units}) == 1 else ""
    for key in {*_IN_UNITS} & {*self.in_tables}:
      title = self.metrics[key].title
      texts[title] = f"{texts[title]} {unit}".rstrip()
    return texts

  def outputs_table(
    self, stated: TaskKind, names: Sequence[str]
  ) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    units = stated.units or ("",) * len(names)
    columns = zip(names, units, stated.mean, stated.std, strict=True)
    rows = [
      (name, str(i), unit, number(mean), number(std))
      for i, (name, unit, mean, std) in enumerate(columns)
    ]
    return ("value", "index", "unit", "mean", "std"), rows

  def activate(self, stated: TaskKind, outputs: Any, xp: ModuleType) -> Any:
    outputs = xp.asarray(outputs)
    axes = (1,) * (outputs.ndim - 1)
    mean, std = (
      xp.asarray(numbers, float).reshape(*axes, -1)
      for numbers in (stated.mean, stated.std)
    )
    return mean + std * outputs

  def loss(
    self,
    outputs: jax.Array,
    targets: jax.Array,
    options: LossOptions,
    head: HeadOutputs,
  ) -> tuple[jax.Array, jax.Array]:
    """Return squared or Huber loss, and absolute error, both (b, c).

    The error is in standard deviations: outputs and targets are standardized.
    """
    error = outputs[:, : targets.shape[-1]] - targets  # drop padding
    loss = optax.huber_loss(error) if options.huber else error**2
    return loss, jnp.abs(error)

  def head_for_training(
    self, stated: TaskKind, wanted: TaskKind, kernel: Any, bias: Any
  ) -> tuple[Any, Any]:
    scale = np.array(stated.std) / np.array(wanted.std)
    shift = (np.array(stated.mean) - np.array(wanted.mean)) / wanted.std
    return kernel * scale[None].astype("f4"), bias * scale + shift

  def solver(self, method: str) -> Solver:
    return closed_form.ridge

  def standardized(self, stated: TaskKind, targets: np.ndarray) -> np.ndarray:
    mean, std = np.array(stated.mean), np.array(stated.std)
    return ((targets - mean) / std).astype(np.float32)

  def state(
    self, stated: TaskKind, batch: Batch, mesh: Mesh, also: Collection[Also]
  ) -> State:
    rows = sharding.to_host(tuple(batch))
    evaluation_of = functools.partial(value_metrics.evaluation_of_rows, stated)
    return state.OutputState(evaluation_of, rows)

  def answers(
    self, stated: TaskKind, names: Names, activated: np.ndarray, most: Most
  ) -> list[Any]:
    """Return {"values": [{"name", "value", "unit"}, ...]} for each image."""
    units = stated.units or ("",) * activated.shape[-1]
    return [
      {
        "values": [
          {"name": class_label(names, i), "value": value, "unit": units[i]}
          for i, value in enumerate(row)
        ]
      }
      for row in activated.tolist()
    ]

  def answer_rows(self, answer: Any) -> list[tuple[str, str]]:
    return [
      (entry["name"], f"{number(entry['value'])} {entry['unit']}".rstrip())
      for entry in answer["values"]
    ]

  def columns(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, np.ndarray]:
    return {"values": activated}

  def cells(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, list[Any]]:
    columns = self.cell_types(names, activated.shape[-1])
    return dict(zip(columns, activated.T.tolist(), strict=True))

  def cell_types(self, names: Sequence[str], outputs: int) -> dict[str, str]:
    """Name columns after the values, or by index if names are not unique."""
    known = names if len({*names}) == len(names) else ()
    return {
      f"values/{class_label(known, i)}": "float64" for i in range(outputs)
    }

  def explained(
    self, stated: TaskKind, found: np.ndarray, outputs: np.ndarray
  ) -> tuple[np.ndarray, float]:
    """Compare values in standard deviations, apart from float32 rounding."""
    std, values = np.array(stated.std), self.activate(stated, outputs, np)
    rounding = 2 * np.finfo(np.float32).eps * np.abs(values)
    return np.maximum(np.abs(found - values) - rounding, 0) / std, 0.0

  def number_of_answers(
    self, stated: TaskKind, activated: np.ndarray, most: Most
  ) -> int:
    return int(activated.size)
