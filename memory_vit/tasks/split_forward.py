"""Forward pass of training, split in front of the first trained parameter.

For the training loop a regime is two functions, and only the second one is
differentiated: gradients are not propagated through frozen computations.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.parts.head import head_logits
from memory_vit.model.parts.probe import probe_features
from memory_vit.model.regimes import Regime
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.inference import (
  encode_program,
  read_tasks,
  summary_program,
)

# {task name: logits (b, c)}
Logits = dict[str, Float32[Array, "b _"]]


# A function from (frozen, images) to the inputs of the trained part. `frozen`
# is {"backbone": parameters, "tasks": {name: parameters}}; "tasks" are
# the frozen tasks to which trained tasks attend.
FrozenPass = Callable[[Any, Float[Array, "b side side 3"]], Any]


@dataclasses.dataclass(frozen=True)
class SplitForward:
  """A forward pass in two functions."""

  prepare: FrozenPass  # the frozen part, computed without a gradient
  # A pure function from (trained, frozen, inputs) to the logits of the trained
  # tasks. `trained` is {task name: parameters}.
  logits: Callable[[Any, Any, Any], Logits]


def make_split_forward(
  config: ViTConfig, specs: tuple[TaskSpec, ...]
) -> SplitForward:
  """Split the pass of tasks; raise `TaskError` if they cannot share a pass."""
  prepare = frozen_pass(config, [spec.learned for spec in specs])
  if specs[-1].learned.has_token:
    return SplitForward(prepare, _masked(config, specs))
  if all(spec.learned.on_features for spec in specs):
    return SplitForward(prepare, _on_features)
  if len(specs) > 1:
    raise TaskError(
      f"tasks {[spec.name for spec in specs]} cannot share a pass: the regime "
      f"{specs[-1].regime!r} changes what the backbone computes."
    )
  return SplitForward(prepare, _fine_tuned(config, specs[0]))


def frozen_pass(config: ViTConfig, regimes: Sequence[Regime]) -> FrozenPass:
  """Return the function that computes the inputs of the trained part.

  The function returns the context of the backbone for masked regimes; a
  dictionary of "pooled" (b, d) for heads and "layers" (b, n, d) for probes; the
  images for regimes that change what the backbone computes.
  """
  if regimes[-1].has_token:
    return lambda frozen, images: encode_program(
      frozen["backbone"], images, config=config
    )[1]._replace(pooled=None)
  if not all(regime.on_features for regime in regimes):
    return lambda frozen, images: images
  vit, columns = headless(config), {regime.column for regime in regimes}

  def features(
    frozen: Any, images: Float[Array, "b side side 3"]
  ) -> dict[str, Array]:
    params, outputs = frozen["backbone"], {}
    if "pooled" in columns:
      outputs["pooled"] = encode_program(params, images, config=vit)[0]
    if "layers" in columns:
      outputs["layers"] = summary_program(params, images, config=vit)
    return outputs

  return features


def _masked(
  config: ViTConfig, specs: tuple[TaskSpec, ...]
) -> Callable[[Any, Any, Any], Logits]:
  """Return `SplitForward.logits` for tasks of masked regimes."""

  def logits(trained: Any, frozen: Any, context: Any) -> Logits:
    tasks = {**frozen["tasks"], **trained}
    outputs = read_tasks(
      tasks, frozen["backbone"], context, config=config, specs=specs
    )
    return {name: outputs[name] for name in trained}

  return logits


def _on_features(
  trained: Any, frozen: Any, features: dict[str, Array]
) -> Logits:
  """Compute the logits of heads and probes.

  Heads read "pooled" (b, d) of `features`, and probes "layers" (b, n, d).
  """
  del frozen
  return {
    name: head_logits(
      probe_features(task["probe"], features["layers"])
      if "probe" in task
      else features["pooled"],
      task["head"],
    )
    for name, task in trained.items()
  }


def _fine_tuned(
  config: ViTConfig, spec: TaskSpec
) -> Callable[[Any, Any, Any], Logits]:
  """Return `SplitForward.logits` for a task that changes the backbone."""
  model = MemoryViT(headless(config))

  def logits(
    trained: Any, frozen: Any, images: Float[Array, "b side side 3"]
  ) -> Logits:
    task = trained[spec.name]
    params = {**frozen["backbone"], **task.get("backbone", {})}
    return {
      spec.name: apply(
        model, {"backbone": params}, images, task, spec, method="fine_tuned"
      )
    }

  return logits


@functools.partial(jax.jit, static_argnames=("config", "specs"))
def logits_program(
  trained: Any,
  frozen: Any,
  inputs: Any,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> Logits:
  """Run `SplitForward.logits`, for evaluation."""
  return make_split_forward(config, specs).logits(trained, frozen, inputs)


def headless(config: ViTConfig) -> ViTConfig:
  """Return the configuration of a ViT that ends before its head."""
  return dataclasses.replace(config, num_classes=0, representation_size=0)
