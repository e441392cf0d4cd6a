"""Dry run of a study: its runs, and an estimate from timed steps."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.reader import Reader
from memory_vit.data.split_ref import configured_splits
from memory_vit.model.backbone import Backbone, random_backbone
from memory_vit.runtime import sharding
from memory_vit.runtime.progress_bar import duration
from memory_vit.runtime.sharding import shard_batch
from memory_vit.runtime.tables import table
from memory_vit.train import open_backbone, pretrain, resolve, sweep
from memory_vit.train.run_context import RunContext
from memory_vit.train.trainer import Trainer
from studies.paper import execute, plan
from studies.paper.execute import Executor
from studies.paper.runs import Run, config_of


def forecast(config: Config, workdir: Path, parts: Sequence[str]) -> str:
  """List the runs of a study and estimate their time; write nothing.

  What is finished in `workdir` takes no time.
  """
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone = _backbone(config, workdir, mesh)
  datasets.require_prepared(configured_splits(config)["train"])
  train = train_split(config)
  config = resolve.with_backbone(config, backbone)
  config = resolve.with_steps(config, train.size)
  file = open_backbone.study_file(config, workdir)
  done = Executor(config, workdir, file, backbone.fingerprint).finished(parts)
  runs = plan.plan(config, parts, done)
  for ref in execute.splits_to_read(config, runs, done):
    datasets.require_prepared(ref)
  execute.require_data(config, runs, done)
  left = [run for run in runs if run.name not in done]
  rows = [
    (run.name, str(_count([run])), "" if run in left else "finished")
    for run in runs
  ]
  lines = [table(("run", "trials", ""), rows), ""] if rows else []
  lines.append(
    f"{len(runs)} runs of {_count(runs)} trials and {config.total_steps:,} "
    f"steps for {', '.join(parts)}, {len(runs) - len(left)} of them finished."
  )
  if left:
    seconds: dict[tuple[str, tuple[int, ...]], float] = {}
    for run in left:
      if (run.regime, run.cells) not in seconds:
        timed = dataclasses.replace(
          run,
          reads=None,
          # Some of one run wait for the best rate of others.
          learning_rates=run.learning_rates or (config.learning_rate,),
        )
        seconds[run.regime, run.cells] = step_seconds(
          config_of(config, timed, file), backbone, mesh, train
        )
    total = config.total_steps * sum(
      seconds[run.regime, run.cells] for run in left
    )
    shown = ", one of ".join(
      f"{regime} takes {taken:.3g} s" for (regime, _), taken in seconds.items()
    )
    device = jax.devices()[0].device_kind
    lines.append(
      f"About {duration(total)} left on {len(jax.devices())} x {device}: a "
      f"step of {shown}, of all trials that share a pass. Compiling, "
      "evaluation, and images that are read slower come on top."
    )
  return "\n".join(lines)


def train_split(config: Config) -> Reader:
  """Open the training split of the first data set."""
  return datasets.open_on_all_processes(configured_splits(config)["train"])


def step_seconds(
  config: Config, backbone: Backbone, mesh: Mesh, train: Reader
) -> float:
  """Time one training step on random images, after one that compiles.

  Of a sweep all trials take it. The run reads no other task.
  """
  trainer = Trainer(
    config=config,
    context=RunContext(mesh),
    backbone=backbone,
    train=train,
  )
  start = trainer.start(sweep.trials_of(config, "timed"))
  state, frozen = start.state, trainer.frozen()
  batch = shard_batch(_random_batch(config), mesh)
  for _ in range(2):
    began = time.perf_counter()
    state, _ = jax.block_until_ready(start.step(state, frozen, batch))
  return time.perf_counter() - began


def _count(runs: Sequence[Run]) -> int:
  """Number of trials; of a run whose rate is not known yet, one."""
  return sum(max(1, len(run.trials)) for run in runs)


def _backbone(config: Config, workdir: Path, mesh: Mesh) -> Backbone:
  """Open the backbone, or one like that which will be pretrained."""
  made = Path(open_backbone.study_file(config, workdir))
  if not config.pretrain.variant or made.exists():
    if config.pretrain.variant:
      pretrain.require_made_by(config, workdir)
    return open_backbone.open_backbone(config, workdir, mesh)
  backbone = random_backbone(
    config.pretrain.variant,
    image_size=config.image_size,
    key=jax.random.key(0),
    dtype=config.dtype,
  )
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def _random_batch(config: Config) -> dict[str, np.ndarray]:
  """A batch of this process."""
  rows = config.batch_size // jax.process_count()
  shape = (rows, config.image_size, config.image_size, 3)
  images = np.random.default_rng(0).uniform(-1, 1, shape)
  labels = np.zeros(rows, np.int32)
  return {"image": images.astype(np.float32), "label": labels}
