"""Inputs of a run on some digits, as `open_inputs` makes them."""

import dataclasses

from conftest import one_device

from memory_vit.data import datasets
from memory_vit.kinds import CLASSES
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.train import inputs as inputs_lib
from memory_vit.train import sweep

DIGITS = "digits:5-9"


def run_inputs(
  config,
  backbone,
  *,
  mesh=None,
  parents=(),
  kind=CLASSES,
  stop=None,
  prepare=None,
  **splits,
):
  """Open the splits that the configuration names, but for `splits`.

  `prepare` takes the place of the frozen pass of the cache.
  """
  mesh = mesh or one_device()
  params = sharding.put_backbone(backbone.params, mesh)
  for role in ("train", "validation"):
    if role not in splits and getattr(config.data, role):
      splits[role] = datasets.open_split(DIGITS, getattr(config.data, role))
  inputs = inputs_lib.make_inputs(
    config,
    mesh,
    dataclasses.replace(backbone, params=params),
    splits,
    sweep.trials_of(config, "d"),
    stop=stop or StopSignal(),
    kind=kind,
    attends_to=tuple(parents),
  )
  if prepare is None:
    return inputs
  cache = dataclasses.replace(inputs.cache, prepare=prepare)
  return dataclasses.replace(inputs, cache=cache)
