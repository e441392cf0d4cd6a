"""One run: a backbone, a task and its data, up to what is exported."""

import dataclasses
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit import (
  adapters,
  data,
  evaluation,
  preprocess,
  programs,
  records,
  results,
  sharding,
  sweep,
  train,
)
from memory_vit.backbone import Backbone, init_backbone
from memory_vit.config import RANDOM, Config, DataConfig, to_dict
from memory_vit.errors import ConfigError, DivergedError, TrainingError
from memory_vit.learn import Learned, Learner
from memory_vit.pretrain import pretrained_file
from memory_vit.pretrained import load_backbone
from memory_vit.regimes import REGIMES
from memory_vit.sweep import Variant
from memory_vit.tasks import BACKBONE, Task
from memory_vit.variants import vit_config

logger = logging.getLogger("memory_vit")


def train_and_evaluate(config: Config, workdir: Path) -> dict[str, Any]:
  """Learns a task or a sweep, or goes on where a run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `tasks/NAME/`, TensorBoard events
  and `result.json`; of a sweep `passes.json` and `sweep.png`, of pretraining
  `backbone.npz` and `backbone.json`, of the regime `full` the whole model as
  `NAME.npz`.

  Args:
    config: of the run.
    workdir: is made where it is not there.

  Returns:
    What `result.json` holds.

  Raises:
    MemoryVitError: for input that cannot be used.
  """
  began = time.perf_counter()
  mesh = sharding.make_mesh()
  _require_possible(config, workdir, mesh)
  name = config.task.name or _name_of(config.data)
  variants = sweep.variants_of(config, name)
  workdir.mkdir(parents=True, exist_ok=True)
  backbone = _backbone(config, workdir, mesh)
  # All splits first: a wrong name must not cost a training run.
  learner = _learner(config, mesh, backbone)
  _require_names(learner, name, variants)
  tested = _open(config, config.data.test)
  upstream = _open_upstream(config, backbone)

  before = upstream and _evaluate_upstream(learner, upstream, ())
  plan = _plan(learner, variants, workdir)
  if not (workdir / "config.json").exists():  # a run that goes on has its own
    records.write_json(workdir / "config.json", to_dict(config))
  learned = _learn(learner, variants, plan, workdir)
  tasks = results.with_metrics(learner, variants, learned, tested)
  exported = results.export(config, name, tasks, workdir, backbone)
  if config.regime == "full":
    results.save_model(exported[0], backbone, workdir / f"{name}.npz")
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
    "left_out": _left_out(
      [learner.train, learner.validation, tested, upstream]
    ),
    "wall_seconds": round(time.perf_counter() - began, 2),
    "images_per_second": _speed(learned),
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


def _backbone(config: Config, workdir: Path, mesh: Mesh) -> Backbone:
  """Loads the backbone, or makes it first, and puts it on every device."""
  path = config.backbone
  if config.pretrain.variant:
    path = str(pretrained_file(config, workdir, mesh))
  if path.startswith(RANDOM):
    backbone = init_backbone(
      vit_config(
        path.removeprefix(RANDOM),
        image_size=config.image_size,
        dtype=config.dtype,
        gelu=config.gelu,
      ),
      jax.random.key(config.seed),
    )
  else:
    backbone = load_backbone(
      path, image_size=config.image_size, dtype=config.dtype, gelu=config.gelu
    )
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, config.image_size, backbone.fingerprint[:16],
  )  # fmt: skip
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  return dataclasses.replace(backbone, params=params)


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
  return data.open_source(
    where.name,
    split,
    where.dir,
    where.cache_gib,
    max_bad=where.max_bad,
    stall_timeout=config.stall_timeout,
  )


def _plan(
  learner: Learner, variants: Sequence[Variant], workdir: Path
) -> dict[str, Any]:
  """Which variants are trained at once, and the estimate that says so.

  A run that goes on keeps its plan, whatever memory is free now; one that has
  saved nothing yet makes a new one.

  Returns:
    {"passes": names of the variants of each, "bytes_of_one": what a pass with
    one variant takes, "bytes_per_variant": what each further one takes}; both
    None where there is one only.
  """
  if len(variants) == 1:
    return _passes(learner, variants)
  file = workdir / "passes.json"
  names = sorted(variant.name for variant in variants)
  steps = (workdir / "checkpoints").rglob("*")
  if not file.exists() or not any(path.name.isdigit() for path in steps):
    plan = _passes(learner, variants)
    records.write_json(file, plan)
    return plan
  plan = records.read_json(file)
  planned = sorted(name for part in plan["passes"] for name in part)
  if planned != names:
    raise TrainingError(
      f"{file} plans the variants {planned}, the configuration has {names}. "
      "Give the one that the run began with, or another --workdir."
    )
  return plan


def _passes(learner: Learner, variants: Sequence[Variant]) -> dict[str, Any]:
  """Deals variants out to passes, on an estimate of the memory they take."""
  if len(variants) == 1 or not REGIMES[learner.config.regime].composes:
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
  learned = []
  for i, names in enumerate(plan["passes"]):
    directory = workdir / "checkpoints"
    if len(plan["passes"]) > 1:
      directory /= f"pass-{i:02}"
    part = [by_name[name] for name in names]
    try:
      learned.append(learner.learn(part, directory, _logdirs(part, workdir)))
    except DivergedError as error:
      logger.warning("%s", error)
      diverged = error
      none = {variant.name: train.Best() for variant in part}
      learned.append(Learned({}, none, error.lost, 0, 0.0))
  if not any(part.tasks for part in learned):
    raise diverged
  return learned


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
  source = data.open_source(
    where.name,
    where.split,
    where.dir,
    config.data.cache_gib,
    max_bad=config.data.max_bad,
    stall_timeout=config.stall_timeout,
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


def _left_out(sources: Sequence[data.Source | None]) -> list[str]:
  """The examples that could not be read, by any process."""
  return [
    source.describe(index)
    for source in sources
    if source
    for index in sharding.known_to_any(source.left_out, source.max_bad)
  ]


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
