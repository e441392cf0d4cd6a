"""One run: a backbone, a task and its data, up to what is exported."""

import dataclasses
import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from memory_vit.config import Config, DataConfig, beyond_the_end, to_dict
from memory_vit.data import datasets, image_ops
from memory_vit.data.data_record import DataRecord
from memory_vit.data.reader import Reader
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import ConfigError
from memory_vit.evaluation import evaluate
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import REGIMES
from memory_vit.model.task import BACKBONE, NAME_PATTERN, Task
from memory_vit.runtime import files, messages, paths, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import Stop
from memory_vit.tasks import manifest, store
from memory_vit.training import (
  config_changes,
  consistency,
  open_backbone,
  packing,
  resolve,
  results,
  sweep,
)
from memory_vit.training.sweep import Variant
from memory_vit.training.trainer import Learned, Learner

logger = logging.getLogger("memory_vit")


def train_and_evaluate(
  config: Config,
  workdir: Path,
  stop: Stop | None = None,
  may_change: Sequence[str] = (),
) -> dict[str, Any]:
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
      `config_changes.ON_REQUEST`.

  Returns:
    What `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used, and where another run is
      using `workdir`.
    Interrupted: where `stop` says so.
  """
  consistency.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  _require_possible(config, workdir, mesh)
  may_change = config_changes.allowed(may_change)
  with only_run(workdir) as require_alone:
    processes.by_first(lambda: results.tidy(workdir))
    return _run(
      config, workdir, mesh, stop or Stop(), may_change, require_alone
    )


def _run(
  config: Config,
  workdir: Path,
  mesh: Mesh,
  stop: Stop,
  may_change: tuple[str, ...],
  require_alone: Callable[[], None],
) -> dict[str, Any]:
  """See `train_and_evaluate`."""
  began = time.perf_counter()
  name = config.task.name or _name_of(config.data)
  sweep.variants_of(config, name)  # a wrong one must not cost a backbone
  processes.require_shared(workdir)
  took = _seconds_before(workdir)
  backbone = open_backbone.open_backbone(config, workdir, mesh, stop)
  # All splits first: a wrong name must not cost a training run.
  train = _open(config, "train")
  config = resolve.with_image_size(config, backbone)
  config = resolve.with_steps(config, train.size)
  variants = sweep.variants_of(config, name)
  _require_within(variants)
  _require_memory(config)  # once more: its image size may have been 0
  learner = dataclasses.replace(
    _learner(config, mesh, backbone, train), stop=stop, may_change=may_change,
    require_alone=require_alone,
  )  # fmt: skip
  _require_names(learner, name, variants)
  tested = _open(config, "test")
  upstream = _open_upstream(config, backbone)
  splits = {
    "train": learner.train,
    "validation": learner.validation,
    "test": tested,
    "upstream": upstream,
  }
  splits = {key: reader for key, reader in splits.items() if reader}
  consistency.require_same_data(learner, splits)
  record = _record_of(splits, config, workdir)
  learner = dataclasses.replace(learner, record=record)

  before = upstream and _evaluate_upstream(learner, upstream, ())
  plan = packing.plan(learner, variants, workdir)
  # A run that goes on has its own.
  file = workdir / "config.json"
  if not (packing.has_saved(workdir) and processes.by_first(file.exists)):
    files.write_json(file, to_dict(config))
  learned = packing.learn(learner, variants, plan, workdir)
  changed = _changes(learned)
  if changed:
    files.write_json(file, to_dict(config))
  tasks = results.with_metrics(learner, variants, learned, tested)
  require_alone()
  exported = results.export(config, name, tasks, workdir, backbone)
  if config.regime == "full":
    model = workdir / f"{name}.npz"
    with files.writing(model):
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
    "data": record.digests,
    "left_out": _sync_unreadable(splits.values()),
    "wall_seconds": took or round(time.perf_counter() - began, 2),
    "images_per_second": _speed(learned),
    "config_changes": changed,
  }
  if config.sweep.is_on:
    result["sweep"] = _of_the_sweep(learned, name, plan)
  files.write_json(workdir / "result.json", result)
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
  if config.pretrain.variant and not config.pretrain.data.name:
    raise ConfigError(
      "config.pretrain.data.name is empty: name the data set that the backbone "
      "learns."
    )
  _require_name(config)
  for key in ("attends_to", "indirect"):
    for path in getattr(config.task, key):
      manifest.read(paths.local(path, f"config.task.{key}"))
  _require_batches(config, mesh)
  _require_memory(config)
  processes.by_first(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )


def _require_name(config: Config) -> None:
  """Refuses what would be no name of a task once it is trained."""
  name = config.task.name or _name_of(config.data)
  for variant in sweep.variants_of(config, name):
    if not NAME_PATTERN.fullmatch(variant.name):
      raise ConfigError(
        f"the task would be called {messages.brief(variant.name)}: give a name "
        f"by config.task.name, of the form {NAME_PATTERN.pattern}."
      )


def _require_batches(config: Config, mesh: Mesh) -> None:
  """Refuses batches that the devices cannot share."""
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


def _require_memory(config: Config) -> None:
  """Refuses a batch whose pictures alone this host cannot hold."""
  picture = 3 * 4 * config.image_size**2  # float32 RGB
  has = psutil.virtual_memory().total
  sizes = {
    "config.batch_size": config.batch_size,
    "config.batch_size_eval": config.batch_size_eval,
  }
  if config.pretrain.variant:
    sizes["config.pretrain.batch_size"] = config.pretrain.batch_size
  for key, size in sizes.items():
    takes = size // jax.process_count() * picture
    if takes > has:
      raise ConfigError(
        f"{key} is {size}: the pictures of a batch, of {config.image_size} px, "
        f"take {takes / 2**30:.1f} GiB, and this host has "
        f"{has / 2**30:.1f} GiB. Expected a smaller one."
      )


def _require_within(variants: Sequence[Variant]) -> None:
  """Refuses what would come after the steps that epochs turned out to be."""
  for variant in variants:
    for problem in beyond_the_end(variant.config):
      raise ConfigError(problem)


def _learner(
  config: Config, mesh: Mesh, backbone: Backbone, train: Reader
) -> Learner:
  directories = (*config.task.attends_to, *config.task.indirect)
  return Learner(
    config=config,
    mesh=mesh,
    backbone=backbone,
    parents=tuple(store.load_task(path, backbone) for path in directories),
    train=train,
    validation=_open(config, "validation"),
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


def _open(config: Config, role: str) -> Reader | None:
  """Opens the split of a role; None where the configuration names none."""
  ref = configured_splits(config).get(role)
  return ref and datasets.open_on_all_processes(ref)


def _open_upstream(config: Config, backbone: Backbone) -> Reader | None:
  """Opens the data of the backbone's own task; None where none is configured.

  Raises:
    ConfigError: where they have other classes than the backbone.
  """
  reader = _open(config, "upstream")
  outputs = backbone.config.num_classes
  if reader and reader.num_classes != outputs:
    raise ConfigError(
      f"config.upstream: {reader.name} has {reader.num_classes} classes, the "
      f"head of the backbone has {outputs}."
    )
  return reader


def _evaluate_upstream(
  learner: Learner, reader: Reader, tasks: Sequence[Task]
) -> dict[str, Any]:
  """Evaluates the original outputs, with tasks in the same pass."""
  config, backbone = learner.config, learner.backbone
  everything = [*learner.parents, *tasks] if tasks else []
  outputs = evaluate.predict_fn(backbone, everything, learner.mesh, [BACKBONE])

  def predict(images: jax.Array) -> dict[str, jax.Array]:
    learner.stop.check()
    return outputs(images)

  where = config.upstream
  return evaluate.evaluate_source(
    predict,
    reader,
    image_ops.evaluation_of(where.eval_crop, where.resize, config.image_size),
    batch_size=config.batch_size_eval,
    mesh=learner.mesh,
    digest=True,
  )[BACKBONE]


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


def _sync_unreadable(readers: Iterable[Reader]) -> list[str]:
  """Names the examples that some process could not read; all must call."""
  return [
    reader.source.describe(index)
    for reader in readers
    for index in reader.sync_unreadable()
  ]


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
    with files.writing(workdir / "sweep.png"):
      plots.sweep_figure(result).savefig(workdir / "sweep.png", dpi=120)


def _seconds_before(workdir: Path) -> float | None:
  """Of a run that has finished: started again, it has not become faster."""
  file = workdir / "result.json"
  if not file.exists():
    return None
  return files.read_object(file, "wall_seconds")["wall_seconds"]


def _name_of(config: DataConfig) -> str:
  """A task's name after its data: "sun397/tfds" -> "sun397"."""
  name = Path(config.dir).name if config.name == "folder" else config.name
  name = re.sub(r"[^a-z0-9_-]+", "-", name.split("/")[0].lower())
  return name.strip("-_")
