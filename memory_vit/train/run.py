"""One run: a backbone, a task and its data, up to what is exported."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from PIL import Image

from memory_vit.config import Config, to_dict
from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.reader import Reader
from memory_vit.data.split_ref import SplitRef, configured_splits
from memory_vit.errors import ConfigError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.run_result import (
  RESULT,
  SWEEP,
  RunResult,
  SweepResult,
  read_result,
)
from memory_vit.runtime import files, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.messages import first_line
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import store
from memory_vit.train import (
  config_changes,
  consistency,
  given_splits,
  open_backbone,
  padded_head,
  passes,
  pretrain,
  requirements,
  resolve,
  results,
  run_pictures,
  sweep,
  upstream,
  wandb_run,
)
from memory_vit.train.events import Events
from memory_vit.train.run_context import RunContext
from memory_vit.train.sweep import Trial
from memory_vit.train.trainer import PackResult, Trainer

logger = logging.getLogger(__name__)


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: StopSignal | None = None,
  may_change: Sequence[str] = (),
  splits: Mapping[str, Reader] | None = None,
  backbone: Backbone | None = None,
) -> RunResult:
  """Learn a task or a sweep, or go on where a run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `inventory/`, `tasks/NAME/`,
  TensorBoard events, `result.json` and, of a test split, `hits.json` (which
  examples of it are right, see `evaluation.hits`); of a sweep `passes.json` and
  `sweep.png`; with `config.log_images` `answers.png` (what the best task says
  to some test images) and, of a task that composes, `attention.png` (where it
  looks); of pretraining `pretrain/`, `backbone.npz` and `backbone.json`; of the
  regime `full` the whole model as `NAME.npz`.

  Args:
    config: of the run.
    workdir: is made where it is not there.
    stop: whether a run that trains should save its state and stop.
    may_change: what may not be as it was in the run that goes on, some of
      `config_changes.ON_REQUEST`.
    splits: {"train": reader, ...} in place of a data set that `config.data`
      names; such as from `data.open_indexable`. Perhaps also "validation" and
      "test".
    backbone: in place of the one that `config.backbone` names, which is then a
      note.

  Returns:
    The numbers that `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used, and where another run is
      using `workdir`.
    Interrupted: where `stop` says so.
  """
  if backbone and config.pretrain.variant:
    raise ConfigError(
      f"config.pretrain.variant is {config.pretrain.variant!r}, but a backbone "
      "is given from Python: expected ''."
    )
  if splits is not None:
    config = given_splits.with_splits(config, splits)
  with _begun(config, workdir, stop) as context:
    context = dataclasses.replace(
      context,
      may_change=config_changes.allowed(may_change),
      splits=splits or {},
      backbone=backbone,
    )
    return _run(config, workdir, context)


def pretrain_backbone(
  config: Config, workdir: Path, stop: StopSignal | None = None
) -> Path:
  """Train the backbone of `config.pretrain` alone, for tasks of several runs.

  Args:
    config: of any of these runs.
    workdir: is made where it is not there.
    stop: see `train_and_evaluate`.

  Returns:
    WORKDIR/backbone.npz, which is made once; what was interrupted goes on.

  Raises:
    ConfigError: where `config.pretrain` asks for no backbone.
    MemoryVitError: as `train_and_evaluate`.
    Interrupted: where `stop` says so.
  """
  if not config.pretrain.variant:
    raise ConfigError(
      "config.pretrain.variant is empty, expected the backbone to be trained, "
      'such as "Micro/2"; --config=digits has one.'
    )
  with _begun(config, workdir, stop) as context:
    make_backbone(config, workdir, context)
  return workdir / "backbone.npz"


@contextlib.contextmanager
def _begun(
  config: Config, workdir: Path, stop: StopSignal | None
) -> Iterator[RunContext]:
  """Refuse what can be known to fail, and keep other runs out of `workdir`."""
  consistency.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  requirements.require_possible(config, workdir, mesh)
  with only_run(workdir) as require_alone:
    yield RunContext(mesh, stop or StopSignal(), require_alone=require_alone)


def make_backbone(config: Config, workdir: Path, context: RunContext) -> None:
  """Train WORKDIR/backbone.npz where a configuration asks for it.

  It is made once; what was interrupted goes on.

  Raises:
    TrainingError: where another configuration has made the one there.
    Interrupted: where `context.stop` says so.
  """
  context = dataclasses.replace(context, splits={})  # those of the task
  if config.pretrain.variant:
    pretrain.make_backbone(
      config, workdir, lambda made, inner: _run(made, inner, context)
    )


@dataclasses.dataclass(frozen=True)
class _Best:
  """The best trial of a run, after training; `task` is what was exported."""

  task: Task
  trained: results.TrainedTrial


@dataclasses.dataclass(frozen=True)
class _Inputs:
  """What a run reads, opened and found to fit together.

  Attributes:
    config: with what backbone and data have settled.
    name: of the best task.
    trials: to be trained.
    trainer: with the training and the validation split.
    splits: {"train": the split, ..., "upstream": ...}, those that are named.
  """

  config: Config
  name: str
  trials: list[Trial]
  trainer: Trainer
  splits: dict[str, Reader]


def _run(config: Config, workdir: Path, context: RunContext) -> RunResult:
  """See `train_and_evaluate`."""
  began = time.perf_counter()
  name = resolve.task_name(config)
  trials = sweep.trials_of(config, name)  # a wrong one must cost no backbone
  processes.on_process_0(lambda: results.tidy(workdir))
  processes.require_shared(workdir)
  earlier = read_result(workdir)
  goes_on = earlier is not None or passes.has_saved(workdir)
  # Nor may a login that is missing.
  with wandb_run.opened(config, workdir, trials, goes_on) as opened:
    make_backbone(config, workdir, context)
    inputs = _open_inputs(config, name, workdir, context)
    trainer = dataclasses.replace(inputs.trainer, wandb_run=opened)
    inputs = dataclasses.replace(inputs, trainer=trainer)
    result, best = _train_and_test(inputs, workdir, began, earlier)
    # Once all is safe.
    if inputs.config.sweep.is_on:
      _plot(result, workdir)
    _show_best(inputs, best, workdir)
  return result


def _train_and_test(
  inputs: _Inputs, workdir: Path, began: float, earlier: RunResult | None
) -> tuple[RunResult, _Best]:
  """Train what a run reads, and write all that it leaves.

  Args:
    inputs: of the run.
    workdir: of the run.
    began: when it began, by `time.perf_counter`.
    earlier: its result, where it had finished before.
  """
  config, name, trainer = inputs.config, inputs.name, inputs.trainer
  own_data = inputs.splits.get("upstream")
  before = after = None
  if own_data:
    before = upstream.evaluate_upstream(trainer, own_data, ())
  plan = passes.plan(trainer, inputs.trials, workdir)
  packs = _train(trainer, inputs.trials, plan, workdir)
  tested = inputs.splits.get("test")
  ranked = results.rank(
    results.evaluate_trained(trainer, inputs.trials, packs, tested),
    config,
    name,
  )
  trainer.context.require_alone()
  exported = results.export(trainer, name, ranked, workdir)
  if exported[0].spec.learned.holds_backbone:
    model = workdir / f"{name}.npz"
    with files.writing(model):
      results.save_model(exported[0], trainer.backbone, model)
  composing = [task for task in exported if task.spec.learned.composes]
  if own_data and composing:
    after = upstream.evaluate_upstream(trainer, own_data, composing)
  results.save_hits(ranked, workdir)
  # A run that had finished has not become faster.
  seconds = earlier and earlier.wall_seconds
  result = RunResult(
    tasks=tuple(trial.result for trial in ranked),
    backbone=upstream.compare(trainer.backbone, before, after),
    data=trainer.record.digests,
    left_out=_left_out(inputs.splits.values()),
    wall_seconds=seconds or round(time.perf_counter() - began, 2),
    images_per_second=_speed(packs),
    config_changes=_changes(packs),
    sweep=_of_the_sweep(packs, name, plan) if config.sweep.is_on else None,
  )
  files.write_json(workdir / RESULT, result.to_json())
  return result, _Best(exported[0], ranked[0])


def _show_best(inputs: _Inputs, best: _Best, workdir: Path) -> None:
  """Write the best trial's pictures and results for TensorBoard and W&B.

  The run has finished: what cannot be written is left out, with a warning.
  """
  trainer, trained = inputs.trainer, best.trained
  trial = trained.trial
  try:
    if jax.process_index() == 0:  # one of an earlier result, if any
      for name in run_pictures.FILES.values():
        (workdir / name).unlink(missing_ok=True)
    if trainer.config.log_images:
      _draw(trainer, best, workdir)
  except Exception as error:  # of a full disk, of what TensorBoard says
    logger.warning(
      "pictures cannot be written (%s: %s)", type(error).__name__,
      first_line(error),
    )  # fmt: skip
  if trainer.wandb_run:
    trainer.wandb_run.summarize(
      {
        "best/trial": trial.name,
        "best/varied": trial.label or None,
        "best/step": trained.result.best_step,
        "best/validation_top1": trained.result.val_accuracy,
        "best/test_top1": trained.result.test_accuracy,
      }
    )


def _draw(trainer: Trainer, best: _Best, workdir: Path) -> None:
  """Write the best trial's pictures."""
  trained = best.trained
  name, steps = trained.trial.name, trained.result.steps
  pictures = run_pictures.pictures_of(trainer, best.task, trained.predictions)
  logdirs = passes.logdirs_of([trained.trial], workdir)
  with Events(logdirs, trainer.wandb_run) as events:
    events.write_images(steps, {name: pictures})
  if jax.process_index() == 0:
    _save(pictures, workdir)


def _save(pictures: run_pictures.Pictures, workdir: Path) -> None:
  """Write those pictures that are files of a run, if they were drawn."""
  for tag, name in run_pictures.FILES.items():
    file = workdir / name
    if tag in pictures:
      with files.writing(file), files.replacing(file) as part:
        Image.fromarray(pictures[tag]).save(part, format="PNG")


def open_trainer(
  config: Config, workdir: Path, context: RunContext
) -> tuple[Trainer, list[Trial]]:
  """Open backbone and data of a run, and name its trials; nothing is written.

  Raises:
    MemoryVitError: for what cannot be used, or does not fit together.
  """
  name = resolve.task_name(config)
  inputs = _open_inputs(config, name, workdir, context)
  return inputs.trainer, inputs.trials


def _open_inputs(
  config: Config, name: str, workdir: Path, context: RunContext
) -> _Inputs:
  """Open the backbone and all splits: a wrong one must not cost a training."""
  backbone = open_backbone.open_backbone(
    config, workdir, context.mesh, context.backbone
  )
  train = _open_split(configured_splits(config)["train"], "train", context)
  requirements.require_classes(train)
  config = resolve.with_embeddings(config, train)
  config = resolve.with_backbone(config, backbone)
  config = resolve.with_steps(config, train.size)
  padded_head.require_width(config.task.padded_classes, train.num_classes)
  trials = sweep.trials_of(config, name)
  requirements.require_within(trials)
  requirements.require_memory(config)  # once more: image_size may have been 0
  trainer = _trainer(config, context, backbone, train)
  requirements.require_names(trainer, name)
  named = {
    "train": trainer.train,
    "validation": trainer.validation,
    "test": trainer.test,
    "upstream": upstream.open_upstream(config, backbone),
  }
  splits = {key: reader for key, reader in named.items() if reader}
  for reader in splits.values():
    requirements.require_embeddings_of(backbone, config, reader)
    requirements.require_prepared_alike(train, reader)
  for line in dict.fromkeys(
    line for reader in splits.values() for line in reader.source.skipped
  ):
    logger.info(line)
  consistency.require_same_data(trainer, splits)
  record = _record_of(splits, config, workdir)
  trainer = dataclasses.replace(trainer, record=record)
  return _Inputs(config, name, trials, trainer, splits)


def _train(
  trainer: Trainer,
  trials: Sequence[Trial],
  plan: dict[str, Any],
  workdir: Path,
) -> list[PackResult]:
  """Train all packs; keep the configuration with which they were begun."""
  file, options = workdir / "config.json", to_dict(trainer.config)
  # A run that goes on has its own.
  if not (passes.has_saved(workdir) and processes.on_process_0(file.exists)):
    files.write_json(file, options)
  packs = passes.train(trainer, trials, plan, workdir)
  if _changes(packs):
    files.write_json(file, options)
  return packs


def _trainer(
  config: Config, context: RunContext, backbone: Backbone, train: Reader
) -> Trainer:
  attends_to, ancestors = requirements.parent_directories(config)
  return Trainer(
    config=config,
    context=context,
    backbone=backbone,
    attends_to=tuple(store.load_task(path, backbone) for path in attends_to),
    ancestors=tuple(store.load_task(path, backbone) for path in ancestors),
    train=train,
    validation=_open(config, "validation", context),
    test=_open(config, "test", context),
  )


def _open(config: Config, role: str, context: RunContext) -> Reader | None:
  """Open the split of a role; None where the configuration names none."""
  ref = configured_splits(config).get(role)
  return _open_split(ref, role, context) if ref else None


def _open_split(ref: SplitRef, role: str, context: RunContext) -> Reader:
  """Open a split, unless it is given."""
  if role in context.splits:
    return datasets.read_as(ref, context.splits[role].source)
  return datasets.open_on_all_processes(ref)


def _record_of(
  splits: Mapping[str, Reader], config: Config, workdir: Path
) -> DataRecord:
  """The record of all data that a run is given."""
  if config.data.digest == "contents":
    logger.info("reading all bytes of the data (config.data.digest)")
  return DataRecord(
    directory=workdir / "inventory",
    by=config.data.digest,
    inventories={key: r.source.inventory for key, r in splits.items()},
  )


def _left_out(readers: Iterable[Reader]) -> tuple[str, ...]:
  """Name what some process could not read, or has no embedding.

  All must call.
  """
  readers = list(readers)
  unreadable = [
    reader.source.describe(index)
    for reader in readers
    for index in reader.sync_unreadable()
  ]
  # Slices may overlap, or be the same.
  others = [line for reader in readers for line in reader.source.left_out]
  return (*unreadable, *dict.fromkeys(others))


def _changes(packs: Sequence[PackResult]) -> tuple[Mapping[str, Any], ...]:
  """What changed of the configuration on the way, in any pack."""
  found = []
  for pack in packs:
    found += [change for change in pack.changes if change not in found]
  return tuple(found)


def _speed(packs: Sequence[PackResult]) -> float:
  """Training images per second, over all packs and all processes."""
  seconds = sum(pack.seconds for pack in packs)
  examples = sum(pack.examples for pack in packs)
  return round(examples / seconds, 1) if seconds else 0.0


def _of_the_sweep(
  packs: Sequence[PackResult], name: str, plan: dict[str, Any]
) -> SweepResult:
  """What the sweep as a whole took."""
  seconds = sum(pack.seconds for pack in packs)
  count = sum(len(pack.best) for pack in packs)
  return SweepResult(
    task=name,
    variants=count,
    passes=len(packs),
    lost={name: at for pack in packs for name, at in pack.lost.items()},
    training_seconds=round(seconds, 2),
    training_seconds_per_variant=round(seconds / count, 2),
    bytes_of_one=plan["bytes_of_one"],
    bytes_per_variant=plan["bytes_per_variant"],
  )


def _plot(result: RunResult, workdir: Path) -> None:
  """Draw the sweep, by one process."""
  # Here, as only a sweep needs matplotlib.
  from memory_vit import plots

  if jax.process_index() == 0:
    with files.writing(workdir / SWEEP):
      plots.sweep_figure(result).savefig(workdir / SWEEP, dpi=120)
