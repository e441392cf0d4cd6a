"""One run: a backbone, a task and its data, up to the exported task."""

import dataclasses
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit import (
  adapters,
  data,
  evaluate,
  optim,
  preprocess,
  programs,
  progress,
  regimes,
  sharding,
  train,
  trees,
)
from memory_vit.backbone import Backbone
from memory_vit.checkpoints import Checkpoints
from memory_vit.config import Config, DataConfig, to_dict
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.pretrain import pretrain
from memory_vit.pretrained import load_backbone, save_backbone
from memory_vit.step import Step, TrainState, create_state
from memory_vit.tasks import BACKBONE, EvalPreprocessing, Task

logger = logging.getLogger("memory_vit")


def train_and_evaluate(config: Config, workdir: Path) -> dict[str, Any]:
  """Learns one task, or goes on where an earlier run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `tasks/NAME/`, TensorBoard events
  and `result.json`.

  Args:
    config: of the run.
    workdir: is made where it is not there.

  Returns:
    What `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used.
  """
  began = time.perf_counter()
  if "://" in str(workdir) or ":/" in str(workdir):
    raise ConfigError(f"--workdir is {workdir}, expected a local directory.")
  mesh = sharding.make_mesh()
  for key in ("batch_size", "batch_size_eval"):
    sharding.require_divisible(getattr(config, key), mesh, f"config.{key}")
  sharding.require_divisible(
    config.batch_size // config.optim.accumulation_steps,
    mesh,
    "config.batch_size / config.optim.accumulation_steps",
  )
  workdir.mkdir(parents=True, exist_ok=True)

  run = _Run(config, workdir, mesh, _backbone(config, workdir, mesh))
  upstream = run.open_upstream()
  before = upstream and run.evaluate_upstream(upstream, [])
  task, speed = run.learn()
  path = workdir / "tasks" / task.spec.name
  adapters.save_task(task, path)
  # The task is read back as everybody else will read it.
  task = adapters.load_task(path, run.backbone)
  tasks = [*run.parents(), task]
  after = upstream and run.evaluate_upstream(upstream, tasks)

  result = {
    "tasks": [task.provenance["metrics"]],
    "backbone": {
      "fingerprint": run.backbone.fingerprint,
      "accuracy_before": before and before["top1"],
      "accuracy_after": after and after["top1"],
      "outputs_bit_equal": before and before["digest"] == after["digest"],
    },
    "wall_seconds": round(time.perf_counter() - began, 2),
    "images_per_second": round(speed, 1),
  }
  _write_json(workdir / "result.json", result)
  return result


def _backbone(config: Config, workdir: Path, mesh: Mesh) -> Backbone:
  """Loads the backbone, or makes it first, and puts it on every device."""
  path = config.backbone
  if config.pretrain.variant:
    path = str(workdir / "backbone.npz")
    if not Path(path).exists():
      save_backbone(pretrain(config, mesh), path)
  backbone = load_backbone(
    path, image_size=config.image_size, dtype=config.dtype, gelu=config.gelu
  )
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, config.image_size, backbone.fingerprint[:16],
  )  # fmt: skip
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  return dataclasses.replace(backbone, params=params)


