"""One run: a backbone, a task and its data, up to what is exported."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.config import Config, to_dict
from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.sources import Source
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import REGIMES
from memory_vit.run_result import RESULT, RunResult, SweepResult, read_result
from memory_vit.runtime import files, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import Stop
from memory_vit.tasks import store
from memory_vit.training import (
  config_changes,
  consistency,
  open_backbone,
  packing,
  requirements,
  resolve,
  results,
  sweep,
  upstream,
)
from memory_vit.training.sweep import Variant
from memory_vit.training.trainer import Learned, Learner

logger = logging.getLogger("memory_vit")


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: Stop | None = None,
  may_change: Sequence[str] = (),
) -> RunResult:
  """Learns a task or a sweep, or goes on where a run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `inventory/`, `tasks/NAME/`,
  TensorBoard events and `result.json`; of a sweep `passes.json` and
  `sweep.png`, of pretraining `backbone.npz` and `backbone.json`, of the regime
  `full` the whole model as `NAME.npz`.

  Args:
    config: of the run.
    workdir: is made where it is not there.
    stop: whether a run that trains should save its state and stop.
    may_change: what may not be as it was in the run that goes on, some of
      `config_changes.CAN_CHANGE`.

  Returns:
    The numbers that `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used, and where another run is
      using `workdir`.
    Interrupted: where `stop` says so.
  """
  consistency.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  requirements.require_possible(config, workdir, mesh)
  may_change = config_changes.allowed(may_change)
  with only_run(workdir) as require_alone:
    processes.by_first(lambda: results.tidy(workdir))
    return _run(
      config, workdir, mesh, stop or Stop(), may_change, require_alone
    )


@dataclasses.dataclass(frozen=True)
class _Inputs:
  """What a run reads, opened and found to fit together.

  Attributes:
    config: with what backbone and data have settled.
    name: of the best task.
    variants: to be learned.
    learner: with the training and the validation split.
    splits: {"train": the split, ..., "upstream": ...}, those that are named.
  """

  config: Config
  name: str
  variants: list[Variant]
  learner: Learner
  splits: dict[str, Source]


def _run(
  config: Config,
  workdir: Path,
  mesh: Mesh,
  stop: Stop,
  may_change: tuple[str, ...],
  require_alone: Callable[[], None],
) -> RunResult:
  """See `train_and_evaluate`."""
  began = time.perf_counter()
  name = resolve.task_name(config)
  sweep.variants_of(config, name)  # a wrong one must not cost a backbone
  processes.require_shared(workdir)
  earlier = read_result(workdir)
  inputs = _open_inputs(config, name, workdir, mesh, stop)
  config = inputs.config
  learner = dataclasses.replace(
    inputs.learner, may_change=may_change, require_alone=require_alone
  )
  own_data = inputs.splits.get("upstream")
  before = own_data and upstream.evaluate_upstream(learner, own_data, ())
  plan = packing.plan(learner, inputs.variants, workdir)
  learned = _train(learner, inputs.variants, plan, workdir)
  tested = inputs.splits.get("test")
  ranked = results.rank(
    results.evaluate_trained(learner, inputs.variants, learned, tested),
    config,
    name,
  )
  require_alone()
  exported = results.export(config, name, ranked, workdir, learner.backbone)
  if config.regime == "full":
    model = workdir / f"{name}.npz"
    with files.writing(model):
      results.save_model(exported[0], learner.backbone, model)
  after = None
  if own_data and REGIMES[config.regime].composes:
    after = upstream.evaluate_upstream(learner, own_data, exported)
  fingerprint = learner.backbone.fingerprint
  # A run that had finished has not become faster.
  seconds = earlier and earlier.wall_seconds
  result = RunResult(
    tasks=tuple(trial.result for trial in ranked),
    backbone=upstream.compare(fingerprint, before, after),
    data=learner.record.digests,
    left_out=_left_out(inputs.splits.values()),
    wall_seconds=seconds or round(time.perf_counter() - began, 2),
    images_per_second=_speed(learned),
    config_changes=_changes(learned),
    sweep=_of_the_sweep(learned, name, plan) if config.sweep.is_on else None,
  )
  files.write_json(workdir / RESULT, result.to_json())
  if config.sweep.is_on:  # once all is safe
    _plot(result, workdir)
  return result


def _open_inputs(
  config: Config, name: str, workdir: Path, mesh: Mesh, stop: Stop
) -> _Inputs:
  """Opens the backbone and all splits: a wrong one must not cost a training."""
  backbone = open_backbone.open_backbone(config, workdir, mesh, stop)
  source = _open(config, config.data.train)
  config = resolve.with_image_size(config, backbone)
  config = resolve.with_steps(config, source.size)
  variants = sweep.variants_of(config, name)
  requirements.require_within(variants)
  requirements.require_memory(config)  # once more: image_size may have been 0
  learner = _learner(config, mesh, backbone, source)
  requirements.require_names(learner, name, variants)
  splits = {
    "train": learner.train,
    "validation": learner.validation,
    "test": _open(config, config.data.test),
    "upstream": upstream.open_upstream(config, backbone),
  }
  splits = {key: source for key, source in splits.items() if source}
  consistency.require_same_data(learner, splits)
  record = _record_of(splits, config, workdir)
  learner = dataclasses.replace(learner, stop=stop, record=record)
  return _Inputs(config, name, variants, learner, splits)


def _train(
  learner: Learner,
  variants: Sequence[Variant],
  plan: dict[str, Any],
  workdir: Path,
) -> list[Learned]:
  """Trains all passes; keeps the configuration with which they were begun."""
  file, options = workdir / "config.json", to_dict(learner.config)
  # A run that goes on has its own.
  if not (packing.has_saved(workdir) and processes.by_first(file.exists)):
    files.write_json(file, options)
  learned = packing.learn(learner, variants, plan, workdir)
  if _changes(learned):
    files.write_json(file, options)
  return learned


def _learner(
  config: Config, mesh: Mesh, backbone: Backbone, source: Source
) -> Learner:
  directories = (*config.task.attends_to, *config.task.indirect)
  return Learner(
    config=config,
    mesh=mesh,
    backbone=backbone,
    parents=tuple(store.load_task(path, backbone) for path in directories),
    train=source,
    validation=_open(config, config.data.validation),
  )


def _open(config: Config, split: str) -> Source | None:
  """A split of the task's data set; None where none is named."""
  where = config.data
  if not split:
    return None
  return datasets.open_split(
    where, split, config.stall_timeout, config.trust_data_code
  )


def _record_of(
  splits: Mapping[str, Source], config: Config, workdir: Path
) -> DataRecord:
  """The record of all data that a run is given."""
  if config.data.digest == "contents":
    logger.info("reading all bytes of the data (config.data.digest)")
  return DataRecord(
    directory=workdir / "inventory",
    by=config.data.digest,
    inventories={key: source.inventory for key, source in splits.items()},
  )


def _left_out(sources: Iterable[Source]) -> tuple[str, ...]:
  """The examples that could not be read, by any process."""
  return tuple(
    source.describe(index)
    for source in sources
    for index in datasets.left_out(source)
  )


def _changes(learned: Sequence[Learned]) -> tuple[Mapping[str, Any], ...]:
  """What changed of the configuration on the way, in any pass."""
  found = []
  for part in learned:
    found += [change for change in part.changes if change not in found]
  return tuple(found)


def _speed(learned: Sequence[Learned]) -> float:
  """Training pictures per second, over all passes and all processes."""
  seconds = sum(part.seconds for part in learned)
  examples = sum(part.examples for part in learned)
  return round(examples / seconds, 1) if seconds else 0.0


def _of_the_sweep(
  learned: Sequence[Learned], name: str, plan: dict[str, Any]
) -> SweepResult:
  """What the sweep as a whole took."""
  seconds = sum(part.seconds for part in learned)
  count = sum(len(part.best) for part in learned)
  return SweepResult(
    task=name,
    variants=count,
    passes=len(learned),
    lost={name: at for part in learned for name, at in part.lost.items()},
    training_seconds=round(seconds, 2),
    training_seconds_per_variant=round(seconds / count, 2),
    bytes_of_one=plan["bytes_of_one"],
    bytes_per_variant=plan["bytes_per_variant"],
  )


def _plot(result: RunResult, workdir: Path) -> None:
  """Draws the sweep, by one process."""
  # Here, as only a sweep needs matplotlib.
  from memory_vit import plots

  if jax.process_index() == 0:
    with files.writing(workdir / "sweep.png"):
      plots.sweep_figure(result).savefig(workdir / "sweep.png", dpi=120)
