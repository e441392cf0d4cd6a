"""The runs of a study and how long they will take, before they are run."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.sources import Source
from memory_vit.model.backbone import Backbone, random_backbone
from memory_vit.runtime import sharding
from memory_vit.runtime.sharding import shard_batch
from memory_vit.runtime.tables import table
from memory_vit.study import plan
from memory_vit.study.runs import Run, config_of
from memory_vit.training import open_backbone, progress, resolve, sweep
from memory_vit.training.sweep import Trial
from memory_vit.training.trainer import Trainer

logger = logging.getLogger("memory_vit")
_TIMED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Seconds:
  """How long a run takes, or a pass of it.

  Attributes:
    training: its steps.
    evaluation: on validation and test.
    compiling: its programs.
  """

  training: float
  evaluation: float
  compiling: float

  @property
  def total(self) -> float:
    """All of it."""
    return self.training + self.evaluation + self.compiling


def forecast(config: Config, workdir: Path, parts: Sequence[str]) -> str:
  """The plan of a study as text; trains nothing and writes nothing.

  Args:
    config: of the study.
    workdir: of the study; what is finished there takes no time.
    parts: from `runs.possible_parts`.
  """
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone = _backbone(config, workdir, mesh)
  splits = Splits.of(config)
  config = resolve.with_image_size(config, backbone)
  config = resolve.with_steps(config, splits.train.size)
  path = open_backbone.study_file(config, workdir)
  done = plan.finished_runs(config, parts, workdir, path, backbone.fingerprint)
  took: dict[tuple, float] = {}
  points = {name: ended.points for name, ended in done.items()}
  runs = plan.plan(config, parts, points)
  for run in runs:
    if run.name in done:  # the longest: one that was killed says less
      took[_kind(run)] = max(took.get(_kind(run), 0.0), done[run.name].seconds)
  timer = Timer(backbone, mesh, splits)
  rows, total = [], 0.0
  for run in runs:
    parts_of_it, how = ("",) * 3, "finished"
    seconds = 0.0
    if run.name not in done and _kind(run) in took:
      seconds, how = took[_kind(run)], "as a finished run"
    elif run.name not in done:
      found, how = timer.seconds(_any_rate(config, run, path)), "timed"
      seconds = found.total
      parts_of_it = tuple(
        progress.duration(part)
        for part in (found.training, found.evaluation, found.compiling)
      )
    total += seconds
    variants = str(max(1, len(run.variants)))
    rows.append(
      (run.name, variants, *parts_of_it, progress.duration(seconds), how)
    )
  variants = sum(int(row[1]) for row in rows)
  header = ("run", "variants", "training", "evaluation", "compiling", "total",
            "estimated")  # fmt: skip
  device = jax.devices()[0].device_kind
  return "\n".join(
    [
      *([table(header, rows), ""] if rows else []),
      f"{len(runs)} runs of {variants} variants and {config.total_steps:,} "
      f"steps for {', '.join(parts)}; about {progress.duration(total)} left on "
      f"{len(jax.devices())} x {device}.",
      "Not in it: reading pictures, where that is slower than training; "
      "further passes of a sweep that does not fit into memory at once; what "
      "the parts on costs and interference measure themselves.",
    ]
  )


def _backbone(config: Config, workdir: Path, mesh: Mesh) -> Backbone:
  """That of the study, or one like that which will be pretrained."""
  made = Path(open_backbone.study_file(config, workdir))
  if not config.pretrain.variant or made.exists():
    return open_backbone.open_backbone(config, workdir, mesh)
  backbone = random_backbone(
    config.pretrain.variant,
    image_size=config.image_size,
    key=jax.random.key(0),
    dtype=config.dtype,
  )
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def _kind(run: Run) -> tuple:
  """Runs of the same kind take about the same time."""
  return run.regime, max(1, len(run.learning_rates)), run.cells, run.data


def _any_rate(config: Config, run: Run, path: str) -> Config:
  """The configuration of a run, at whatever rate; nothing is read by it."""
  rates = run.learning_rates or config.study.learning_rates[:1]
  run = dataclasses.replace(run, learning_rates=rates, reads=None)
  return config_of(config, run, path)


@dataclasses.dataclass(frozen=True)
class Splits:
  """What of a data set decides how long runs on it take.

  Attributes:
    train: the training split.
    validation: number of its pictures.
    test: number of its pictures.
  """

  train: Source
  validation: int
  test: int

  @classmethod
  def of(cls, config: Config) -> "Splits":
    """Those of the first data set, which stands for the others."""
    where = config.data
    train, validation, test = (
      datasets.open_split(
        where, split, config.stall_timeout, config.trust_data_code
      )
      for split in (where.train, where.validation, where.test)
    )
    return cls(train, validation.size, test.size)


@dataclasses.dataclass(frozen=True)
class Timer:
  """Times steps on random pictures; nothing that is learned is kept.

  Attributes:
    backbone: of the study.
    mesh: over which batches are split.
    splits: of its first data set.
    known: {what decides how long a pass takes: how long}, found so far.
  """

  backbone: Backbone
  mesh: Mesh
  splits: Splits
  known: dict[tuple, Seconds] = dataclasses.field(default_factory=dict)

  def seconds(self, config: Config) -> Seconds:
    """How long a run takes, without reading pictures.

    Of a sweep, two small passes are timed and what one more variant takes is
    multiplied: all at once may not fit into memory.

    Args:
      config: of the run; reads no other task.
    """
    variants = sweep.trials_of(config, "timed")
    # The longest memory is what all are padded to.
    variants = sorted(variants, key=lambda v: -v.config.task.cells)
    one = self._pass(config, variants[:1])
    if len(variants) == 1:
      return one
    two, further = self._pass(config, variants[:2]), len(variants) - 1

    def of_all(first: float, both: float) -> float:
      return first + further * max(0.0, both - first)

    return Seconds(
      training=of_all(one.training, two.training),
      evaluation=of_all(one.evaluation, two.evaluation),
      # A sweep compiles for one and for two as well, to see what fits.
      compiling=of_all(one.compiling, two.compiling)
      + one.compiling
      + two.compiling,
    )

  def _pass(self, config: Config, variants: Sequence[Trial]) -> Seconds:
    cells = tuple(v.config.task.cells for v in variants)
    key = (config.regime, cells)
    if key not in self.known:
      logger.info("timing %s with %s cells", *key)
      self.known[key] = self._timed(config, variants)
    return self.known[key]

  def _timed(self, config: Config, variants: Sequence[Trial]) -> Seconds:
    """Times a step and a batch of evaluation; the first of each compiles."""
    trainer = Trainer(
      config=config,
      mesh=self.mesh,
      backbone=self.backbone,
      parents=(),
      train=self.splits.train,
      validation=None,
    )
    start = trainer.start(variants)
    frozen, state = trainer.frozen(), start.state
    batch = shard_batch(_random_batch(config, config.batch_size), self.mesh)

    def step() -> Any:
      nonlocal state
      state, metrics = start.step(state, frozen, batch)
      return state, metrics

    first, training = _first_and_further(step)
    predict = trainer.predictor(list(start.tasks.values()))
    batch_eval = config.batch_size_eval
    images = shard_batch(_random_batch(config, batch_eval), self.mesh)["image"]
    first_eval, evaluation = _first_and_further(lambda: predict(images))
    times = math.ceil(config.total_steps / config.eval_every)
    batches = times * math.ceil(self.splits.validation / batch_eval)
    batches += math.ceil(self.splits.test / batch_eval)
    return Seconds(
      training=training * config.total_steps,
      evaluation=evaluation * batches,
      compiling=first - training + first_eval - evaluation,
    )


def _first_and_further(call: Callable[[], Any]) -> tuple[float, float]:
  """Seconds that the first call takes, and each further one."""
  began = time.perf_counter()
  jax.block_until_ready(call())
  first = time.perf_counter() - began
  began = time.perf_counter()
  for _ in range(_TIMED_STEPS):
    found = call()
  jax.block_until_ready(found)
  return first, (time.perf_counter() - began) / _TIMED_STEPS


def _random_batch(config: Config, size: int) -> dict[str, np.ndarray]:
  """A batch of this process."""
  rows = size // jax.process_count()
  shape = (rows, config.image_size, config.image_size, 3)
  pictures = np.random.default_rng(0).uniform(-1, 1, shape)
  labels = np.zeros(rows, np.int32)
  return {"image": pictures.astype(np.float32), "label": labels}