@dataclasses.dataclass(frozen=True)
class _Run:
  """What all parts of a run need."""

  config: Config
  workdir: Path
  mesh: Mesh
  backbone: Backbone

  def parents(self) -> list[Task]:
    """The earlier tasks that the new one reads."""
    directories = self.config.task.attends_to
    return [adapters.load_task(path, self.backbone) for path in directories]

  def learn(self) -> tuple[Task, float]:
    """Trains the task.

    Returns:
      The task as it was best on validation, with its metrics, and the training
      pictures per second.
    """
    config, mesh = self.config, self.mesh
    # All splits first: a wrong name must not cost a training run.
    source = self._open(config.data.train)
    held_out = config.data.validation and self._open(config.data.validation)
    tested = config.data.test and self._open(config.data.test)
    parents = self.parents()
    task = self._new_task(source, parents)
    name = task.spec.name
    frozen = {
      "backbone": self.backbone.params,
      "tasks": {parent.spec.name: parent.params for parent in parents},
    }
    overview = progress.parameter_overview({name: task.params}, frozen)
    logger.info("\n%s", overview)

    schedule = optim.make_schedule(
      config.optim, config.learning_rate, config.total_steps
    )
    optimizer = optim.make_optimizer(config.optim, {name: schedule})
    specs = (*(parent.spec for parent in parents), task.spec)
    step_fn = Step(
      regimes.memory_masked(self.backbone.config, specs),
      optimizer,
      mesh,
      label_smoothing=config.optim.label_smoothing,
      accumulation_steps=config.optim.accumulation_steps,
    )
    state = create_state({name: task.params}, optimizer, mesh)
    checkpoints = Checkpoints(self.workdir / "checkpoints")
    state, examples_seen = self._resume(checkpoints, state)
    _write_json(self.workdir / "config.json", to_dict(config))

    def validate(params: Any) -> dict[str, dict[str, Any]]:
      trained = dataclasses.replace(task, params=params[name])
      return self._evaluate(trained, parents, held_out)

    state, speed = train.fit(
      step_fn,
      state,
      frozen,
      self._train_batches(source, examples_seen),
      name=name,
      steps=train.Steps(
        total=config.total_steps,
        log=config.log_every,
        evaluate=config.eval_every,
        checkpoint=config.checkpoint_every,
        profile_at=config.profile_at,
      ),
      batch_size=config.batch_size,
      mesh=mesh,
      schedules={name: schedule},
      validate=validate if held_out else None,
      checkpoints=checkpoints,
      meta={
        "fingerprint": self.backbone.fingerprint,
        "config": _what_matters(config),
      },
      logdir=self.workdir,
    )
    best = checkpoints.best()
    if best is not None:
      state = checkpoints.restore(best, state)
    accuracy = None if best is None else checkpoints.metric(best)
    checkpoints.close()
    task = dataclasses.replace(task, params=jax.device_get(state.params[name]))
    task = self._with_metrics(
      task, parents, int(state.step), accuracy, tested or None
    )
    return task, speed

  def _new_task(self, source: data.Source, parents: list[Task]) -> Task:
    """The task before training."""
    config = self.config
    return adapters.init_task(
      jax.random.key(config.seed),
      self.backbone,
      name=config.task.name or _name_of(config.data),
      num_classes=source.num_classes,
      cells=config.task.cells,
      attends_to=[parent.spec.name for parent in parents],
      memory_norm=config.task.memory_norm,
      cls_init=config.task.cls_init,
      class_names=source.class_names,
      evaluation=self._evaluation(),
    )

  def _resume(
    self, checkpoints: Checkpoints, state: TrainState
  ) -> tuple[TrainState, int]:
    """The newest saved state or the given one, and the examples it has seen."""
    step = checkpoints.latest()
    if step is None:
      return state, 0
    meta = checkpoints.meta(step)
    if meta["fingerprint"] != self.backbone.fingerprint:
      raise TrainingError(
        f"the run in {self.workdir} began on the backbone with fingerprint "
        f"{meta['fingerprint'][:16]}, not {self.backbone.fingerprint[:16]}. "
        "Use that backbone, or another --workdir."
      )
    now = _what_matters(self.config)
    changed = [
      f"config.{key}: {meta['config'].get(key)!r}, now {now.get(key)!r}"
      for key in sorted(now.keys() | meta["config"].keys())
      if now.get(key) != meta["config"].get(key)
    ]
    if changed:
      raise TrainingError(
        f"the run in {self.workdir} began with another configuration. Give "
        "that one, or another --workdir:\n  " + "\n  ".join(changed)
      )
    logger.info("going on from step %d in %s", step, self.workdir)
    return checkpoints.restore(step, state), meta["examples_seen"]

  def _evaluation(self) -> EvalPreprocessing:
    return preprocess.evaluation_of(self.config.data, self.config.image_size)

  def _open(self, split: str) -> data.Source:
    where = self.config.data
    return data.open_source(where.name, split, where.dir, where.cache_gib)

  def _train_batches(self, source: data.Source, start: int) -> Any:
    return data.train_batches(
      source,
      self.config.data,
      image_size=self.config.image_size,
      batch_size=self.config.batch_size,
      seed=self.config.seed,
      start=start,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )

  def _eval_batches(self, source: data.Source) -> Any:
    return data.eval_batches(
      source,
      self._evaluation(),
      batch_size=self.config.batch_size_eval,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )

  def _evaluate(
    self, task: Task, parents: list[Task], source: data.Source
  ) -> dict[str, dict[str, Any]]:
    """Evaluates a task on a split of its data set."""
    tasks, name = [*parents, task], task.spec.name

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      return {name: programs.forward(self.backbone, tasks, images)[name]}

    return evaluate.evaluate(predict, self._eval_batches(source), self.mesh)

  def _with_metrics(
    self,
    task: Task,
    parents: list[Task],
    steps: int,
    val_accuracy: float | None,
    tested: data.Source | None,
  ) -> Task:
    """Evaluates a trained task on the test split, and notes how it was made."""
    config, spec = self.config, task.spec
    metrics = {
      "name": spec.name,
      "regime": config.regime,
      "cells": spec.cells,
      "learning_rate": config.learning_rate,
      "seed": config.seed,
      "steps": steps,
      "trainable_params": trees.count(task.params),
      "val_accuracy": val_accuracy,
      "test_accuracy": None,
      "test_examples": 0,
    }
    if tested:
      test = self._evaluate(task, parents, tested)[spec.name]
      metrics |= {
        "test_accuracy": test["top1"],
        "test_examples": test["examples"],
        "test_loss": test["loss"],
        "test_top5": test["top5"],
        "test_per_class": test["per_class"],
      }
    made = {"config": to_dict(config), "metrics": metrics}
    return dataclasses.replace(task, provenance=made)

  def open_upstream(self) -> data.Source | None:
    """The data of the backbone's own task; None where none is configured."""
    where = self.config.upstream
    if not where.name:
      return None
    source = data.open_source(
      where.name, where.split, where.dir, self.config.data.cache_gib
    )
    outputs = self.backbone.config.num_classes
    if source.num_classes > outputs:
      raise ConfigError(
        f"config.upstream: {where.name} has {source.num_classes} classes, the "
        f"head of the backbone has {outputs}."
      )
    return source

  def evaluate_upstream(
    self, source: data.Source, tasks: list[Task]
  ) -> dict[str, Any]:
    """Evaluates the original outputs, with tasks in the same pass."""

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      logits = programs.forward(self.backbone, tasks, images)
      return {BACKBONE: logits[BACKBONE]}

    batches = self._eval_batches(source)
    return evaluate.evaluate(predict, batches, self.mesh)[BACKBONE]


# What may change between a run and its continuation without changing a result.
_MAY_CHANGE = ("backbone", "batch_size_eval", "data/cache_gib", "data/dir",
               "log_every", "profile_at", "upstream/dir",
               "upstream/name", "upstream/split")  # fmt: skip


def _what_matters(config: Config) -> dict[str, Any]:
  """The options that a continued run must share, as JSON gives them back."""
  flat = trees.flatten(json.loads(json.dumps(to_dict(config))))
  return {key: v for key, v in flat.items() if key not in _MAY_CHANGE}


def _name_of(config: DataConfig) -> str:
  """A task's name after its data: "sun397/tfds" -> "sun397"."""
  name = Path(config.dir).name if config.name == "folder" else config.name
  name = re.sub(r"[^a-z0-9_-]+", "-", name.split("/")[0].lower())
  return name.strip("-_")


def _write_json(path: Path, values: Any) -> None:
  """Writes a file that is whole or not there, by one process."""
  if jax.process_index() != 0:
    return
  scratch = path.with_suffix(".tmp")
  scratch.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
  os.replace(scratch, path)
