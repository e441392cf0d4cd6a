"""Learns the variants of a task in one pass, or goes on where it was left."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from memory_vit import (
  adapters,
  data,
  evaluation,
  optim,
  preprocess,
  programs,
  progress,
  sharding,
  train,
  training_pass,
  trees,
)
from memory_vit.backbone import Backbone
from memory_vit.checkpoints import Checkpoints
from memory_vit.config import Config, data_seed, to_dict
from memory_vit.errors import TrainingError
from memory_vit.regimes import REGIMES
from memory_vit.step import Step, TrainState, create_state
from memory_vit.sweep import Variant
from memory_vit.tasks import Task, require_fit

logger = logging.getLogger("memory_vit")


@dataclasses.dataclass(frozen=True)
class Learned:
  """What a pass has learned.

  Attributes:
    tasks: {variant's name: its task, as it was best on validation}. One that
      was lost before it was ever evaluated is not there.
    best: {variant's name: when that was, and how good}.
    lost: {variant's name: the step at which it was not finite}.
    examples: training pictures that were timed, and in how many seconds.
    seconds: see there.
  """

  tasks: dict[str, Task]
  best: dict[str, train.Best]
  lost: dict[str, int]
  examples: int
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """What all passes of a run share.

  Attributes:
    config: of the run.
    mesh: over which batches are split.
    backbone: frozen; on every device of the mesh.
    parents: earlier tasks that the new one reads, and that those read.
    train: the training split.
    validation: the split that chooses the best step, or None.
  """

  config: Config
  mesh: Mesh
  backbone: Backbone
  parents: tuple[Task, ...]
  train: data.Source
  validation: data.Source | None

  def learn(
    self,
    variants: Sequence[Variant],
    directory: Path,
    logdirs: Mapping[str, Path],
  ) -> Learned:
    """Trains variants side by side.

    Args:
      variants: of one pass.
      directory: of its saved states; where it holds some, the pass goes on.
      logdirs: {variant's name: of its TensorBoard events}.
    """
    config, mesh = self.config, self.mesh
    tasks = {v.name: self.new_task(v) for v in variants}
    if REGIMES[config.regime].composes:  # the others are alone in their pass
      require_fit([*self.parents, *tasks.values()])
    schedules = {
      v.name: optim.make_schedule(
        v.config.optim, v.config.learning_rate, config.total_steps
      )
      for v in variants
    }
    optimizer = optim.make_optimizer(
      {v.name: v.config.optim for v in variants}, schedules
    )
    params = {name: task.params for name, task in tasks.items()}
    state = create_state(params, optimizer, mesh)
    logger.info("\n%s", progress.parameter_overview(params, self._untouched()))

    checkpoints = Checkpoints(directory)
    meta = self._meta(variants)
    splits = {"train": self.train, "validation": self.validation}
    splits = {key: source for key, source in splits.items() if source}
    state, past = _resume(checkpoints, state, meta, splits)

    def save(state: TrainState, past: train.Past) -> None:
      bad = {
        key: sharding.known_to_any(source.left_out, source.max_bad)
        for key, source in splits.items()
      }
      _save(checkpoints, state, past, {**meta, "left_out": bad})

    def validate(params: Any) -> dict[str, dict[str, Any]]:
      trained = [
        dataclasses.replace(task, params=params[name])
        for name, task in tasks.items()
      ]
      return self.evaluate(trained, self.validation)

    state, past = train.fit(
      self.make_step(variants, tasks, optimizer),
      state,
      self._frozen(),
      self._train_batches(int(state.step) * config.batch_size),
      title=variants[0].name if len(variants) == 1 else
            f"{len(variants)} variants",
      steps=train.Steps(
        total=config.total_steps,
        log=config.log_every,
        evaluate=config.eval_every,
        checkpoint=config.checkpoint_every,
        profile_at=config.profile_at,
      ),
      batch_size=config.batch_size,
      mesh=mesh,
      schedules=schedules,
      past=past,
      validate=validate if self.validation else None,
      save=save,
      logdirs=logdirs,
    )  # fmt: skip
    checkpoints.close()
    learned = {
      name: dataclasses.replace(task, params=past.best[name].params)
      for name, task in tasks.items()
      if past.best[name].params is not None
    }
    examples = past.timed_steps * config.batch_size
    return Learned(learned, past.best, past.lost, examples, past.timed_seconds)

  def new_task(self, variant: Variant) -> Task:
    """The task of a variant, before training."""
    config = variant.config
    trained = REGIMES[config.regime].trained
    return adapters.init_task(
      jax.random.key(config.seed),
      self.backbone,
      name=variant.name,
      num_classes=self.train.num_classes,
      cells=config.task.cells if "memory" in trained else 0,
      regime=config.regime,
      bottleneck=config.task.bottleneck if "adapters" in trained else 0,
      attends_to=self._read(),
      memory_norm=config.task.memory_norm,
      memory_std=config.task.memory_std,
      cls_init=config.task.cls_init,
      class_names=self.train.class_names,
      evaluation=preprocess.evaluation_of(
        config.data.eval_crop, config.data.resize, config.image_size
      ),
    )

  def make_step(
    self,
    variants: Sequence[Variant],
    tasks: Mapping[str, Task],
    optimizer: Any,
  ) -> Step:
    """One optimiser step for the tasks of a pass."""
    specs = (t.spec for t in (*self.parents, *tasks.values()))
    return Step(
      training_pass.make_training_pass(self.backbone.config, tuple(specs)),
      optimizer,
      self.mesh,
      label_smoothing={
        v.name: v.config.optim.label_smoothing for v in variants
      },
      accumulation_steps=self.config.optim.accumulation_steps,
    )

  def pass_bytes(self, variants: Sequence[Variant]) -> int:
    """Memory that a pass takes on a device beside the backbone, as compiled."""
    tasks = {v.name: self.new_task(v) for v in variants}
    optimizer = optim.make_optimizer(
      {v.name: v.config.optim for v in variants},
      {v.name: lambda step: 0.0 for v in variants},
    )
    state = jax.eval_shape(
      lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)),
      {name: task.params for name, task in tasks.items()},
    )
    config = self.config
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    batch = {
      "image": jax.ShapeDtypeStruct(shape, jnp.float32),
      "label": jax.ShapeDtypeStruct((config.batch_size,), jnp.int32),
    }
    step = self.make_step(variants, tasks, optimizer)
    needed = step.peak_bytes(
      state.params, self._frozen(), batch, config.batch_size_eval
    )
    # State and gradient; and once more, as the update does not work in place.
    return needed + 2 * trees.bytes_of(state) + trees.bytes_of(state.params)

  def evaluate(
    self, tasks: Sequence[Task], source: data.Source
  ) -> dict[str, dict[str, Any]]:
    """Evaluates tasks on a split of their data set, in one pass."""
    composes = REGIMES[self.config.regime].composes
    predict = self._in_slots(tasks) if composes else self._alone(tasks)
    return evaluation.evaluate_source(
      predict,
      source,
      tasks[0].spec.evaluation,
      batch_size=self.config.batch_size_eval,
      mesh=self.mesh,
    )

  def _read(self) -> tuple[Task, ...]:
    """Of the parents, those that the task attends to itself."""
    return self.parents[: len(self.parents) - len(self.config.task.indirect)]

  def _in_slots(self, tasks: Sequence[Task]) -> evaluation.Predict:
    """Tasks as they are served."""
    slots = programs.fill_slots(self.backbone, [*self.parents, *tasks])

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      _, context = programs.encode(self.backbone, images)
      logits = programs.read(self.backbone, slots, context)
      return {task.spec.name: logits[task.spec.name] for task in tasks}

    return predict

  def _alone(self, tasks: Sequence[Task]) -> evaluation.Predict:
    """A task that changes what the backbone computes."""
    config, specs = self.backbone.config, tuple(task.spec for task in tasks)
    params = {task.spec.name: task.params for task in tasks}
    frozen = self._frozen()
    prepare = training_pass.make_training_pass(config, specs).prepare

    def predict(images: jax.Array) -> dict[str, jax.Array]:
      inputs = prepare(frozen, images)
      return training_pass.logits_program(
        params, frozen, inputs, config=config, specs=specs
      )

    return predict

  def _frozen(self) -> dict[str, Any]:
    return {
      "backbone": self.backbone.params,
      "tasks": {task.spec.name: task.params for task in self.parents},
    }

  def _untouched(self) -> dict[str, Any]:
    """What stays as it is: of `full`, nothing of the backbone."""
    frozen = self._frozen()
    if "backbone" in REGIMES[self.config.regime].trained:
      frozen["backbone"] = {}
    return frozen

  def _train_batches(self, start: int) -> Any:
    config = self.config
    return data.train_batches(
      self.train,
      config.data,
      image_size=config.image_size,
      batch_size=config.batch_size,
      seed=data_seed(config),
      start=start,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )

  def _meta(self, variants: Sequence[Variant]) -> dict[str, Any]:
    """What a continued pass must share with the one that was left."""
    return {
      "fingerprint": self.backbone.fingerprint,
      "parents": {task.spec.name: task.digest for task in self.parents},
      "attends_to": {p.spec.name: p.digest for p in self._read()},
      "variants": {v.name: v.label for v in variants},
      "data": {
        "classes": list(self.train.class_names),
        "train": self.train.size,
        "validation": self.validation.size if self.validation else 0,
      },
      "config": _what_matters(self.config),
    }


def _save(
  checkpoints: Checkpoints,
  state: TrainState,
  past: train.Past,
  meta: Mapping[str, Any],
) -> None:
  """Writes all that a continued pass needs."""
  best = past.best
  checkpoints.save(
    int(state.step),
    {
      "state": state,
      "best": {name: b.params for name, b in best.items() if b.step},
    },
    {
      **meta,
      "best": {name: [b.step, b.accuracy] for name, b in best.items()},
      "lost": past.lost,
      "timed": [past.timed_steps, past.timed_seconds],
    },
  )


def _resume(
  checkpoints: Checkpoints,
  state: TrainState,
  meta: Mapping[str, Any],
  splits: Mapping[str, data.Source],
) -> tuple[TrainState, train.Past | None]:
  """The newest saved state with its past, or the given one without any."""
  step = checkpoints.latest()
  if step is None:
    return state, None
  found = checkpoints.meta(step)
  _require_same(found, meta, checkpoints.directory)
  # They count as before. States of earlier versions say nothing of them.
  for key, bad in found.get("left_out", {}).items():
    reason = f"left out up to step {step}"
    splits[key].leave_out(dict.fromkeys(bad, reason))
  like = {
    "state": state,
    "best": {
      name: jax.device_get(state.params[name])
      for name, (best_step, _) in found["best"].items()
      if best_step
    },
  }
  saved = checkpoints.restore(step, like)
  best = {
    name: train.Best(best_step, accuracy, saved["best"].get(name))
    for name, (best_step, accuracy) in found["best"].items()
  }
  logger.info("going on from step %d in %s", step, checkpoints.directory)
  return saved["state"], train.Past(best, found["lost"], *found["timed"])


def _require_same(
  found: Mapping[str, Any], now: Mapping[str, Any], directory: Path
) -> None:
  """Raises unless a pass goes on with what it began with."""
  advice = "Give that one, or another --workdir."
  if found["fingerprint"] != now["fingerprint"]:
    raise TrainingError(
      f"the run in {directory} began on the backbone with fingerprint "
      f"{found['fingerprint'][:16]}, not {now['fingerprint'][:16]}. {advice}"
    )
  for key in ("config", "parents", "attends_to", "variants", "data"):
    if key not in found:
      raise TrainingError(
        f"the run in {directory} was begun by another version of memory_vit: "
        f"its states say nothing of {key!r}. Give another --workdir."
      )
    changed = [
      f"{name}: {found[key].get(name)!r}, now {now[key].get(name)!r}"
      for name in sorted(now[key].keys() | found[key].keys())
      if now[key].get(name) != found[key].get(name)
    ]
    if changed:
      raise TrainingError(
        f"the run in {directory} began with another {key}. {advice}\n  "
        + "\n  ".join(changed)
      )


# What may change between a run and its continuation without changing a result.
# Directories of earlier tasks may: their digests may not.
_MAY_CHANGE = ("backbone", "batch_size_eval", "data/cache_gib", "data/dir",
               "data/max_bad", "log_every", "profile_at", "stall_timeout",
               "sweep/export", "sweep/memory_gib",
               "task/attends_to", "task/indirect", "upstream/dir",
               "upstream/eval_crop", "upstream/name", "upstream/resize",
               "upstream/split")  # fmt: skip


def _what_matters(config: Config) -> dict[str, Any]:
  """The options that a continued run must share, as JSON gives them back."""
  flat = trees.flatten(json.loads(json.dumps(to_dict(config))))
  return {f"config.{k.replace('/', '.')}": v for k, v in flat.items()
          if k not in _MAY_CHANGE}  # fmt: skip
