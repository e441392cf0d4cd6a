"""Run a configuration up to `result.json`: train, evaluate, export."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.config import Config, to_dict
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
from memory_vit.train.fit import fit_pack
from memory_vit.train.inputs import of_group, open_inputs
from memory_vit.train.metric_writers import History, MetricWriters
from memory_vit.train.tensorboard import TensorBoard


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: StopSignal | None = None,
  *,
  allow_changed_data: bool = False,
  splits: Mapping[str, Split] | None = None,
  backbone: Backbone | None = None,
  history: History | None = None,
) -> RunResult:
  """Train a task or a sweep, or resume the run in `workdir`.

  The run writes `config.json`, `checkpoints/`, `inventory/`, `tasks/NAME/`,
  TensorBoard events and `result.json` to `workdir`. With a test split it adds
  `hits.json` (correct test examples, see `evaluation.hits`); for a sweep,
  `sweep.png`; with `config.log_images`, `answers.png` (predictions of the best
  task) and, if the task has a token, `attention.png` (which patches its token
  attends to); in the regime `full`, the whole model as `NAME.npz`.

  Args:
    config: configuration of the run.
    workdir: directory of the run; created if it does not exist.
    stop: signal that makes the run save its state and stop training.
    allow_changed_data: whether a resumed run may use changed data. The result
      then lists the change, like changed options.
    splits: {"train": split, ...}, optionally with "validation" and "test", such
      as from `data.open_indexable`; they replace the data set of `config.data`.
    backbone: replaces the backbone that `config.backbone` names; the option is
      then only recorded.
    history: receives the metrics, in place of TensorBoard events.

  Returns:
    The content of `result.json`.

  Raises:
    MemoryVitError: for unusable input, and if another run is using `workdir`.
    Interrupted: if `stop` stopped the run.
  """
  if splits is not None:
    config = settle.with_splits(config, splits)
  settle.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  settle.require_possible(config, workdir, mesh)
  name, stop = settle.task_name(config), stop or StopSignal()
  trials = sweep.trials_of(config, name)
  logdirs = {trial.name: sweep.logdir_of(trial, workdir) for trial in trials}
  with only_run(workdir) as require_alone:
    began = time.perf_counter()
    processes.on_process_0(lambda: results.tidy(workdir))
    processes.require_shared(workdir)
    earlier = read_result(workdir)
    has_saved = passes.has_saved(workdir)
    resumes = has_saved or earlier is not None
    # Open W&B before any data is read, so that a missing login fails early.
    with (
      wandb_run.opened(config, workdir, trials, resumes) as wandb,
      MetricWriters(
        TensorBoard(logdirs) if history is None else history,
        *([wandb] if wandb else []),
      ) as writers,
    ):
      inputs = open_inputs(
        config, workdir, mesh, stop, splits=splits, backbone=backbone
      )
      config, trials = inputs.config, [*inputs.trials]
      if wandb:
        wandb.config = config
      original = upstream.evaluate_upstream(inputs)
      plan = passes.plan(inputs, workdir)
      if not (has_saved and processes.on_process_0(_file(workdir).exists)):
        files.write_json(_file(workdir), to_dict(config))

      options: dict[str, Any] = {
        "writers": writers,
        "allow_changed_data": allow_changed_data,
        "accepted": wandb.begin if wandb else lambda: None,
        "require_alone": require_alone,
      }
      if len(plan.passes) == 1:
        pack = fit_pack(
          of_group(inputs, trials),
          trials,
          workdir / "checkpoints",
          plan=plan,
          profile_dir=logdirs[trials[0].name],
          **options,
        )
        packs = [pack]
      else:
        packs = passes.fit_passes(inputs, plan, workdir, **options)
      if any(pack.changes for pack in packs):  # save the changed options
        files.write_json(_file(workdir), to_dict(config))

      trained = results.evaluate_trained(inputs, plan, packs)
      ranked = results.rank(trained, config, name)
      require_alone()
      tasks = results.export(inputs, name, ranked, workdir)
      with_tasks = upstream.evaluate_upstream(inputs, tasks)
      seconds = time.perf_counter() - began
      result = results.run_result(
        inputs,
        name,
        plan,
        packs,
        ranked,
        upstream.compare(inputs.backbone, original, with_tasks),
        # If the run had finished before this call, keep the time in `earlier`.
        earlier.wall_seconds if earlier else seconds,
      )
      require_alone()
      files.write_json(workdir / RESULT, result.to_json())
      run_pictures.show_best(
        inputs, tasks[0], ranked[0], result, workdir, writers, wandb
      )
  return result


def _file(workdir: Path) -> Path:
  """Return the path of the configuration that the run last accepted."""
  return workdir / "config.json"
