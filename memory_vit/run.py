"""One run: a backbone, a task and its data, up to what is exported."""

import dataclasses
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit import (
  adapters,
  agreement,
  changes,
  data,
  evaluation,
  preprocess,
  processes,
  programs,
  records,
  results,
  sharding,
  sweep,
  train,
  weights,
)
from memory_vit.backbone import Backbone
from memory_vit.config import Config, DataConfig, to_dict
from memory_vit.errors import ConfigError, DivergedError, TrainingError
from memory_vit.interrupt import Stop
from memory_vit.learn import Learned, Learner
from memory_vit.lock import only_run
from memory_vit.regimes import REGIMES
from memory_vit.sweep import Variant
from memory_vit.tasks import BACKBONE, Task

logger = logging.getLogger("memory_vit")


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: Stop | None = None,
  may_change: Sequence[str] = (),
) -> dict[str, Any]:
  """Learns a task or a sweep, or goes on where a run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `tasks/NAME/`, TensorBoard events
  and `result.json`; of a sweep `passes.json` and `sweep.png`, of pretraining
  `backbone.npz` and `backbone.json`, of the regime `full` the whole model as
  `NAME.npz`.

  Args:
    config: of the run.
    workdir: is made where it is not there.
    stop: whether a run that trains should save its state and stop.
    may_change: options that may not be those of the run that goes on, some of
      `changes.CAN_CHANGE`.

  Returns:
    What `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used, and where another run is
      using `workdir`.
    Interrupted: where `stop` says so.
  """
  agreement.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  _require_possible(config, workdir, mesh)
  may_change = changes.allowed(may_change)
  with only_run(workdir):
    return _run(config, workdir, mesh, stop or Stop(), may_change)


def _run(
  config: Config,
  workdir: Path,
  mesh: Mesh,
  stop: Stop,
  may_change: tuple[str, ...],
) -> dict[str, Any]:
  """See `train_and_evaluate`."""
  began = time.perf_counter()
  name = config.task.name or _name_of(config.data)
  variants = sweep.variants_of(config, name)
  processes.require_shared(workdir)
  backbone = weights.open_backbone(config, workdir, mesh, stop)
  # All splits first: a wrong name must not cost a training run.
  learner = dataclasses.replace(
    _learner(config, mesh, backbone), stop=stop, may_change=may_change
  )
  _require_names(learner, name, variants)
  tested = _open(config, config.data.test)
  upstream = _open_upstream(config, backbone)
  agreement.require_same_data(learner, tested, upstream)

  before = upstream and _evaluate_upstream(learner, upstream, ())
  plan = _plan(learner, variants, workdir)
  # A run that goes on has its own.
  if not (_has_saved(workdir) and (workdir / "config.json").exists()):
    records.write_json(workdir / "config.json", to_dict(config))
  learned = _learn(learner, variants, plan, workdir)
  changed = _changes(learned)
  if changed:
    records.write_json(workdir / "config.json", to_dict(config))
  tasks = results.with_metrics(learner, variants, learned, tested)
  exported = results.export(config, name, tasks, workdir, backbone)
  if config.regime == "full":
    model = workdir / f"{name}.npz"
    with records.writing(model):
      results.save_model(exported[0], backbone, model)
  after = None
  if upstream and REGIMES[config.regime].composes:
    after = _evaluate_upstream(learner, upstream, exported)

  result = {
    "tasks": [task.provenance["metrics"] for task in tasks],
    "backbone": {
      "fingerprint": backbone.fingerprint,
      "accuracy_before": before and before["top1"],
      "accuracy_after": after and after["top1"],
      "outputs_bit_equal": after and before["digest"] == after["digest"],
    },
    "wall_seconds": round(time.perf_counter() - began, 2),
    "images_per_second": _speed(learned),
    "config_changes": changed,
  }
  if config.sweep.is_on:
    result["sweep"] = _of_the_sweep(learned, name, plan)
  _keep_time(result, workdir)
  records.write_json(workdir / "result.json", result)
  if config.sweep.is_on:  # once all is safe
    _plot(result, workdir)
  return result


