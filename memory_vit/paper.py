"""Runs the paper's study on the data set of a configuration.

  python -m memory_vit.paper --config=configs/cifar100.py --workdir=DIR \\
    [--only=PART ...] [--dry_run] [--config.KEY=VALUE ...]

DIR then holds report.md, report.json, plots, and in runs/NAME every run as
`memory_vit.main` would leave it. A study that was interrupted goes on when the
same command is given again; a run is never repeated. Parts: see `study.PARTS`,
options: `config.StudyConfig`. The report holds the parts of the last call.
--dry_run shows the runs and about how long they will take, and trains nothing.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags
from jax.sharding import Mesh
from ml_collections import config_flags

from memory_vit import (
  adapters,
  costs,
  data,
  findings,
  forecast,
  interference,
  measured,
  progress,
  report,
  sharding,
  study,
)
from memory_vit import config as config_lib
from memory_vit.backbone import Backbone
from memory_vit.config import Config
from memory_vit.errors import MemoryVitError
from memory_vit.findings import Finding
from memory_vit.measured import Point
from memory_vit.pretrain import pretrained_file
from memory_vit.pretrained import load_backbone
from memory_vit.regimes import REGIMES
from memory_vit.study import Run
from memory_vit.tasks import Task

logger = logging.getLogger("memory_vit")

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results are written.")
_ONLY = flags.DEFINE_multi_string(
  "only", [], f"A part; may be given several times: {', '.join(study.PARTS)}."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Show the runs, train nothing.")


def main(argv: list[str]) -> None:
  """Runs the study, or shows its plan."""
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}; options start with --")
  progress.log_to_stderr()
  workdir = Path(_WORKDIR.value)
  config = config_lib.from_dict(_CONFIG.value.to_dict())
  parts = study.possible_parts(config, _ONLY.value)
  if _DRY_RUN.value:
    print(forecast.forecast(config, workdir, parts))
    return
  run_study(config, workdir, parts)
  print((workdir / "report.md").read_text(encoding="utf-8"))


def run_study(
  config: Config, workdir: Path, parts: Sequence[str]
) -> dict[str, Finding]:
  """Runs what parts need, and writes the report after each of them.

  Args:
    config: of the study.
    workdir: of the study.
    parts: from `study.possible_parts`.

  Returns:
    {part: what it found}.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  mesh = sharding.make_mesh()
  path = config.backbone
  if config.pretrain.variant:
    path = str(pretrained_file(config, workdir, mesh))
  backbone = load_backbone(
    path, image_size=config.image_size, dtype=config.dtype, gelu=config.gelu
  )
  params = jax.device_put(backbone.params, sharding.replicated(mesh))
  backbone = dataclasses.replace(backbone, params=params)
  points: dict[str, list[Point]] = {}
  found: dict[str, Finding] = {}
  for part in parts:
    for run in study.runs_of(config, part):
      if run.name not in points:
        points[run.name] = _measure(config, run, workdir, path, points)
    everything = [point for some in points.values() for point in some]
    found[part] = _find(part, config, backbone, mesh, everything)
    report.plot(workdir, part, found[part])
    report.write(workdir, config, found, everything)
    logger.info("%s: %s", part, found[part].sentence)
  return found


def _measure(
  config: Config,
  run: Run,
  workdir: Path,
  backbone: str,
  points: dict[str, list[Point]],
) -> list[Point]:
  """Runs one run, once what it reads is there."""
  read = measured.read_by(run, points, config.task.cells)
  if read is None:
    logger.warning("run %s: what it would read diverged", run.name)
    return measured.lost_points(run)
  return measured.measure(
    study.config_of(config, run, backbone, read),
    run,
    workdir / "runs" / run.name,
  )


def _find(
  part: str,
  config: Config,
  backbone: Backbone,
  mesh: Mesh,
  points: Sequence[Point],
) -> Finding:
  """What the points say on a part."""
  vit = backbone.config
  if part == "adapters":
    return findings.adapters(config, vit, points)
  if part == "costs":
    cells, bottleneck = config.task.cells, config.task.bottleneck
    found = [costs.cost_of(vit, name, cells, bottleneck) for name in REGIMES]
    plain, _ = costs.flops(vit, "head", 0, 0)
    return findings.costs(vit, found, plain)
  if part == "interference":
    return _find_interference(config, backbone, mesh, points)
  simple = {
    "table2": findings.table2,
    "sensitivity": findings.sensitivity,
    "cells": findings.cells,
    "extension": findings.extension,
  }
  return simple[part](config, points)


def _find_interference(
  config: Config, backbone: Backbone, mesh: Mesh, points: Sequence[Point]
) -> Finding:
  """Evaluates tasks with the memories of others beside them."""
  naive = _best_tasks(config, backbone, points, "memory")
  masked = _best_tasks(config, backbone, points, "memory_masked")
  if not (naive and masked):
    return findings.interference(config, (), ())
  where = config.data
  source = data.open_source(
    where.name,
    where.test,
    where.dir,
    where.cache_gib,
    max_bad=where.max_bad,
    stall_timeout=config.stall_timeout,
  )
  options = {"batch_size": config.batch_size_eval, "mesh": mesh}
  return findings.interference(
    config,
    interference.naive_accuracies(backbone, naive, source, **options),
    interference.masked_accuracies(backbone, masked, source, **options),
  )


def _best_tasks(
  config: Config, backbone: Backbone, points: Sequence[Point], regime: str
) -> list[Task]:
  """The first task and the others; none where one of them diverged."""
  tasks = []
  for name in (config.data.name, *config.study.others):
    some = measured.select(
      points,
      regime=regime,
      data=name,
      cells=config.task.cells,
      seed=config.study.seeds[0],
    )
    point = measured.best(some)
    if point is None:
      return []
    tasks.append(adapters.load_task(point.task, backbone))
  return tasks


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  # Around all, since a configuration file runs while flags are parsed.
  try:
    app.run(main)
  except MemoryVitError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
