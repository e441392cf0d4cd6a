"""Conducts a study: its runs one after the other, and what they say."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.runtime import files, paths, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import StopSignal
from memory_vit.study import (
  analysis,
  budget,
  costs,
  execute,
  interference,
  plan,
  together,
)
from memory_vit.study.analysis import Finding
from memory_vit.study.costs import Cost
from memory_vit.study.plan import Points
from memory_vit.study.report import hardware, plot, write
from memory_vit.study.runs import Run, data_sets, possible_parts, regimes_of
from memory_vit.study.selection import Point, best, select
from memory_vit.tasks import store
from memory_vit.training import consistency, open_backbone, resolve

logger = logging.getLogger("memory_vit")


def run_study(
  config: Config,
  workdir: Path,
  parts: Sequence[str],
  stop: StopSignal | None = None,
) -> dict[str, Finding]:
  """Runs what parts need, and writes the report after each of them.

  Args:
    config: of the study.
    workdir: of the study.
    parts: from `runs.possible_parts`.
    stop: see `run.train_and_evaluate`.

  Returns:
    {part: what it found}, also of other parts that are known from before.

  Raises:
    MemoryVitError: as `run.train_and_evaluate`.
    Interrupted: where `stop` says so; what ran so far is not run again.
  """
  consistency.require_same_start(config)
  processes.require_same("parts", {"--only": list(parts)})
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )
  with only_run(workdir):
    return _run_study(config, workdir, parts, stop or StopSignal())


def _run_study(
  config: Config, workdir: Path, parts: Sequence[str], stop: StopSignal
) -> dict[str, Finding]:
  """See `run_study`."""
  processes.require_shared(workdir)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone, path = open_backbone.study_backbone(config, workdir, mesh, stop)
  config = resolve.with_image_size(config, backbone)
  now = _Study(config, workdir, mesh, backbone, path, stop)
  possible = possible_parts(config)
  points = now.finished(possible)
  _require_data(config, plan.plan(config, parts, points), points)
  found: dict[str, Finding] = {}
  for part in parts:
    while planned := plan.next_run(config, part, points):
      points[planned.name] = now.measure(planned, points)
    new = {
      other: now.find(part, points)
      if other == part
      else now.recall(other, points)
      for other in possible
    }
    new = {other: finding for other, finding in new.items() if finding}
    for other, finding in new.items():
      if finding != found.get(other):
        processes.on_process_0(functools.partial(plot, workdir, other, finding))
    found = new
    now.report(found, points)
    for sentence in found[part].sentences:
      logger.info("%s: %s", part, sentence)
  return found


@dataclasses.dataclass(frozen=True)
class _Study:
  """What all parts share.

  Attributes:
    config: of the study.
    workdir: of the study.
    mesh: over which batches are split.
    backbone: of all runs, on the devices of the mesh.
    path: from which runs load it.
    stop: see `run.train_and_evaluate`.
  """

  config: Config
  workdir: Path
  mesh: Mesh
  backbone: Backbone
  path: str
  stop: StopSignal

  def finished(self, parts: Sequence[str]) -> dict[str, list[Point]]:
    """Points of all runs of some parts that need not be run."""
    found = plan.finished_runs(
      self.config,
      parts,
      self.workdir,
      self.path,
      self.backbone.fingerprint,
    )
    for name in found:  # of one that was killed once it was finished
      execute.remove_checkpoints(plan.directory_of(self.workdir, name))
    return {name: ended.points for name, ended in found.items()}

  def measure(self, planned: Run, points: Points) -> list[Point]:
    """Runs one run, once what it reads is there."""
    config = plan.config_for(self.config, planned, self.path, points)
    if config is None:
      logger.warning("run %s: what it would read diverged", planned.name)
      return execute.lost_points(planned)
    directory = plan.directory_of(self.workdir, planned.name)
    return execute.measure(
      config, planned, directory, self.backbone.fingerprint, self.stop
    )

  def find(self, part: str, points: Points) -> Finding:
    """What the points say on a part; the runs that it needs are finished."""
    return self._find(part, points, measures=True)

  def recall(self, part: str, points: Points) -> Finding | None:
    """The same where nothing has to be run or measured for it, else None."""
    runs = plan.runs_of(self.config, part, points)
    if any(planned.name not in points for planned in runs):
      return None
    return self._find(part, points, measures=False)

  def report(self, found: dict[str, Finding], points: Points) -> None:
    """Writes the report, without its plots."""
    runs = plan.plan(self.config, list(found), points)
    shown = [point for run in runs for point in points[run.name]]
    processes.on_process_0(
      lambda: write(self.workdir, self.config, found, shown)
    )

  def _find(self, part: str, points: Points, measures: bool) -> Finding | None:
    """What the points of its runs say; None where that has to be measured."""
    config, vit = self.config, self.backbone.config
    runs = plan.runs_of(config, part, points)
    mine = [point for planned in runs for point in points[planned.name]]
    if part == "costs":
      return self._costs(measures)
    if part == "interference":
      return self._interference(mine, measures)
    if part == "adapters":
      return budget.adapters(config, vit, mine)
    simple = {
      "table2": analysis.table2,
      "sensitivity": analysis.sensitivity,
      "cells": analysis.cells,
      "placement": analysis.placement,
      "extension": together.extension,
    }
    return simple[part](config, mine)

  def _costs(self, measures: bool) -> Finding | None:
    vit, task = self.backbone.config, self.config.task
    regimes = regimes_of(self.config, "costs")

    def measure() -> list[dict[str, Any]]:
      return [
        dataclasses.asdict(
          costs.cost_of(vit, name, task.cells, task.bottleneck)
        )
        for name in regimes
      ]

    found = _remembered(
      self.workdir / "costs.json",
      {
        "regimes": regimes,
        "backbone": dataclasses.asdict(vit),
        "cells": task.cells,
        "bottleneck": task.bottleneck,
        "hardware": hardware(),
      },
      measure if measures else None,
    )
    if found is None:
      return None
    plain, _ = costs.flops(vit, "head", 0, 0)
    return budget.costs(vit, [Cost(**values) for values in found], plain)

  def _interference(
    self, points: Sequence[Point], measures: bool
  ) -> Finding | None:
    """Evaluates tasks with the memories of others beside them."""
    config, where = self.config, self.config.data
    file = self.workdir / "interference.json"
    if not (measures or processes.broadcast_from_process_0(file.exists())):
      return None
    naive = self._best_tasks(points, "memory")
    masked = self._best_tasks(points, "memory_masked")
    if not (naive and masked):
      return together.interference(config, (), ())

    def measure() -> dict[str, Any]:
      source = datasets.open_split(
        where, where.test, config.stall_timeout, config.trust_data_code
      )
      options = {"batch_size": config.batch_size_eval, "mesh": self.mesh}
      return {
        "naive": interference.naive_accuracies(
          self.backbone, naive, source, **options
        ),
        "masked": interference.masked_accuracies(
          self.backbone, masked, source, **options
        ),
      }

    found = _remembered(
      file,
      {
        "tasks": [task.digest for task in (*naive, *masked)],
        "data": [where.name, where.test],
        "dtype": config.dtype,
      },
      measure if measures else None,
    )
    if found is None:
      return None
    return together.interference(config, found["naive"], found["masked"])

  def _best_tasks(self, points: Sequence[Point], regime: str) -> list[Task]:
    """The first task and the others; none where one of them diverged."""
    tasks = []
    for name in data_sets(self.config):
      some = select(
        points,
        regime=regime,
        data=name,
        cells=self.config.task.cells,
        seed=self.config.study.seeds[0],
      )
      point = best(some)
      if point is None:
        return []
      tasks.append(store.load_task(point.task, self.backbone))
    return tasks


def _require_data(config: Config, runs: Sequence[Run], points: Points) -> None:
  """Opens what runs will read: a wrong split must not cost those before it."""
  splits = {}
  for planned in runs:
    if planned.name not in points:
      where = data_sets(config)[planned.data]
      tested = [where.test] if planned.tested else []
      for split in (where.train, where.validation, *tested):
        splits[where, split] = None
  for where, split in splits:
    datasets.open_split(
      where, split, config.stall_timeout, config.trust_data_code
    )


def _remembered(
  file: Path, what: dict[str, Any], measure: Callable[[], Any] | None
) -> Any:
  """What was measured before, or is measured now.

  Args:
    file: that remembers it.
    what: it is of; what was measured of anything else does not count.
    measure: what JSON can hold; None: only what was measured before counts.

  Returns:
    What was measured, as JSON gives it back; None where nothing was.
  """
  # Hosts may differ, as in their number of cores: what the first is counts.
  what = processes.broadcast_from_process_0(json.loads(json.dumps(what)))
  known = processes.on_process_0(
    lambda: files.read_object(file, "what", "found") if file.exists() else None
  )
  if known and known["what"] == what:
    return known["found"]
  if measure is None:
    return None
  found = json.loads(json.dumps(measure()))
  files.write_json(file, {"what": what, "found": found})
  return found
