"""Inputs of a run, described without images and usually without weights."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from memory_vit.backbones.load import known_config
from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.source import Source
from memory_vit.data.split import Split
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import BackboneError, ConfigError, DataError
from memory_vit.kinds import KINDS, TaskKind
from memory_vit.kinds.kind import HeadOutputs
from memory_vit.model.backbone import Backbone, backbone_shapes, rounded
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import RANDOM
from memory_vit.runtime import sharding
from memory_vit.runtime.absent_devices import Chip
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import manifest, store
from memory_vit.train import padded_head, settle, sweep
from memory_vit.train.inputs import RunInputs, random_config, read_backbone

_EXAMPLES = (
  "--examples if config.epochs is set or rows are cached on the device"
)


def describe_inputs(
  config: Config, mesh: Mesh, chip: Chip, classes: int, examples: int
) -> RunInputs:
  """Describe the inputs of a run on a mesh, with shapes or zeros for arrays.

  Args:
    config: configuration of the run.
    mesh: mesh of devices that need not exist.
    chip: type of the devices.
    classes: number of outputs of the task; 0 takes it from the data.
    examples: number of training examples; 0 takes it from the data.
  """
  loaded = _open_backbone(config)
  vit = dataclasses.replace(loaded.config, platform=chip.platform)
  backbone = dataclasses.replace(loaded, config=vit)
  train = _describe_data(config, classes, examples)
  config = settle.settled(config, backbone, train)
  if not settle.task_name(config):  # neither the task nor the data has a name
    config = config.replaced({"task.name": "task"})
  settle.require_batches(config, mesh)
  attends_to, ancestors = (
    tuple(store.read_task(path, manifest.read(path)) for path in paths)
    for paths in settle.parent_directories(config)
  )
  parents = (*attends_to, *ancestors)
  outputs = config.task.padded_classes or train.num_classes
  vector = jnp.zeros(outputs)
  kind = KINDS[config.task.kind]
  # Use 1 as each value's mean and deviation: no program depends on them.
  scales = (1.0,) * train.num_classes if kind.needed else ()
  frozen = {
    "backbone": jax.eval_shape(
      lambda params: rounded(Backbone(vit, params, "")).params, backbone.params
    ),
    "tasks": {task.spec.name: task.params for task in parents},
    "outputs": HeadOutputs(
      padded_head.is_class(outputs, train.num_classes), vector
    ),
  }
  return RunInputs(
    config=config,
    mesh=mesh,
    stop=StopSignal(),
    backbone=backbone,
    frozen=sharding.shapes(frozen, mesh),
    splits={"train": train},
    kind=TaskKind(name=kind.name, mean=scales, std=scales),
    trials=tuple(sweep.trials_of(config, settle.task_name(config))),
    attends_to=attends_to,
    first_head=None,
    parents=parents,
    preprocessing=EvalPreprocessing(image_size=vit.image_size),
    record=DataRecord(),
    decoded=lambda: train,
    cache=None,
  )


def _open_backbone(config: Config) -> Backbone:
  """Return a backbone of zeros if its shapes are known; else read its file."""
  if config.backbone.startswith(RANDOM):
    vit = random_config(config)
  elif known := known_config(config.backbone):
    vit = dataclasses.replace(
      known,
      image_size=config.image_size or known.image_size,
      dtype=config.dtype,
      gelu=settle.made_gelu(config),
    )
  else:
    try:
      return read_backbone(config)
    except BackboneError as error:
      raise BackboneError(
        f"{error} To plan without a file, give a short name such as "
        "augreg-B/16, or random:B/16 with config.image_size."
      ) from error
  params = jax.tree.map(
    lambda a: np.zeros(a.shape, a.dtype), backbone_shapes(vit)
  )
  return Backbone(vit, params, fingerprint="")


def _describe_data(config: Config, classes: int, examples: int) -> Split:
  """Return the training split with class names and size, but no examples."""
  needs_examples = config.epochs != 0 or (
    config.cache.has_rows and config.cache.where == "device"
  )
  names, size = tuple(map(str, range(classes))), examples or None
  if not names or (needs_examples and not size):
    ref = configured_splits(config)["train"]
    if not ref.name:
      raise ConfigError(
        "config.data.name is empty: name a data set, or give --classes (the "
        f"number of outputs of the task), and {_EXAMPLES}."
      )
    try:
      found_names, found_size = datasets.describe(ref)
    except DataError as error:
      raise DataError(
        f"{error} To plan without the data, give --classes, and {_EXAMPLES}."
      ) from error
    names, size = names or found_names, size or found_size
  if needs_examples and not size:
    raise ConfigError(
      f"data set {config.data.name!r} is not prepared, so its number of "
      "training examples is unknown, but config.epochs or a cache on the "
      "device needs this number: give --examples."
    )
  return Split(
    name=config.data.name,
    split=config.data.train,
    size=size or 0,
    class_names=names,
    kind=config.task.kind,
    source=cast(Source, None),  # no example is read
  )
