"""Pretraining: the backbone of a run, trained first in the regime `full`."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memory_vit.config import (
  OPTIONS,
  Config,
  DataConfig,
  KeepConfig,
  OptimConfig,
  SweepConfig,
  TaskConfig,
  UpstreamConfig,
  WandbConfig,
)
from memory_vit.errors import TrainingError
from memory_vit.model import trees
from memory_vit.model.vit_config import RANDOM
from memory_vit.runtime import dtypes, files, paths, processes
from memory_vit.train import settle

# Directory of pretraining in that of the run, and the name of its task.
DIRECTORY = "pretrain"
_NAME = "pretraining"
_MADE_BY = "backbone.json"


def pretrain_config(config: Config) -> Config:
  """The configuration of the run that trains the backbone of `config`.

  It trains a whole ViT with AdamW and keeps the last step; compute dtype and
  intervals are those of the run that needs the backbone.
  """
  settings = config.pretrain
  return dataclasses.replace(
    config,
    backbone=RANDOM + settings.variant,
    regime="full",
    total_steps=settings.total_steps,
    epochs=0.0,
    batch_size=settings.batch_size,
    learning_rate=settings.learning_rate,
    eval_every=settings.total_steps,  # there is nothing to evaluate
    profile_at=0,
    log_images=0,
    export_orbax=False,
    data=DataConfig(
      **dataclasses.asdict(settings.data),
      validation="",
      test="",
      digest=config.data.digest,
    ),
    keep=KeepConfig(),
    task=TaskConfig(name=_NAME),
    optim=OptimConfig(name="adamw", warmup=0.1),
    sweep=SweepConfig(),
    upstream=UpstreamConfig(),
    pretrain=dataclasses.replace(settings, variant=""),
    wandb=WandbConfig(),
  )


def make_backbone(
  config: Config, workdir: Path, train: Callable[[Config, Path], Any]
) -> None:
  """Train WORKDIR/backbone.npz, unless it exists.

  `train` runs a configuration in a directory to its end, or resumes it.
  """
  path = workdir / "backbone.npz"
  if not processes.broadcast_from_process_0(path.exists()):
    directory = workdir / DIRECTORY
    processes.on_process_0(
      lambda: paths.make_directory(directory, "the directory of pretraining")
    )
    train(pretrain_config(config), directory)

    def keep() -> None:
      # In this order: no backbone exists without its configuration.
      files.write_json(workdir / _MADE_BY, _what_makes(config))
      with (
        files.writing(path),
        files.replacing(path) as scratch,
        files.fetched(directory / f"{_NAME}.npz") as made,
      ):
        shutil.copyfile(made, scratch)
      # Two states of a whole model and its optimizer are not needed any more.
      with contextlib.suppress(OSError):
        files.remove_directory(directory / "checkpoints")

    processes.on_process_0(keep)
  require_made_by(config, workdir)


def require_made_by(config: Config, workdir: Path) -> None:
  """Raise `TrainingError` if another configuration made the backbone."""
  made_by = workdir / _MADE_BY
  found = files.read_object(made_by) if made_by.exists() else {}
  if _what_matters(found) != _what_matters(_what_makes(config)):
    raise TrainingError(
      f"{workdir / 'backbone.npz'} was not made by this configuration, but by "
      f"{found or 'something else'}. Give that one, or another --workdir."
    )


def _what_makes(config: Config) -> dict[str, Any]:
  """Options on which the backbone depends, as JSON returns them."""
  values = {
    "pretrain": dataclasses.asdict(config.pretrain),
    "image_size": config.image_size,
    "seed": config.seed,
    "gelu": settle.made_gelu(config),
    "dtype": dtypes.resolve(config.dtype),
  }
  return json.loads(json.dumps(values))


def _what_matters(made: Mapping[str, Any]) -> dict[str, Any]:
  """Leave out options of reading images, except the directory.

  The files of `pretrain.data` are recorded only during pretraining: afterwards
  only the directory tells other images apart.
  """
  free = {key for key, option in OPTIONS.items() if option.resume == "free"}
  free.remove("pretrain.data.dir")
  flat = trees.flatten(made)
  return {k: v for k, v in flat.items() if k.replace("/", ".") not in free}
