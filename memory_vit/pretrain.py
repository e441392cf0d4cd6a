"""Makes a small backbone from random weights, for demonstrations."""

import dataclasses

import jax
from jax.sharding import Mesh

from memory_vit import data, optim, regimes, train
from memory_vit.backbone import Backbone, init_backbone
from memory_vit.config import Config, OptimConfig
from memory_vit.step import Step, create_state
from memory_vit.tasks import BACKBONE
from memory_vit.variants import vit_config


def pretrain(config: Config, mesh: Mesh) -> Backbone:
  """Trains all of a ViT with AdamW, as `config.pretrain` says.

  Args:
    config: of the run that needs the backbone.
    mesh: over which batches are split.

  Returns:
    The backbone, with a head for the classes of its data set.
  """
  settings = config.pretrain
  source = data.open_source(
    settings.data.name,
    settings.data.train,
    settings.data.dir,
    settings.data.cache_gib,
  )
  vit = vit_config(
    settings.variant,
    image_size=config.image_size,
    num_classes=source.num_classes,
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
  state, _ = train.fit(
    Step(regimes.full(backbone.config), optimizer, mesh),
    create_state({BACKBONE: backbone.params}, optimizer, mesh),
    None,
    data.train_batches(
      source,
      settings.data,
      image_size=config.image_size,
      batch_size=settings.batch_size,
      seed=config.seed if settings.data.seed < 0 else settings.data.seed,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    ),
    title="pretraining",
    steps=train.Steps(total=settings.total_steps, log=config.log_every),
    batch_size=settings.batch_size,
    mesh=mesh,
    schedules=schedules,
  )
  return dataclasses.replace(backbone, params=state.params[BACKBONE])
