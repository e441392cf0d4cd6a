"""Forward pass of training, cut in front of the first trained parameter.

To the training loop a regime is two functions, of which only the second is
differentiated: nothing is back-propagated through what is frozen.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.parts.head import head_logits
from memory_vit.model.parts.probe import probe_features
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.inference import (
  encode_program,
  read_tasks,
  summary_program,
)

# {name: logits (b, c)}
Logits = dict[str, Float32[Array, "b _"]]


@dataclasses.dataclass(frozen=True)
class SplitForward:
  """A forward pass in two functions."""

  # (frozen, images) -> inputs; runs without a gradient. Frozen is {"backbone":
  # parameters, "tasks": {name: parameters of tasks that are attended to}}.
  prepare: Callable[[Any, Float[Array, "b side side 3"]], Any]
  # (trained, frozen, inputs) -> logits of every name in `trained`, {name: task
  # parameters}; a pure function.
  logits: Callable[[Any, Any, Any], Logits]


def make_split_forward(
  config: ViTConfig, specs: tuple[TaskSpec, ...]
) -> SplitForward:
  """Split the forward pass of tasks; several only if they share a pass."""
  if specs[-1].learned.composes:
    return _masked(config, specs)
  heads = all(spec.learned.on_features for spec in specs)
  if len(specs) > 1 and not heads:
    raise TaskError(
      f"tasks {[spec.name for spec in specs]} cannot share a pass: the regime "
      f"{specs[-1].regime!r} changes what the backbone computes."
    )
  if heads:
    return _on_features(config, specs)
  return _fine_tuned(config, specs[0])


def _masked(config: ViTConfig, specs: tuple[TaskSpec, ...]) -> SplitForward:
  """Masked tasks: the backbone is frozen, the task stream is trained."""

  def prepare(frozen: Any, images: Float[Array, "b side side 3"]) -> Any:
    return encode_program(frozen["backbone"], images, config=config)[1]

  def logits(trained: Any, frozen: Any, context: Any) -> Logits:
    tasks = {**frozen["tasks"], **trained}
    outputs = read_tasks(
      tasks, frozen["backbone"], context, config=config, specs=specs
    )
    return {name: outputs[name] for name in trained}

  return SplitForward(prepare, logits)


def _on_features(
  config: ViTConfig, specs: tuple[TaskSpec, ...]
) -> SplitForward:
  """Heads on {"pooled": (b, d)} and probes on {"layers": (b, n, d)}."""
  config = headless(config)
  columns = {spec.learned.column for spec in specs}

  def prepare(
    frozen: Any, images: Float[Array, "b side side 3"]
  ) -> dict[str, Array]:
    params, features = frozen["backbone"], {}
    if "pooled" in columns:
      features["pooled"] = encode_program(params, images, config=config)[0]
    if "layers" in columns:
      features["layers"] = summary_program(params, images, config=config)
    return features

  def logits(trained: Any, frozen: Any, features: dict[str, Array]) -> Logits:
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

  return SplitForward(prepare, logits)


def _fine_tuned(config: ViTConfig, spec: TaskSpec) -> SplitForward:
  """A task that changes the backbone stream: all of it is differentiated."""
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

  return SplitForward(lambda frozen, images: images, logits)


@functools.partial(jax.jit, static_argnames=("config", "specs"))
def logits_program(
  trained: Any,
  frozen: Any,
  inputs: Any,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> Logits:
  """`SplitForward.logits`, for evaluation."""
  return make_split_forward(config, specs).logits(trained, frozen, inputs)


def headless(config: ViTConfig) -> ViTConfig:
  """The ViT up to the features in front of its head."""
  return dataclasses.replace(config, num_classes=0, representation_size=0)
