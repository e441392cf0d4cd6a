"""What all packs of a run share: configuration, data, backbone, cache."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config, data_seed, to_dict
from memory_vit.data import batching, image_ops
from memory_vit.data.data_record import DataRecord
from memory_vit.data.decoded_images import cache_decoded
from memory_vit.data.split import Split
from memory_vit.data.subset import class_counts
from memory_vit.evaluation import evaluate as evaluation
from memory_vit.evaluation.evaluate import Predict, evaluate_source
from memory_vit.frozen.cache import FrozenCache
from memory_vit.frozen.plan import Prepare
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.kinds.kind import HeadOutputs
from memory_vit.kinds.scores import Also, Evaluation
from memory_vit.model.backbone import Backbone, rounded
from memory_vit.model.task import EvalPreprocessing, Task
from memory_vit.runtime import processes, sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import create, split_forward
from memory_vit.train import padded_head, resume, sweep
from memory_vit.train.loss import HeadLoss
from memory_vit.train.mix import Mixup
from memory_vit.train.step import Step, StepPlan, shared_step
from memory_vit.train.sweep import Trial
from memory_vit.train.wandb_run import WandbRun


@dataclasses.dataclass(frozen=True)
class RunContext:
  """Devices, stop signal and lock of a run."""

  mesh: Mesh
  # Asked after every step, and in every batch of an evaluation.
  stop: StopSignal = dataclasses.field(default_factory=StopSignal)
  # Whether a resumed run may go on with other data than it began with.
  allow_changed_data: bool = False
  # Raises if another run may be using the directory; all processes call it
  # before a state is saved.
  require_alone: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """What all packs of a run share."""

  config: Config
  context: RunContext
  backbone: Backbone  # on the devices of the mesh
  train: Split
  task_kind: TaskKind = CLASSES  # without thresholds
  validation: Split | None = None
  test: Split | None = None
  upstream: Split | None = None
  attends_to: tuple[Task, ...] = ()
  # Tasks that those of `attends_to` attend to, and the new one does not.
  ancestors: tuple[Task, ...] = ()
  record: DataRecord = dataclasses.field(default_factory=DataRecord)
  wandb_run: WandbRun | None = None

  @property
  def parents(self) -> tuple[Task, ...]:
    """All earlier tasks that run beside the new one."""
    return (*self.attends_to, *self.ancestors)

  @property
  def preprocessing(self) -> EvalPreprocessing:
    """How images of the task are prepared for evaluation."""
    data, embedded = self.config.data, self.train.embedded
    if embedded:
      return embedded.origin.preprocessing
    return image_ops.preprocessing_of(
      data.eval_crop,
      data.resize,
      self.config.image_size,
      self.backbone.preprocessing,
    )

  def for_group(self, trials: Sequence[Trial]) -> "Trainer":
    """The same for trials of one group, see `sweep.by_pass_group`."""
    one, config = trials[0].config, self.config
    if (
      sweep.pass_group(one) == sweep.pass_group(config)
      and one.keep == config.keep
    ):
      return self
    config = dataclasses.replace(config, regime=one.regime, keep=one.keep)
    return dataclasses.replace(self, config=config)

  @property
  def splits(self) -> dict[str, Split]:
    """{"train": the split, ..., "upstream": ...}, without absent ones."""
    named = {
      "train": self.train,
      "validation": self.validation,
      "test": self.test,
      "upstream": self.upstream,
    }
    return {key: split for key, split in named.items() if split}

  def new_task(self, trial: Trial) -> Task:
    """The task of a trial, before training."""
    config = trial.config
    regime, options = config.learned, config.task
    padded = self._padded_classes
    return create.init_task(
      jax.random.key(config.seed),
      self.backbone,
      name=trial.name,
      num_classes=padded or self.train.num_classes,
      # Outputs of a padded head get their names and kind after training.
      kind=CLASSES if padded else self.task_kind,
      regime=config.regime,
      **{field: getattr(options, field) for field in regime.fields},
      attends_to=self.attends_to,
      memory_norm=options.memory_norm,
      memory_std=options.memory_std,
      cls_init=options.cls_init,
      class_names=() if padded else self.train.class_names,
      preprocessing=self.preprocessing,
    )

  def make_step(
    self, trials: Sequence[Trial], tasks: Mapping[str, Task]
  ) -> Step:
    """One optimizer step for a pack; shared, see `shared_step`."""
    optim_config = self.config.optim
    mixup = None
    if optim_config.mixup:
      mixup = Mixup(optim_config.mixup, data_seed(self.config))
    specs = (t.spec for t in (*self.parents, *tasks.values()))
    return shared_step(
      StepPlan(
        backbone=self.backbone.config,
        specs=tuple(spec.for_programs for spec in specs),
        optimizers=tuple(
          (t.name, t.config.optim, t.config.learning_rate) for t in trials
        ),
        losses=tuple((t.name, HeadLoss.of(t.config)) for t in trials),
        total_steps=self.config.total_steps,
        mixup=mixup,
        accumulation_steps=optim_config.accumulation_steps,
        mesh=self.context.mesh,
      )
    )

  def evaluate(
    self,
    tasks: Sequence[Task],
    source: Split,
    cached: Iterable[dict[str, Any]] | None = None,
    *,
    also: Collection[Also] = (),
    predictions_of: str | None = None,
  ) -> dict[str, Evaluation]:
    """Evaluate tasks that train side by side on a split, in one pass.

    `cached` are batches of the split whose frozen part is cached; for the other
    arguments and the result see `evaluate_source`.
    """
    if cached is None and self.cache and source.embedded:
      cached = self.cache.eval_batches(source, self._prepare(tasks), "test")
    outputs = self.predictor(tasks, cached=cached is not None)

    def predict(inputs: Any) -> dict[str, jax.Array]:
      self.context.stop.check()
      return outputs(inputs)

    return evaluate_source(
      predict,
      source,
      tasks[0].spec.preprocessing,
      batch_size=self.config.batch_size_eval,
      mesh=self.context.mesh,
      kinds={
        task.name: task.spec.kind if task.spec.class_names else self.task_kind
        for task in tasks
      },
      also=also,
      batches=cached,
      predictions_of=predictions_of,
    )

  def predictor(
    self, tasks: Sequence[Task], *, cached: bool = False
  ) -> Predict:
    predict = evaluation.predict_fn(
      self.frozen_backbone,
      [*self.parents, *tasks],
      self.context.mesh,
      outputs=[task.name for task in tasks],
      classes=self._padded_classes,
      cached=cached,
    )
    if not self._padded_classes:
      return predict
    return padded_head.of_classes(predict, self.train.num_classes)

  @functools.cached_property
  def cache(self) -> FrozenCache | None:
    """The cache of the frozen pass for all packs; None if it is off."""
    if self.config.keep.what not in ("contexts", "features"):
      return None
    return FrozenCache(
      config=self.config,
      backbone=self.backbone,
      preprocessing=self.preprocessing,
      record=self.record,
      mesh=self.context.mesh,
      stop=self.context.stop,
    )

  @property
  def cached_splits(self) -> dict[str, Split]:
    cached = {"train", "validation"}
    if self.train.embedded:  # without images nothing can be computed
      cached.add("test")
    return {key: r for key, r in self.splits.items() if key in cached}

  def _prepare(self, tasks: Sequence[Task]) -> Prepare:
    """`frozen_pass` without a step."""
    specs = tuple(task.spec for task in (*self.parents, *tasks))
    split = split_forward.make_split_forward(self.backbone.config, specs)
    return functools.partial(split.prepare, self.frozen())

  @functools.cached_property
  def _training_images(self) -> Split:
    """The training split; decoded in memory for `keep.what` "images"."""
    if self.config.keep.what != "images":
      return self.train
    side = image_ops.shorter_side(
      self.config.data.resize, self.config.image_size
    )
    return cache_decoded(self.train, side, self.context.stop.check)

  def frozen_pass(self, step: Step) -> Prepare:
    """Images (b, side, side, 3) -> inputs of the trained part."""
    return functools.partial(step.prepare, self.frozen())

  def frozen(self) -> dict[str, Any]:
    """The arrays that a pack reads and does not train."""
    frozen = {
      "backbone": self.frozen_backbone.params,
      "tasks": {task.spec.name: task.params for task in self.parents},
    }
    outputs = self._head_outputs
    if jax.tree.leaves(outputs):
      frozen["outputs"] = sharding.put(outputs, self.context.mesh)
    return frozen

  @functools.cached_property
  def frozen_backbone(self) -> Backbone:
    """The backbone with its parameters in the compute dtype."""
    return rounded(self.backbone)

  @functools.cached_property
  def _head_outputs(self) -> HeadOutputs:
    weights, kind = None, self.task_kind.kind
    if self._weighs_classes:
      counted, examples = processes.on_process_0(self._count)
      weights = kind.weights(np.array(counted), examples)
    if not kind.one_is_right:  # their losses leave out the padding
      return HeadOutputs(weights=weights)
    classes, padded = self.train.num_classes, self._padded_classes
    if weights is not None:
      weights = np.pad(weights, (0, max(0, padded - classes)))
    return HeadOutputs(padded_head.is_class(padded, classes), weights)

  def _count(self) -> tuple[list[int], int]:
    """The number of examples of each class or label, and of readable ones."""
    counts: list[int] = class_counts(self.train).tolist()
    return counts, self.train.size - len(self.train.unreadable)

  @property
  def _padded_classes(self) -> int:
    return self.config.task.padded_classes

  @property
  def _weighs_classes(self) -> bool:
    trials = sweep.trials_of(self.config, "any")
    return any(t.config.optim.class_weights == "balanced" for t in trials)

  def untouched(self) -> dict[str, Any]:
    """The arrays that stay unchanged: in `full`, none of the backbone."""
    frozen = {k: v for k, v in self.frozen().items() if k != "outputs"}
    if self.config.learned.holds_backbone:
      frozen["backbone"] = {}
    return frozen

  def train_batches(self, step_fn: Step, step: int) -> Any:
    """The batches after a step; missing cached rows are computed first.

    Labels of values are standardized.
    """
    return map(self._standardized, self._batches(step_fn, step))

  def _standardized(self, batch: dict[str, Any]) -> dict[str, Any]:
    stated = self.task_kind
    return {**batch, "label": stated.kind.standardized(stated, batch["label"])}

  def _batches(self, step_fn: Step, step: int) -> Any:
    config = self.config
    if self.cache:
      if step == config.total_steps:  # no step is left
        return iter(())
      prepare = self.frozen_pass(step_fn)
      self.cache.require_free_space([
        self.cache.needs(key, split, prepare)
        for key, split in self.cached_splits.items()
      ])  # fmt: skip
      if self.validation:  # before the loop begins
        self.cache.rows("validation", self.validation, prepare)
      return self.cache.train_batches(
        self.train, prepare, step * config.batch_size
      )
    return self._image_batches(self._training_images, step * config.batch_size)

  def _image_batches(self, split: Split, start: int) -> Any:
    config = self.config
    return batching.train_batches(
      split,
      config.data,
      image_size=config.image_size,
      batch_size=config.batch_size,
      seed=data_seed(config),
      start=start,
      interpolation=self.preprocessing.interpolation,
    )

  def train_examples(self, step: int) -> list[str]:
    config = self.config
    if self.cache:
      return self.cache.train_examples(self.train, step)
    return batching.train_examples(
      self.train,
      seed=data_seed(config),
      batch_size=config.batch_size,
      step=step,
    )

  def meta(self, trials: Sequence[Trial]) -> dict[str, Any]:
    """Describe a pack; a resumed one must have an equal description."""
    data: dict[str, Any] = {"classes": list(self.train.class_names)}
    measured = self.task_kind.kind.needed
    data |= {name: [*getattr(self.task_kind, name)] for name in measured}
    return {
      "fingerprint": self.backbone.fingerprint,
      "parents": {task.spec.name: task.digest for task in self.parents},
      "attends_to": {p.spec.name: p.digest for p in self.attends_to},
      "variants": {t.name: t.label for t in trials},
      "data": data,
      "files": self.record.compared,
      # With a cache each process draws from its own rows.
      "drawn_by": jax.process_count() if self.cache else 1,
      "config": resume.what_matters(to_dict(self.config)),
    }
