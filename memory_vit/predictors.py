"""How tasks of a regime are evaluated while they are learned."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from memory_vit import evaluation, programs, sharding, training_pass
from memory_vit.backbone import Backbone
from memory_vit.regimes import REGIMES
from memory_vit.tasks import Task


def predictor(
  backbone: Backbone, parents: Sequence[Task], tasks: Sequence[Task], mesh: Mesh
) -> evaluation.Predict:
  """Pictures (b, s, s, 3) -> {name of each of `tasks`: logits (b, c)}.

  Args:
    backbone: of all tasks, on the devices of the mesh.
    parents: what the tasks read.
    tasks: of one regime.
    mesh: on whose devices the tasks are put.
  """
  if REGIMES[tasks[0].spec.regime].composes:
    return _in_slots(backbone, parents, tasks)
  return _alone(backbone, tasks, mesh)


def _in_slots(
  backbone: Backbone, parents: Sequence[Task], tasks: Sequence[Task]
) -> evaluation.Predict:
  """Tasks as they are served."""
  slots = programs.fill_slots(backbone, [*parents, *tasks])

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    _, context = programs.encode(backbone, images, check=False)
    logits = programs.read(backbone, slots, context)
    return {task.spec.name: logits[task.spec.name] for task in tasks}

  return predict


def _alone(
  backbone: Backbone, tasks: Sequence[Task], mesh: Mesh
) -> evaluation.Predict:
  """Tasks that are not served in slots: they take the place of the head."""
  placed = [
    dataclasses.replace(task, params=sharding.put(task.params, mesh))
    for task in tasks
  ]

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    return training_pass.predict(backbone, placed, images)

  return predict
