"""Opens what a run reads: a backbone, splits of data and earlier tasks."""

import logging
from collections.abc import Mapping
from pathlib import Path

from memory_vit.config import Config
from memory_vit.data import data_record, datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split import Split
from memory_vit.data.split_ref import configured_splits
from memory_vit.model.backbone import Backbone
from memory_vit.tasks import store
from memory_vit.train import open_backbone, settle, sweep, upstream
from memory_vit.train.run_context import RunContext
from memory_vit.train.sweep import Trial
from memory_vit.train.trainer import Trainer
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
  """Open backbone and data of a run, and settle its trials.

  Nothing is written. All that could be refused is opened before anything is
  computed: a wrong test split must not cost a training.

  Args:
    config: of the run; the trainer has what backbone and data settle of it.
    workdir: of the run.
    context: of the run.
    splits: {"train": reader, ...} in place of a data set that is opened.
    backbone: in place of one that is loaded.
    wandb: that gets the events, if any.

  Raises:
    MemoryVitError: for what cannot be used, or does not fit together.
  """
  backbone = open_backbone.open_backbone(
    config, workdir, context.mesh, backbone
  )
  readers = _open_splits(config, backbone, splits or {})
  config = settle.settled(config, backbone, readers["train"])
  trials = sweep.trials_of(config, settle.task_name(config))
  attends_to, ancestors = (
    tuple(store.load_task(path, backbone) for path in paths)
    for paths in settle.parent_directories(config)
  )
  parents = (*attends_to, *ancestors)
  settle.require_fit(config, backbone, readers, parents, trials)
  for line in dict.fromkeys(
    line for reader in readers.values() for line in reader.skipped
  ):
    logger.info(line)
  trainer = Trainer(
    config=config,
    context=context,
    backbone=backbone,
    train=readers["train"],
    validation=readers.get("validation"),
    test=readers.get("test"),
    upstream=readers.get("upstream"),
    attends_to=attends_to,
    ancestors=ancestors,
    record=_record_of(readers, config, workdir),
    wandb_run=wandb,
  )
  return trainer, trials


def _open_splits(
  config: Config, backbone: Backbone, given: Mapping[str, Split]
) -> dict[str, Split]:
  """Open the splits that a configuration names, but those that are given."""
  readers = {}
  for role, ref in configured_splits(config).items():
    if role in given:
      readers[role] = datasets.read_as(ref, given[role])
    elif role in ("train", "validation", "test"):
      readers[role] = datasets.open_on_all_processes(ref)
  if original := upstream.open_upstream(config, backbone):
    readers["upstream"] = original
  return readers


def _record_of(
  splits: Mapping[str, Split], config: Config, workdir: Path
) -> DataRecord:
  """The record of all data that a run reads."""
  if config.data.digest == "contents":
    logger.info("reading all bytes of the data (config.data.digest)")
  return data_record.run_record(
    workdir,
    config.data.digest,
    {key: split.data_files for key, split in splits.items()},
  )
