"""Inputs of a run: configuration, devices, backbone, data, earlier tasks."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.backbones.load import read_published, to_backbone
from memory_vit.cache.run_cache import RunCache
from memory_vit.config import Config
from memory_vit.data import crop_sizes, data_record, datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.decoded_images import cache_decoded
from memory_vit.data.split import Split
from memory_vit.data.split_ref import configured_splits
from memory_vit.data.subset import class_counts
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.kinds.kind import HeadOutputs
from memory_vit.model.backbone import Backbone, init_backbone, rounded
from memory_vit.model.task import EvalPreprocessing, Task
from memory_vit.model.vit_config import RANDOM, ViTConfig, vit_config
from memory_vit.runtime import dtypes, processes, sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import store
from memory_vit.tasks.split_forward import frozen_pass
from memory_vit.train import padded_head, settle, sweep
from memory_vit.train.sweep import Trial

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInputs:
  """Inputs that all trials of a run, or of one group of trials, share."""

  config: Config
  mesh: Mesh
  # Signal that is checked after each training step and evaluation batch.
  stop: StopSignal
  backbone: Backbone  # with the loaded parameters, on the devices of the mesh
  # Arrays that are not trained: {"backbone": parameters in the compute dtype,
  # "tasks": {name: parameters of earlier tasks}, "outputs": `HeadOutputs`}.
  frozen: Mapping[str, Any]
  # {"train": split, ...}; "validation", "test" and "upstream" are optional.
  splits: Mapping[str, Split]
  # Kind of the task, without the fields that are fitted after training, such as
  # thresholds.
  kind: TaskKind
  trials: tuple[Trial, ...]
  attends_to: tuple[Task, ...]
  first_head: Task | None  # loaded from `config.task.init`
  # All earlier tasks in the forward pass: `attends_to`, and the ancestors of
  # these tasks.
  parents: tuple[Task, ...]
  preprocessing: EvalPreprocessing
  record: DataRecord
  # Function that returns the training split with decoded images in memory; the
  # first call decodes them.
  decoded: Callable[[], Split]
  cache: RunCache | None  # None if no outputs are cached

  @functools.cached_property
  def rounded_backbone(self) -> Backbone:
    """The backbone with its parameters in the compute dtype."""
    return dataclasses.replace(self.backbone, params=self.frozen["backbone"])


def open_inputs(
  config: Config,
  workdir: Path,
  mesh: Mesh,
  stop: StopSignal,
  *,
  splits: Mapping[str, Split] | None = None,
  backbone: Backbone | None = None,
) -> RunInputs:
  """Open backbone and data of a run, settle its trials, and write nothing.

  All inputs are opened before anything is computed, so that a wrong test split
  is refused before training.
  """
  backbone = open_backbone(config, mesh, backbone)
  opened = _open_splits(config, backbone, splits or {})
  config = settle.settled(config, backbone, opened["train"])
  # Check the memory again, now that `image_size` is known.
  settle.require_memory(config)
  trials = sweep.trials_of(config, settle.task_name(config))
  attends_to, ancestors = (
    tuple(store.load_task(path, backbone) for path in paths)
    for paths in settle.parent_directories(config)
  )
  first_head = settle.load_first_head(config, backbone, opened["train"], trials)
  settle.require_fit(
    config, backbone, opened, (*attends_to, *ancestors), trials, first_head
  )
  for line in dict.fromkeys(
    line for split in opened.values() for line in split.skipped
  ):
    logger.info(line)
  return make_inputs(
    config,
    mesh,
    backbone,
    opened,
    trials,
    stop=stop,
    kind=settle.task_kind(config, opened["train"]),
    attends_to=attends_to,
    ancestors=ancestors,
    first_head=first_head,
    record=_record_of(opened, config, workdir),
  )


def open_backbone(
  config: Config, mesh: Mesh, loaded: Backbone | None = None
) -> Backbone:
  """Put `loaded`, or else the backbone of `config`, on the mesh."""
  path = config.backbone
  if loaded:
    backbone = loaded
  elif path.startswith(RANDOM):
    backbone = init_backbone(random_config(config), jax.random.key(config.seed))
  else:
    backbone = read_backbone(config)
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, backbone.config.image_size,
    backbone.fingerprint[:16],
  )  # fmt: skip
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def random_config(config: Config) -> ViTConfig:
  """Return the configuration of the backbone "random:VARIANT"."""
  return vit_config(
    config.backbone.removeprefix(RANDOM),
    image_size=config.image_size,
    dtype=dtypes.resolve(config.dtype),
    gelu=settle.made_gelu(config),
  )


def read_backbone(config: Config) -> Backbone:
  """Load a published backbone in float32, so that `full` can train it."""
  return to_backbone(
    read_published(config.backbone),
    config.image_size or None,
    config.dtype,
    gelu=settle.stated_gelu(config),
  )


def make_inputs(
  config: Config,
  mesh: Mesh,
  backbone: Backbone,
  splits: Mapping[str, Split],
  trials: Sequence[Trial],
  *,
  stop: StopSignal,
  kind: TaskKind = CLASSES,
  attends_to: tuple[Task, ...] = (),
  ancestors: tuple[Task, ...] = (),
  first_head: Task | None = None,
  record: DataRecord | None = None,
) -> RunInputs:
  """Derive the `RunInputs` of a run; `config` must be settled."""
  train, data = splits["train"], config.data
  parents = (*attends_to, *ancestors)
  frozen = {
    "backbone": rounded(backbone).params,
    "tasks": {task.spec.name: task.params for task in parents},
  }
  outputs = _head_outputs(config, trials, train, kind)
  if jax.tree.leaves(outputs):
    frozen["outputs"] = sharding.put(outputs, mesh)
  if train.embedded:
    preprocessing = train.embedded.origin.preprocessing
  else:
    preprocessing = crop_sizes.preprocessing_of(
      data.eval_crop, data.resize, config.image_size, backbone.preprocessing
    )
  inputs = RunInputs(
    config=config,
    mesh=mesh,
    stop=stop,
    backbone=backbone,
    frozen=frozen,
    splits=splits,
    kind=kind,
    trials=tuple(trials),
    attends_to=attends_to,
    first_head=first_head,
    parents=parents,
    preprocessing=preprocessing,
    record=record or DataRecord(),
    decoded=functools.cache(lambda: _decode(train, config, stop)),
    cache=None,
  )
  return dataclasses.replace(inputs, cache=_new_cache(inputs))


def of_group(inputs: RunInputs, trials: Sequence[Trial]) -> RunInputs:
  """Return the inputs for the trials of one group, with a new cache.

  See `sweep.by_pass_group`. The cache is new, so that the cache of the previous
  group can be garbage-collected.
  """
  first = trials[0].config
  config = dataclasses.replace(
    inputs.config, regime=first.regime, cache=first.cache
  )
  group = dataclasses.replace(inputs, config=config, trials=tuple(trials))
  return dataclasses.replace(group, cache=_new_cache(group))


def _decode(train: Split, config: Config, stop: StopSignal) -> Split:
  side = crop_sizes.shorter_side(config.data.resize, config.image_size)
  return cache_decoded(train, side, stop.check)


def _new_cache(inputs: RunInputs) -> RunCache | None:
  config, backbone = inputs.config, inputs.backbone
  if not config.cache.has_rows:
    return None
  return RunCache(
    config=config,
    backbone=backbone,
    preprocessing=inputs.preprocessing,
    record=inputs.record,
    prepare=functools.partial(
      frozen_pass(backbone.config, [config.learned]), inputs.frozen
    ),
    mesh=inputs.mesh,
    stop=inputs.stop,
  )


def _head_outputs(
  config: Config, trials: Sequence[Trial], train: Split, stated: TaskKind
) -> HeadOutputs:
  """Return the `HeadOutputs` of a run: a padding mask, and loss weights."""
  weights, kind = None, stated.kind
  if any(t.config.optim.class_weights == "balanced" for t in trials):
    counted, examples = processes.on_process_0(
      lambda: (
        class_counts(train).tolist(),
        train.size - len(train.unreadable),
      )
    )
    weights = kind.weights(np.array(counted), examples)
  if not kind.one_is_right:  # losses of labels and values need no mask
    return HeadOutputs(weights=weights)
  classes, padded = train.num_classes, config.task.padded_classes
  if weights is not None:
    weights = np.pad(weights, (0, max(0, padded - classes)))
  return HeadOutputs(padded_head.is_class(padded, classes), weights)


def _open_splits(
  config: Config, backbone: Backbone, opened: Mapping[str, Split]
) -> dict[str, Split]:
  """Return {role: split}; open the configured splits that `opened` lacks."""
  splits = {}
  for role, ref in configured_splits(config).items():
    if role in opened:
      splits[role] = datasets.read_as(ref, opened[role])
    elif role in ("train", "validation", "test"):
      splits[role] = datasets.open_on_all_processes(ref)
  if original := open_upstream(config, backbone):
    splits["upstream"] = original
  return splits


def open_upstream(config: Config, backbone: Backbone) -> Split | None:
  """Open the data of `config.upstream`; return None if it is not set."""
  ref = configured_splits(config).get("upstream")
  split = datasets.open_on_all_processes(ref) if ref else None
  if split and split.num_classes != backbone.config.num_classes:
    logger.info(
      "config.upstream: %s has %d classes, but the head of the backbone has "
      "%d: the original outputs are compared, but no accuracy is reported",
      split.full_name, split.num_classes, backbone.config.num_classes,
    )  # fmt: skip
  return split


def _record_of(
  splits: Mapping[str, Split], config: Config, workdir: Path
) -> DataRecord:
  if config.data.digest == "contents":
    logger.info("reading all bytes of the data (config.data.digest)")
  return data_record.run_record(
    workdir,
    config.data.digest,
    {key: split.data_files for key, split in splits.items()},
  )
