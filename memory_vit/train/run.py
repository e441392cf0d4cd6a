"""A run, from a configuration to `result.json`: train, evaluate, export."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from memory_vit.config import Config
from memory_vit.data.split import Split
from memory_vit.model.backbone import Backbone
from memory_vit.run_result import RESULT, RunResult, read_result
from memory_vit.runtime import files, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import StopSignal
from memory_vit.train import (
  passes,
  results,
  run_pictures,
  settle,
  sweep,
  upstream,
  wandb_run,
)
from memory_vit.train.open_run import open_trainer
from memory_vit.train.trainer import RunContext


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: StopSignal | None = None,
  *,
  allow_changed_data: bool = False,
  splits: Mapping[str, Split] | None = None,
  backbone: Backbone | None = None,
) -> RunResult:
  """Train a task or a sweep, or resume the run in `workdir`.

  It writes there `config.json`, `checkpoints/`, `inventory/`, `tasks/NAME/`,
  TensorBoard events and `result.json`; with a test split `hits.json` (which
  examples are right, see `evaluation.hits`); of a sweep `sweep.png`; with
  `config.log_images` `answers.png` (predictions of the best task) and, if the
  task composes, `attention.png` (which patches its token attends to); in the
  regime `full` the whole model as `NAME.npz`.

  Args:
    config: of the run.
    workdir: is made if it does not exist.
    stop: asks a run that trains to save its state and stop.
    allow_changed_data: whether a resumed run may go on with other data than it
      began with; its result records that, as changed options.
    splits: {"train": split, ...} in place of a data set that `config.data`
      names; such as from `data.open_indexable`. Optionally also "validation"
      and "test".
    backbone: in place of the one that `config.backbone` names, which is then a
      note.

  Returns:
    The content of `result.json`.

  Raises:
    MemoryVitError: for unusable input, and if another run is using `workdir`.
    Interrupted: if `stop` asked for it.
  """
  if splits is not None:
    config = settle.with_splits(config, splits)
  with _started(config, workdir, stop, allow_changed_data) as context:
    return _run(config, workdir, context, splits, backbone)


@contextlib.contextmanager
def _started(
  config: Config,
  workdir: Path,
  stop: StopSignal | None,
  allow_changed_data: bool,
) -> Iterator[RunContext]:
  """Refuse what is known to fail, and keep other runs out of `workdir`."""
  settle.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  settle.require_possible(config, workdir, mesh)
  with only_run(workdir) as require_alone:
    yield RunContext(
      mesh, stop or StopSignal(), allow_changed_data, require_alone
    )


def _run(
  config: Config,
  workdir: Path,
  context: RunContext,
  splits: Mapping[str, Split] | None = None,
  backbone: Backbone | None = None,
) -> RunResult:
  began = time.perf_counter()
  name = settle.task_name(config)
  trials = sweep.trials_of(config, name)
  processes.on_process_0(lambda: results.tidy(workdir))
  processes.require_shared(workdir)
  earlier = read_result(workdir)
  resumes = earlier is not None or passes.has_saved(workdir)
  # A missing login is refused before anything is read.
  with wandb_run.opened(config, workdir, trials, resumes) as wandb:
    trainer, trials = open_trainer(
      config, workdir, context, splits=splits, backbone=backbone, wandb=wandb
    )
    if wandb:
      wandb.config = trainer.config
    before = upstream.evaluate_upstream(trainer)
    plan = passes.plan(trainer, trials, workdir)
    packs = passes.train(trainer, trials, plan, workdir)
    trained = results.evaluate_trained(trainer, trials, packs)
    ranked = results.rank(trained, trainer.config, name)
    context.require_alone()
    tasks = results.export(trainer, name, ranked, workdir)
    after = upstream.evaluate_upstream(trainer, tasks)
    backbones = upstream.compare(trainer.backbone, before, after)
    seconds = time.perf_counter() - began
    if earlier:  # the run had finished: keep its time
      seconds = earlier.wall_seconds
    result = results.run_result(
      trainer, name, plan, packs, ranked, backbones, seconds
    )
    context.require_alone()
    files.write_json(workdir / RESULT, result.to_json())
    run_pictures.show_best(trainer, tasks[0], ranked[0], result, workdir)
  return result
