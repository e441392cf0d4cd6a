"""The runs of a study and how long they will take, before they are run."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit import data, measured, optim, progress, sharding, study, sweep
from memory_vit.backbone import Backbone, random_backbone
from memory_vit.config import Config
from memory_vit.learn import Learner
from memory_vit.pretrained import load_backbone
from memory_vit.step import create_state
from memory_vit.study import Run
from memory_vit.tables import table

logger = logging.getLogger("memory_vit")
_TIMED_STEPS = 2


def forecast(config: Config, workdir: Path, parts: Sequence[str]) -> str:
  """The plan of a study as text; trains nothing.

  Args:
    config: of the study.
    workdir: of the study; what is finished there takes no time.
    parts: from `study.possible_parts`.
  """
  runs = study.plan(config, parts)
  configs, speeds = _look(config, workdir, runs)
  timer = None
  rows, total = [], 0.0
  for run in runs:
    if run.name not in configs:
      seconds, how = 0.0, "finished"
    elif _kind(run) in speeds:
      pictures = config.total_steps * config.batch_size
      seconds, how = pictures / speeds[_kind(run)], "as a finished run"
    else:
      timer = timer or _timer(config, workdir)
      seconds, how = timer.seconds(configs[run.name]), "from timed steps"
    total += seconds
    variants = str(len(run.variants))
    took = progress.duration(seconds)
    rows.append((run.name, variants, f"{config.total_steps:,}", took, how))
  variants = sum(len(run.variants) for run in runs)
  header = ("run", "variants", "steps", "time", "estimated")
  device = jax.devices()[0].device_kind
  return "\n".join(
    [
      *([table(header, rows), ""] if rows else []),
      f"{len(runs)} runs of {variants} variants for {', '.join(parts)}; about "
      f"{progress.duration(total)} of training left on {len(jax.devices())} x "
      f"{device}.",
      "Not in it: evaluation, compiling, reading pictures, and further passes "
      "of a sweep that does not fit into memory at once.",
    ]
  )


def _look(
  config: Config, workdir: Path, runs: Sequence[Run]
) -> tuple[dict[str, Config], dict[tuple, float]]:
  """What is there already.

  Returns:
    {name: configuration} of the runs that are not finished; and {kind: training
    pictures a second} of those that are.
  """
  backbone, left, speeds = _path(config, workdir), {}, {}
  points: dict[str, list[measured.Point]] = {}
  for run in runs:
    reads = []
    if run.reads and run.reads.name in points:
      reads = measured.read_by(run, points, config.task.cells) or []
    its_config = study.config_of(config, run, backbone, reads)
    directory = workdir / "runs" / run.name
    result = measured.finished_result(its_config, directory)
    if result is None:
      left[run.name] = its_config
      continue
    points[run.name] = measured.points_of(run, result, directory)
    if result.get("images_per_second"):
      speeds[_kind(run)] = result["images_per_second"]
  return left, speeds


def _kind(run: Run) -> tuple:
  """Runs of the same kind take about the same time."""
  return run.regime, len(run.learning_rates), run.cells


def _path(config: Config, workdir: Path) -> str:
  """Where the backbone is, or will be once it was pretrained."""
  made = workdir / "backbone.npz"
  return str(made) if config.pretrain.variant else config.backbone


def _timer(config: Config, workdir: Path) -> "Timer":
  """A timer on the backbone, or on one like that which will be made."""
  mesh, path = sharding.make_mesh(), _path(config, workdir)
  if config.pretrain.variant:
    backbone = random_backbone(
      config.pretrain.variant,
      image_size=config.image_size,
      key=jax.random.key(0),
      dtype=config.dtype,
    )
  else:
    backbone = load_backbone(
      path, image_size=config.image_size, dtype=config.dtype, gelu=config.gelu
    )
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  where = config.data
  return Timer(
    dataclasses.replace(backbone, params=params),
    mesh,
    data.open_source(
      where.name,
      where.train,
      where.dir,
      where.cache_gib,
      max_bad=where.max_bad,
      stall_timeout=config.stall_timeout,
    ),
  )


@dataclasses.dataclass(frozen=True)
class Timer:
  """Times steps on random pictures; nothing that is learned is kept.

  Attributes:
    backbone: of the study.
    mesh: over which batches are split.
    train: the training split of its first data set.
    known: {what decides how long a step takes: seconds}, found so far.
  """

  backbone: Backbone
  mesh: Mesh
  train: data.Source
  known: dict[tuple, float] = dataclasses.field(default_factory=dict)

  def seconds(self, config: Config) -> float:
    """Of all steps of a run, without evaluation and reading of pictures.

    Of a sweep, two small passes are timed and what one more variant takes is
    multiplied: all at once may not fit into memory.

    Args:
      config: of the run.
    """
    config = dataclasses.replace(
      config,
      task=dataclasses.replace(config.task, attends_to=()),
    )
    variants = sweep.variants_of(config, "timed")
    # The longest memory is what all are padded to.
    variants = sorted(variants, key=lambda v: -v.config.task.cells)
    one = self._step_seconds(config, variants[:1])
    if len(variants) == 1:
      return one * config.total_steps
    further = max(0.0, self._step_seconds(config, variants[:2]) - one)
    return (one + (len(variants) - 1) * further) * config.total_steps

  def _step_seconds(self, config: Config, variants: Any) -> float:
    cells = tuple(v.config.task.cells for v in variants)
    key = (config.regime, cells)
    if key not in self.known:
      logger.info("timing steps of %s with %s cells", *key)
      self.known[key] = self._timed(config, variants)
    return self.known[key]

  def _timed(self, config: Config, variants: Any) -> float:
    """Seconds of a step, the first ones left out: they compile."""
    learner = Learner(
      config=config,
      mesh=self.mesh,
      backbone=self.backbone,
      parents=(),
      train=self.train,
      validation=None,
    )
    tasks = {v.name: learner.new_task(v) for v in variants}
    schedules = {
      v.name: optim.make_schedule(v.config.optim, v.config.learning_rate, 1)
      for v in variants
    }
    optimizer = optim.make_optimizer(
      {v.name: v.config.optim for v in variants}, schedules
    )
    step = learner.make_step(variants, tasks, optimizer)
    params = {name: task.params for name, task in tasks.items()}
    state = create_state(params, optimizer, self.mesh)
    batch = sharding.shard_batch(_random_batch(config), self.mesh)
    frozen = {"backbone": self.backbone.params, "tasks": {}}
    state, _ = step(state, frozen, batch)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(_TIMED_STEPS):
      state, _ = step(state, frozen, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / _TIMED_STEPS


def _random_batch(config: Config) -> dict[str, np.ndarray]:
  """A batch of this process."""
  rows = config.batch_size // jax.process_count()
  shape = (rows, config.image_size, config.image_size, 3)
  pictures = np.random.default_rng(0).uniform(-1, 1, shape)
  labels = np.zeros(rows, np.int32)
  return {"image": pictures.astype(np.float32), "label": labels}
