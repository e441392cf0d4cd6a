"""One run: a backbone, a task and its data, up to what is exported."""

import dataclasses
import json
import logging
import os
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
  sharding,
  sweep,
  trees,
)
from memory_vit.backbone import Backbone
from memory_vit.config import Config, DataConfig, to_dict
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.learn import Learned, Learner
from memory_vit.pretrain import pretrain
from memory_vit.pretrained import load_backbone, save_backbone
from memory_vit.sweep import Variant
from memory_vit.tasks import BACKBONE, Task

logger = logging.getLogger("memory_vit")


def train_and_evaluate(config: Config, workdir: Path) -> dict[str, Any]:
  """Learns a task or a sweep, or goes on where a run in `workdir` stopped.

  Leaves there `config.json`, `checkpoints/`, `tasks/NAME/`, TensorBoard events,
  `result.json`, and of a sweep `sweep.png`.

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
  tested = _open(config, config.data.test)
  upstream = _open_upstream(config, backbone)

  before = upstream and _evaluate_upstream(learner, upstream, ())
  plan = _plan(learner, variants, workdir)
  write_json(workdir / "config.json", to_dict(config))
  learned = [
    learner.learn(variants, directory, _logdirs(variants, workdir))
    for directory, variants in plan.items()
  ]
  tasks = _with_metrics(learner, variants, learned, tested)
  exported = _export(config, name, tasks, workdir, backbone)
  after = upstream and _evaluate_upstream(learner, upstream, exported)

  result = {
    "tasks": [task.provenance["metrics"] for task in tasks],
    "backbone": {
      "fingerprint": backbone.fingerprint,
      "accuracy_before": before and before["top1"],
      "accuracy_after": after and after["top1"],
      "outputs_bit_equal": before and before["digest"] == after["digest"],
    },
    "wall_seconds": round(time.perf_counter() - began, 2),
    "images_per_second": _speed(learned),
  }
  if config.sweep.is_on:
    result["sweep"] = _of_the_sweep(learned, name)
    _plot(result, workdir)
  _keep_time(result, workdir)
  write_json(workdir / "result.json", result)
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
    path = str(_pretrained(config, workdir, mesh))
  backbone = load_backbone(
    path, image_size=config.image_size, dtype=config.dtype, gelu=config.gelu
  )
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, config.image_size, backbone.fingerprint[:16],
  )  # fmt: skip
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  return dataclasses.replace(backbone, params=params)


def _pretrained(config: Config, workdir: Path, mesh: Mesh) -> Path:
  """The backbone that `config.pretrain` describes; is made only once."""
  path, made_by = workdir / "backbone.npz", workdir / "backbone.json"
  # As JSON gives it back, to be compared with what lies there.
  wanted = json.loads(
    json.dumps(
      {
        "pretrain": dataclasses.asdict(config.pretrain),
        "image_size": config.image_size,
        "seed": config.seed,
        "gelu": config.gelu,
        "dtype": config.dtype,
      }
    )
  )
  if not path.exists():
    save_backbone(pretrain(config, mesh), path)
    write_json(made_by, wanted)
  found = json.loads(made_by.read_text()) if made_by.exists() else None
  if found != wanted:
    raise TrainingError(
      f"{path} was not made by this configuration, but by {found}. Give that "
      "one, or another --workdir."
    )
  return path


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


def _open(config: Config, split: str) -> data.Source | None:
  """A split of the task's data set; None where none is named."""
  where = config.data
  if not split:
    return None
  return data.open_source(where.name, split, where.dir, where.cache_gib)


def _plan(
  learner: Learner, variants: Sequence[Variant], workdir: Path
) -> dict[Path, list[Variant]]:
  """{directory of saved states: variants that are trained at once}.

  A run that goes on keeps its plan, whatever memory is free now.
  """
  file = workdir / "passes.json"
  by_name = {variant.name: variant for variant in variants}
  if not file.exists():
    passes = _passes(learner, variants)
    write_json(file, [[variant.name for variant in p] for p in passes])
  names = json.loads(file.read_text())
  if sorted(sum(names, [])) != sorted(by_name):
    raise TrainingError(
      f"{file} plans the variants {sum(names, [])}, the configuration has "
      f"{list(by_name)}. Give the one that the run began with, or another "
      "--workdir."
    )
  directory = workdir / "checkpoints"
  many = len(names) > 1
  return {
    directory / f"pass-{i:02}" if many else directory: [by_name[n] for n in p]
    for i, p in enumerate(names)
  }


def _passes(
  learner: Learner, variants: Sequence[Variant]
) -> list[list[Variant]]:
  """Deals variants out to passes, on an estimate of the memory they take."""
  if len(variants) == 1:
    return [list(variants)]
  # The longest memory is what all are padded to.
  longest = sorted(variants, key=lambda v: v.config.task.cells)[-2:]
  first, both = learner.pass_bytes(longest[1:]), learner.pass_bytes(longest)
  free = sweep.free_bytes(learner.config.sweep.memory_gib)
  passes = sweep.passes_of(variants, sweep.at_once(first, both - first, free))
  logger.info(
    "%d variants in %d passes: one takes %.2f GiB, each further one %.3f GiB, "
    "%.2f GiB may be taken (estimated by compiling for one and for two)",
    len(variants), len(passes), first / 2**30, (both - first) / 2**30,
    free / 2**30,
  )  # fmt: skip
  return passes


