"""Open the inputs of a run: backbone, splits of data and earlier tasks."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from memory_vit.backbones.load import read_published, to_backbone
from memory_vit.config import Config
from memory_vit.data import data_record, datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split import Split
from memory_vit.data.split_ref import configured_splits
from memory_vit.model.backbone import Backbone, init_backbone
from memory_vit.model.vit_config import RANDOM, vit_config
from memory_vit.runtime import dtypes, sharding
from memory_vit.tasks import store
from memory_vit.train import settle, sweep, upstream
from memory_vit.train.sweep import Trial
from memory_vit.train.trainer import RunContext, Trainer
from memory_vit.train.wandb_run import WandbRun

logger = logging.getLogger(__name__)


def open_trainer(
  config: Config,
  workdir: Path,
  context: RunContext,
  *,
  splits: Mapping[str, Split] | None = None,
  backbone: Backbone | None = None,
  wandb: WandbRun | None = None,
) -> tuple[Trainer, list[Trial]]:
  """Open backbone and data of a run, and settle its trials; writes nothing.

  All inputs are opened before anything is computed: a wrong test split must not
  cost a training.
  """
  backbone = open_backbone(config, context.mesh, backbone)
  opened = _open_splits(config, backbone, splits or {})
  config = settle.settled(config, backbone, opened["train"])
  trials = sweep.trials_of(config, settle.task_name(config))
  attends_to, ancestors = (
    tuple(store.load_task(path, backbone) for path in paths)
    for paths in settle.parent_directories(config)
  )
  parents = (*attends_to, *ancestors)
  settle.require_fit(config, backbone, opened, parents, trials)
  kind = settle.task_kind(config, opened["train"])
  for line in dict.fromkeys(
    line for split in opened.values() for line in split.skipped
  ):
    logger.info(line)
  trainer = Trainer(
    config=config,
    context=context,
    backbone=backbone,
    train=opened["train"],
    task_kind=kind,
    validation=opened.get("validation"),
    test=opened.get("test"),
    upstream=opened.get("upstream"),
    attends_to=attends_to,
    ancestors=ancestors,
    record=_record_of(opened, config, workdir),
    wandb_run=wandb,
  )
  return trainer, trials


def open_backbone(
  config: Config, mesh: Mesh, loaded: Backbone | None = None
) -> Backbone:
  """Load or initialize the backbone, if it is not given, on the mesh."""
  path = config.backbone
  if loaded:
    backbone = loaded
  elif path.startswith(RANDOM):
    backbone = init_backbone(
      vit_config(
        path.removeprefix(RANDOM),
        image_size=config.image_size,
        dtype=dtypes.resolve(config.dtype),
        gelu=settle.made_gelu(config),
      ),
      jax.random.key(config.seed),
    )
  else:
    # In float32: the regime `full` trains these weights.
    backbone = to_backbone(
      read_published(path),
      config.image_size or None,
      config.dtype,
      gelu=settle.stated_gelu(config),
    )
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, backbone.config.image_size,
    backbone.fingerprint[:16],
  )  # fmt: skip
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def _open_splits(
  config: Config, backbone: Backbone, given: Mapping[str, Split]
) -> dict[str, Split]:
  """Open the configured splits, except those that are given."""
  splits = {}
  for role, ref in configured_splits(config).items():
    if role in given:
      splits[role] = datasets.read_as(ref, given[role])
    elif role in ("train", "validation", "test"):
      splits[role] = datasets.open_on_all_processes(ref)
  if original := upstream.open_upstream(config, backbone):
    splits["upstream"] = original
  return splits


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
