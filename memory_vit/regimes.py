"""What is trained, and how attention runs.

To the training loop a regime is two functions: what comes before the first
trained value, and what comes after. Only the second is differentiated, so
nothing is ever back-propagated through what is frozen.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from memory_vit.programs import encode_program, read_tasks
from memory_vit.tasks import BACKBONE, TaskSpec
from memory_vit.variants import ViTConfig

Logits = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Regime:
  """The forward pass of training, cut where the first trained value enters.

  Attributes:
    prepare: (frozen, images) -> inputs; runs without a gradient.
    logits: (trained, frozen, inputs) -> {name: (b, c)} for every name in
      `trained`; a pure function, compiled by the loop.
  """

  prepare: Callable[[Any, jax.Array], Any]
  logits: Callable[[Any, Any, Any], Logits]


def memory_masked(config: ViTConfig, specs: tuple[TaskSpec, ...]) -> Regime:
  """Head, class token and memory; Table 1 of the paper says who sees whom.

  Trained is {name: task parameters}; frozen {"backbone": its parameters,
  "tasks": {name: parameters of the tasks that are read, but not trained}}.

  Args:
    config: of the backbone.
    specs: of all tasks, trained and frozen.
  """

  def prepare(frozen: Any, images: jax.Array) -> Any:
    return encode_program(frozen["backbone"], images, config=config)[1]

  def logits(trained: Any, frozen: Any, context: Any) -> Logits:
    tasks = {**frozen["tasks"], **trained}
    outputs = read_tasks(
      tasks, frozen["backbone"], context, config=config, specs=specs
    )
    return {name: outputs[name] for name in trained}

  return Regime(prepare, logits)


# What `config.regime` may be.
REGIMES = {"memory_masked": memory_masked}


def full(config: ViTConfig) -> Regime:
  """Everything, for pretraining; trained is {"backbone": its parameters}."""

  def logits(trained: Any, frozen: Any, images: jax.Array) -> Logits:
    del frozen
    outputs, _ = encode_program(trained[BACKBONE], images, config=config)
    return {BACKBONE: outputs}

  return Regime(lambda frozen, images: images, logits)