def _logdirs(variants: Sequence[Variant], workdir: Path) -> dict[str, Path]:
  """TensorBoard shows every variant as a run of its own."""
  return {
    v.name: workdir / "sweep" / v.label if v.label else workdir
    for v in variants
  }


def _with_metrics(
  learner: Learner,
  variants: Sequence[Variant],
  learned: Sequence[Learned],
  tested: data.Source | None,
) -> list[Task]:
  """Tasks with how they were made and how good they are; the best comes first.

  "steps" is how long a task was trained, "best_step" when it was as it is.
  """
  by_name = {variant.name: variant for variant in variants}
  tasks = []
  for part in learned:
    tests = {}
    if tested:
      tests = learner.evaluate(list(part.tasks.values()), tested)
    for name, task in part.tasks.items():
      variant, best = by_name[name], part.best[name]
      metrics = _metrics(variant, task, tests.get(name))
      metrics |= {"best_step": best.step, "val_accuracy": best.accuracy}
      made = {"config": to_dict(variant.config), "metrics": metrics}
      tasks.append(dataclasses.replace(task, provenance=made))
  # Stable: where there is no validation, the order of the configuration.
  return sorted(
    tasks, key=lambda t: -(t.provenance["metrics"]["val_accuracy"] or 0.0)
  )


def _metrics(
  variant: Variant, task: Task, test: dict[str, Any] | None
) -> dict[str, Any]:
  """An entry of `result.json`."""
  config = variant.config
  return {
    "name": task.spec.name,
    "regime": config.regime,
    "cells": task.spec.cells,
    "learning_rate": config.learning_rate,
    "seed": config.seed,
    "varied": dict(variant.varied),
    "steps": config.total_steps,
    "trainable_params": trees.count(task.params),
    "test_accuracy": test and test["top1"],
    "test_examples": test["examples"] if test else 0,
    "test_loss": test and test["loss"],
    "test_top5": test and test["top5"],
    "test_per_class": test and test["per_class"],
    "exported": None,
  }


def _export(
  config: Config,
  name: str,
  tasks: Sequence[Task],
  workdir: Path,
  backbone: Backbone,
) -> list[Task]:
  """Writes the best task under its name, and the others where that is asked.

  Returns:
    What was written, read back as everybody else will read it.
  """
  wanted = [(name, tasks[0])]
  if config.sweep.is_on and config.sweep.export == "all":
    wanted += [(task.spec.name, task) for task in tasks]
  exported = []
  for name, task in wanted:
    metrics = task.provenance["metrics"]
    # In the result, of the best: the name without a number.
    metrics["exported"] = metrics["exported"] or f"tasks/{name}"
    made = {
      "config": task.provenance["config"],
      "metrics": {**metrics, "name": name, "exported": f"tasks/{name}"},
    }
    spec = dataclasses.replace(task.spec, name=name)
    path = workdir / "tasks" / name
    adapters.save_task(Task(spec, task.params, made), path)
    exported.append(adapters.load_task(path, backbone))
  return exported


def _open_upstream(config: Config, backbone: Backbone) -> data.Source | None:
  """The data of the backbone's own task; None where none is configured."""
  where = config.upstream
  if not where.name:
    return None
  source = data.open_source(
    where.name, where.split, where.dir, config.data.cache_gib
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
  batches = data.eval_batches(
    source,
    preprocess.evaluation_of(where.eval_crop, where.resize, config.image_size),
    batch_size=config.batch_size_eval,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  return evaluation.evaluate(predict, batches, learner.mesh, digest=True)[
    BACKBONE
  ]


def _speed(learned: Sequence[Learned]) -> float:
  """Training pictures per second, over all passes and all processes."""
  seconds = sum(part.seconds for part in learned)
  examples = sum(part.examples for part in learned)
  return round(examples / seconds, 1) if seconds else 0.0


def _of_the_sweep(learned: Sequence[Learned], name: str) -> dict[str, Any]:
  """What the sweep as a whole took."""
  seconds = sum(part.seconds for part in learned)
  count = sum(len(part.tasks) for part in learned)
  return {
    "task": name,
    "variants": count,
    "passes": len(learned),
    "training_seconds": round(seconds, 2),
    "training_seconds_per_variant": round(seconds / count, 2),
  }


def _plot(result: dict[str, Any], workdir: Path) -> None:
  """Draws the sweep, by one process."""
  from memory_vit import plots  # only a sweep needs matplotlib

  if jax.process_index() == 0:
    plots.sweep_figure(result).savefig(workdir / "sweep.png", dpi=120)


def _keep_time(result: dict[str, Any], workdir: Path) -> None:
  """A finished run that is started again has not become faster."""
  file = workdir / "result.json"
  if file.exists():
    earlier = json.loads(file.read_text(encoding="utf-8"))
    result["wall_seconds"] = earlier["wall_seconds"]


def _name_of(config: DataConfig) -> str:
  """A task's name after its data: "sun397/tfds" -> "sun397"."""
  name = Path(config.dir).name if config.name == "folder" else config.name
  name = re.sub(r"[^a-z0-9_-]+", "-", name.split("/")[0].lower())
  return name.strip("-_")


def write_json(path: Path, values: Any) -> None:
  """Writes a file that is whole or not there, by one process."""
  if jax.process_index() != 0:
    return
  scratch = path.with_suffix(".tmp")
  scratch.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
  os.replace(scratch, path)
