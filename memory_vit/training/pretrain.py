"""Makes a small backbone from random weights, for demonstrations."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.backbones.load import save_backbone
from memory_vit.config import OPTIONS, Config, OptimConfig
from memory_vit.data import batching, datasets
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import TrainingError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, init_backbone
from memory_vit.model.task import BACKBONE
from memory_vit.model.vit_config import vit_config
from memory_vit.runtime import files, processes, sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import split_forward
from memory_vit.training import loop, optim
from memory_vit.training.step import Step, create_state


def pretrain(
  config: Config, mesh: Mesh, stop: StopSignal | None = None
) -> Backbone:
  """Trains all of a ViT with AdamW, as `config.pretrain` says.

  Args:
    config: of the run that needs the backbone.
    mesh: over which batches are split.
    stop: is asked after every step. No state is saved here.

  Returns:
    The backbone, with a head for the classes of its data set.
  """
  settings = config.pretrain
  reader = datasets.open_on_all_processes(configured_splits(config)["pretrain"])
  vit = vit_config(
    settings.variant,
    image_size=config.image_size,
    num_classes=reader.num_classes,
    gelu=config.gelu,
    dtype=config.dtype,
  )
  backbone = init_backbone(vit, jax.random.key(config.seed))
  optim_config = OptimConfig(name="adamw", warmup=0.1)
  schedule = optim.make_schedule(
    optim_config, settings.learning_rate, settings.total_steps
  )
  schedules = {BACKBONE: schedule}
  optimizer = optim.make_optimizer({BACKBONE: optim_config}, schedules)
  run = loop.Loop(
    title="pretraining",
    step_fn=Step(split_forward.full(backbone.config), optimizer, mesh),
    frozen=None,
    mesh=mesh,
    steps=loop.Steps(total=settings.total_steps, log=config.log_every),
    batch_size=settings.batch_size,
    schedules=schedules,
    max_skipped=optim_config.max_skipped,
    stop=stop or StopSignal(),
  )
  batches = batching.train_batches(
    reader,
    settings.data,
    image_size=config.image_size,
    batch_size=settings.batch_size,
    seed=config.seed if settings.data.seed < 0 else settings.data.seed,
  )
  state = create_state({BACKBONE: backbone.params}, optimizer, mesh)
  state, _ = run.fit(state, batches)
  params = sharding.to_host(state.params[BACKBONE])
  return dataclasses.replace(backbone, params=params)


def pretrained_file(
  config: Config, workdir: Path, mesh: Mesh, stop: StopSignal | None = None
) -> Path:
  """The file of the backbone that `config.pretrain` describes.

  It is made only once.

  Args:
    config: of the run.
    workdir: of the run, where it lies.
    mesh: over which batches are split.
    stop: whether to stop while it is made.

  Raises:
    TrainingError: where another configuration has made the one there.
  """
  path, made_by = workdir / "backbone.npz", workdir / "backbone.json"
  wanted = _what_makes(config)
  if not processes.broadcast_from_process_0(path.exists()):
    backbone = pretrain(config, mesh, stop)

    def save() -> None:
      # In this order: a backbone is never there without what made it.
      files.write_json(made_by, wanted)
      with files.writing(path):
        save_backbone(backbone, path)

    processes.on_process_0(save)
  found = files.read_object(made_by) if made_by.exists() else {}
  if _what_matters(found) != _what_matters(wanted):
    raise TrainingError(
      f"{path} was not made by this configuration, but by "
      f"{found or 'something else'}. Give that one, or another --workdir."
    )
  return path


def _what_makes(config: Config) -> dict[str, Any]:
  """What a backbone depends on, as JSON gives it back."""
  values = {
    "pretrain": dataclasses.asdict(config.pretrain),
    "image_size": config.image_size,
    "seed": config.seed,
    "gelu": config.gelu,
    "dtype": config.dtype,
  }
  return json.loads(json.dumps(values))


def _what_matters(made: Mapping[str, Any]) -> dict[str, Any]:
  """Leaves out how pictures are read, which may change; not from where.

  The files of `data` are recorded, those of `pretrain.data` are not: what tells
  other pictures is their directory alone.
  """
  free = {key for key, option in OPTIONS.items() if option.resume == "free"}
  free.remove("pretrain.data.dir")
  flat = trees.flatten(made)
  return {k: v for k, v in flat.items() if k.replace("/", ".") not in free}