def _require_possible(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuses what can be known to fail before anything is read."""
  if "://" in str(workdir) or ":/" in str(workdir):
    raise ConfigError(f"--workdir is {workdir}, expected a local directory.")
  if not config.data.name:
    raise ConfigError(
      "config.data.name is empty: name a data set, as in "
      "--config=configs/tfds.py:cifar10 or --config.data.name=cifar10."
    )
  parts = config.optim.accumulation_steps
  for key, size in (
    ("config.batch_size", config.batch_size),
    ("config.batch_size_eval", config.batch_size_eval),
    (
      "config.batch_size / config.optim.accumulation_steps",
      config.batch_size // parts,
    ),
  ):
    sharding.require_divisible(size, mesh, key)
  if config.pretrain.variant:
    sharding.require_divisible(
      config.pretrain.batch_size, mesh, "config.pretrain.batch_size"
    )


def _learner(config: Config, mesh: Mesh, backbone: Backbone) -> Learner:
  directories = (*config.task.attends_to, *config.task.indirect)
  return Learner(
    config=config,
    mesh=mesh,
    backbone=backbone,
    parents=tuple(adapters.load_task(path, backbone) for path in directories),
    train=_open(config, config.data.train),
    validation=_open(config, config.data.validation),
  )


def _require_names(
  learner: Learner, name: str, variants: Sequence[Variant]
) -> None:
  """Refuses a task that would be called as one that it reads."""
  parents = {task.spec.name for task in learner.parents}
  taken = sorted(parents & {name, *(variant.name for variant in variants)})
  if taken:
    raise ConfigError(
      f"config.task.name: {taken} are names of tasks in config.task.attends_to "
      "or config.task.indirect. Give the new task another one."
    )


def _open(config: Config, split: str) -> data.Source | None:
  """A split of the task's data set; None where none is named."""
  where = config.data
  if not split:
    return None
  # It may be prepared on the way, in a directory that all share.
  return processes.first_before_others(
    lambda: data.open_source(where.name, split, where.dir, where.cache_gib),
  )


def _plan(
  learner: Learner, variants: Sequence[Variant], workdir: Path
) -> dict[str, Any]:
  """Which variants are trained at once, and the estimate that says so.

  A run that goes on keeps its plan, whatever memory is free now; one that has
  saved nothing yet makes a new one. All processes have that of process 0.

  Returns:
    {"passes": names of the variants of each, "bytes_of_one": what a pass with
    one variant takes, "bytes_per_variant": what each further one takes}; both
    None where there is one only.
  """
  if len(variants) == 1:
    return _passes(learner, variants)
  file = workdir / "passes.json"
  names = sorted(variant.name for variant in variants)
  if not processes.from_first(file.exists() and _has_saved(workdir)):
    plan = processes.from_first(_passes(learner, variants))
    records.write_json(file, plan)
    return plan
  plan = processes.from_first(records.read_json(file))
  planned = sorted(name for part in plan["passes"] for name in part)
  if planned != names:
    raise TrainingError(
      f"{file} plans the variants {planned}, the configuration has {names}. "
      "Give the one that the run began with, or another --workdir."
    )
  return plan


def _has_saved(workdir: Path) -> bool:
  """Whether a pass of the run has saved a state with which it goes on."""
  saved = (workdir / "checkpoints").rglob("*")
  return any(path.name.isdigit() for path in saved)


def _passes(learner: Learner, variants: Sequence[Variant]) -> dict[str, Any]:
  """Deals variants out to passes, on an estimate of the memory they take."""
  if len(variants) == 1 or not REGIMES[learner.config.regime].shares_pass:
    return {
      "passes": [[variant.name] for variant in variants],
      "bytes_of_one": None,
      "bytes_per_variant": None,
    }
  # The longest memory is what all are padded to.
  longest = sorted(variants, key=lambda v: v.config.task.cells)[-2:]
  first = learner.pass_bytes(longest[1:])
  further = max(0, learner.pass_bytes(longest) - first)
  free = sweep.free_bytes(learner.config.sweep.memory_gib)
  passes = sweep.passes_of(variants, sweep.at_once(first, further, free))
  logger.info(
    "%d variants in %d passes: one takes %.2f GiB, each further one %.3f GiB, "
    "%.2f GiB may be taken (estimated by compiling for one and for two)",
    len(variants), len(passes), first / 2**30, further / 2**30, free / 2**30,
  )  # fmt: skip
  return {
    "passes": [[variant.name for variant in part] for part in passes],
    "bytes_of_one": first,
    "bytes_per_variant": further,
  }


def _learn(
  learner: Learner,
  variants: Sequence[Variant],
  plan: dict[str, Any],
  workdir: Path,
) -> list[Learned]:
  """Trains one pass after the other; of a sweep, also after one diverged."""
  by_name = {variant.name: variant for variant in variants}
  passes = [[by_name[name] for name in names] for names in plan["passes"]]
  directory = workdir / "checkpoints"
  if len(passes) == 1:
    (part,) = passes
    return [learner.learn(part, directory, _logdirs(part, workdir))]
  learned, diverged = [], []
  for i, part in enumerate(passes):
    try:
      learned.append(_learn_pass(learner, part, directory / f"pass-{i:02}",
                                 workdir))  # fmt: skip
    except DivergedError as error:
      logger.warning("%s", error)
      diverged.append(error)
      none = {variant.name: train.Best() for variant in part}
      learned.append(Learned({}, none, error.lost, {}, (), 0, 0.0))
  if len(diverged) == len(passes):
    raise diverged[-1]
  return learned


def _learn_pass(
  learner: Learner, part: Sequence[Variant], directory: Path, workdir: Path
) -> Learned:
  """Trains a pass, or remembers from an earlier process that it diverged."""
  file = directory.with_suffix(".json")
  meta = json.loads(json.dumps(learner.meta(part)))
  if file.exists():
    found = records.read_json(file)
    if found["meta"] == meta:
      raise DivergedError(found["message"], found["lost"])
  try:
    return learner.learn(part, directory, _logdirs(part, workdir))
  except DivergedError as error:
    found = {"message": str(error), "lost": error.lost, "meta": meta}
    directory.parent.mkdir(parents=True, exist_ok=True)
    records.write_json(file, found)
    raise


def _logdirs(variants: Sequence[Variant], workdir: Path) -> dict[str, Path]:
  """TensorBoard shows every variant as a run of its own."""
  return {
    v.name: workdir / "sweep" / v.label if v.label else workdir
    for v in variants
  }


def _open_upstream(config: Config, backbone: Backbone) -> data.Source | None:
  """The data of the backbone's own task; None where none is configured."""
  where = config.upstream
  if not where.name:
    return None
  source = processes.first_before_others(
    lambda: data.open_source(
      where.name, where.split, where.dir, config.data.cache_gib
    ),
  )
  outputs = backbone.config.num_classes
  if source.num_classes != outputs:
    raise ConfigError(
      f"config.upstream: {where.name} has {source.num_classes} classes, the "
      f"head of the backbone has {outputs}."
    )
  return source


def _evaluate_upstream(
  learner: Learner, source: data.Source, tasks: Sequence[Task]
) -> dict[str, Any]:
  """Evaluates the original outputs, with tasks in the same pass."""
  config, backbone = learner.config, learner.backbone
  everything = [*learner.parents, *tasks] if tasks else []
  slots = programs.fill_slots(backbone, everything) if everything else []

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    return {BACKBONE: programs.forward(backbone, slots, images)[BACKBONE]}

  where = config.upstream
  return evaluation.evaluate_source(
    predict,
    source,
    preprocess.evaluation_of(where.eval_crop, where.resize, config.image_size),
    batch_size=config.batch_size_eval,
    mesh=learner.mesh,
    digest=True,
  )[BACKBONE]


def _changes(learned: Sequence[Learned]) -> list[Mapping[str, Any]]:
  """What changed of the configuration on the way, in any pass."""
  found = []
  for part in learned:
    found += [change for change in part.changes if change not in found]
  return found


def _speed(learned: Sequence[Learned]) -> float:
  """Training pictures per second, over all passes and all processes."""
  seconds = sum(part.seconds for part in learned)
  examples = sum(part.examples for part in learned)
  return round(examples / seconds, 1) if seconds else 0.0


def _of_the_sweep(
  learned: Sequence[Learned], name: str, plan: dict[str, Any]
) -> dict[str, Any]:
  """What the sweep as a whole took."""
  seconds = sum(part.seconds for part in learned)
  count = sum(len(part.best) for part in learned)
  return {
    "task": name,
    "variants": count,
    "passes": len(learned),
    "lost": {name: at for part in learned for name, at in part.lost.items()},
    "training_seconds": round(seconds, 2),
    "training_seconds_per_variant": round(seconds / count, 2),
    "bytes_of_one": plan["bytes_of_one"],
    "bytes_per_variant": plan["bytes_per_variant"],
  }


def _plot(result: dict[str, Any], workdir: Path) -> None:
  """Draws the sweep, by one process."""
  # Here, as only a sweep needs matplotlib.
  from memory_vit import plots

  if jax.process_index() == 0:
    with records.writing(workdir / "sweep.png"):
      plots.sweep_figure(result).savefig(workdir / "sweep.png", dpi=120)


def _keep_time(result: dict[str, Any], workdir: Path) -> None:
  """A finished run that is started again has not become faster."""
  file = workdir / "result.json"
  if file.exists():
    result["wall_seconds"] = records.read_json(file)["wall_seconds"]


def _name_of(config: DataConfig) -> str:
  """A task's name after its data: "sun397/tfds" -> "sun397"."""
  name = Path(config.dir).name if config.name == "folder" else config.name
  name = re.sub(r"[^a-z0-9_-]+", "-", name.split("/")[0].lower())
  return name.strip("-_")
