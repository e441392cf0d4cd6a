"""Train and measure many named runs in one directory, each of them once.

A list of runs is a `Plan`: a function from the results so far to all its runs,
so a run may depend on the results of earlier ones. The engine asks it again
after each finished run, until it names no new one. The same command resumes an
interrupted list.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import memory_vit as mv
from memory_vit.config import data_seed
from memory_vit.data import data_differences, open_run_split
from memory_vit.errors import DivergedError
from memory_vit.runtime import (
  StopSignal,
  on_process_0,
  only_run,
  require_same,
)
from memory_vit.train import run_differences, shared_backbone
from studies import record as files
from studies.record import Record

# A child of the logger that commands show.
logger = logging.getLogger("memory_vit.studies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of a list.

  Attributes:
    name: of its directory, below WORKDIR/runs; "cifar/head/search".
    configure: returns its configuration; None until the runs that it depends on
      have finished.
    kind: forecasts assume the same duration for runs of one kind; by default
      the name.
  """

  name: str
  configure: Callable[[], mv.Config] | None
  kind: str = ""

  @property
  def kind_or_name(self) -> str:
    """The name of its kind in a forecast."""
    return self.kind or self.name

  def config(self) -> mv.Config:
    """The configuration; an assertion fails if `configure` is None."""
    assert self.configure, f"{self.name} waits for other runs"
    return self.configure()


Results = dict[str, mv.RunResult]
Plan = Callable[[Mapping[str, mv.RunResult]], Sequence[Run]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """The directory of a list of runs; all processes call every method.

  Attributes:
    config: for the runs, with the options that the backbone determines.
    workdir: of the list.
    backbone: of all runs, on the devices.
    stop: passed to the runs.
  """

  config: mv.Config
  workdir: Path
  backbone: mv.Backbone
  stop: StopSignal | None = None

  def finished(self, plan: Plan) -> Results:
    """Find the runs that were finished with this configuration.

    Raises:
      MemoryVitError: if the data of such a run have changed since.
    """
    results: Results = {}
    seen: set[str] = set()
    compared: set[str] = set()
    while new := [run for run in _ready(plan, results) if run.name not in seen]:
      for run in new:
        seen.add(run.name)
        config, found = run.config(), self._result_of(run.name)
        if found and not self._differences(config, run.name, found):
          self._require_same_data(config, run.name, found, compared)
          self._remove_states(run.name)  # if the run was killed before that
          results[run.name] = found
    return results

  def train(self, plan: Plan, results: Results) -> None:
    """Train the unfinished runs of a plan in its order, into `results`.

    Raises:
      MemoryVitError: as `mv.train_and_evaluate`, or if a run was finished with
        another configuration.
      Interrupted: if `stop` was requested.
    """
    while left := [
      run for run in _ready(plan, results) if run.name not in results
    ]:
      every, run = plan(results), left[0]
      done = sum(run.name in results for run in every)
      logger.info("run %d of %d: %s", done + 1, len(every), run.name)
      results[run.name] = self.finish(run)

  def finish(self, run: Run) -> mv.RunResult:
    """Train or resume a run; only read the result of a finished one.

    A run whose trials all diverged is finished: its result has no tasks.

    Raises:
      MemoryVitError: as `train`.
      Interrupted: if `stop` was requested.
    """
    config = run.config()
    if found := self._result_of(run.name):
      if lines := self._differences(config, run.name, found):
        raise mv.MemoryVitError(
          f"the run {run.name} was finished with another configuration. Use "
          "that one, or another --workdir.\n  " + "\n  ".join(lines)
        )
      return found
    directory = files.directory_of(self.workdir, run.name)
    began = time.perf_counter()
    try:
      mv.train_and_evaluate(config, directory, self.stop)
    except DivergedError as error:
      logger.warning("%s", error)
      seconds = round(time.perf_counter() - began, 2)
      diverged = mv.RunResult(wall_seconds=seconds)
      backbone = dataclasses.replace(
        diverged.backbone, fingerprint=self.backbone.fingerprint
      )
      diverged = dataclasses.replace(diverged, backbone=backbone)
      self.write(f"runs/{run.name}/{files.DIVERGED}", diverged.to_json())
    self._remove_states(run.name)
    found = self._result_of(run.name)
    if found is None:
      raise mv.MemoryVitError(
        f"{directory} has lost the result of its run. Give the same command "
        "again."
      )
    return found

  def measure_once(
    self, name: str, key: Callable[[], Any], measure: Callable[[], Any]
  ) -> None:
    """Write measurements to WORKDIR/NAME, unless it has those of this key.

    Args:
      name: of the file.
      key: returns everything that the numbers depend on; called by process 0.
      measure: returns the numbers; called by all processes.

    Raises:
      Interrupted: if `stop` was requested.
    """
    file, now = self.workdir / name, on_process_0(key)
    if on_process_0(lambda: files.read_measured(file, now)) is None:
      if self.stop:
        self.stop.check()
      self.write(name, {"what": now, "found": measure()})

  def write(self, name: str, values: Any) -> None:
    """Write WORKDIR/NAME as JSON, by process 0."""
    on_process_0(lambda: files.write_json(self.workdir / name, values))

  def report(
    self,
    write_report: Callable[[Path], None],
    results: Mapping[str, mv.RunResult],
    *,
    command: str,
    config: mv.Config,
    options: Mapping[str, Any],
  ) -> None:
    """Write `record.json`, and make the report from it.

    Args:
      write_report: receives the directory; reads only files in it.
      results: of the runs that were finished with this configuration.
      command: for the report.
      config: as given by the user; the options that the backbone determines are
        added.
      options: of the list itself, as JSON values.
    """
    record = Record(
      command=command,
      hardware=hardware(),
      config=dataclasses.replace(self.config, backbone=config.backbone),
      backbone=self.backbone.config,
      fingerprint=self.backbone.fingerprint,
      options=options,
      runs=[*results],
    )

    def write() -> None:
      record.write(self.workdir)
      write_report(self.workdir)

    on_process_0(write)
    logger.info("the report is %s", self.workdir / "report.md")

  def _result_of(self, name: str) -> mv.RunResult | None:
    """The result of a finished run, read by process 0."""

    def read() -> Any:
      found = files.load_run_result(self.workdir, name)
      return found and found.to_json()

    values = on_process_0(read)
    return values and mv.RunResult.from_json(values)

  def _differences(
    self, config: mv.Config, name: str, found: mv.RunResult
  ) -> list[str]:
    directory = files.directory_of(self.workdir, name)
    return on_process_0(
      lambda: run_differences(config, directory, found, self.backbone)
    )

  def _require_same_data(
    self, config: mv.Config, name: str, found: mv.RunResult, compared: set[str]
  ) -> None:
    """Compare the data once for all runs that share them; that is slow."""
    keys = [_data_key(config, role) for role in found.data]
    key = json.dumps([keys, dict(found.data)])
    if key in compared:
      return
    compared.add(key)
    directory = files.directory_of(self.workdir, name)
    if lines := data_differences(config, directory, found.data):
      raise mv.MemoryVitError(
        f"the data are not those of the finished run {name}. Restore them, or "
        "use another --workdir.\n  " + "\n  ".join(lines)
      )

  def _remove_states(self, name: str) -> None:
    """Remove the checkpoints: those of `full` hold several backbones each."""
    states = files.directory_of(self.workdir, name) / "checkpoints"
    on_process_0(lambda: shutil.rmtree(states, ignore_errors=True))


def open_grid(
  config: mv.Config, workdir: Path, stop: StopSignal | None = None
) -> Grid:
  """Open the backbone that all runs share.

  Raises:
    MemoryVitError: as `shared_backbone`.
  """
  backbone, settled = shared_backbone(config, workdir)
  return Grid(config=settled, workdir=workdir, backbone=backbone, stop=stop)


@contextlib.contextmanager
def opened(
  config: mv.Config,
  workdir: Path,
  options: Mapping[str, Any],
  stop: StopSignal | None = None,
) -> Iterator[Grid]:
  """Open a grid, and lock its directory until the end.

  Args:
    config: of all runs.
    workdir: of the list.
    options: of the list itself, as JSON values; equal on all processes.
    stop: passed to the runs.

  Raises:
    MemoryVitError: if processes differ, or another one uses the directory.
  """
  require_same("list of runs", options)
  grid = open_grid(config, workdir, stop)
  # Each run also has a lock of its own.
  with only_run(workdir / "runs"):
    yield grid


def finished_before(
  config: mv.Config, workdir: Path, plan_of: Callable[[mv.Config], Plan]
) -> tuple[Plan, Results]:
  """The plan of a list and its finished runs; creates no file.

  Args:
    config: as given by the user.
    workdir: of the list.
    plan_of: returns the plan for the configuration of the runs.
  """
  made = config.backbone.startswith("random:")
  known = (workdir / "backbone.npz").exists() if made else workdir.exists()
  if not on_process_0(lambda: known):
    return plan_of(config), {}
  grid = open_grid(config, workdir)
  plan = plan_of(grid.config)
  return plan, grid.finished(plan)


def require_data(
  plan: Plan, results: Results, *, prepared: bool = False
) -> None:
  """Open the splits of all unfinished runs, so that a wrong one fails first.

  Args:
    plan: of the runs.
    results: of the finished ones, whose data are not opened.
    prepared: forbid downloads.

  Raises:
    DataError: for a split that cannot be opened.
  """
  opened = set()
  for run in _ready(plan, results):
    config = run.config() if run.name not in results else None
    for role in ("train", "validation", "test"):
      if config and getattr(config.data, role):
        key = json.dumps(_data_key(config, role))
        if key not in opened:
          open_run_split(config, role, prepared=prepared)
        opened.add(key)


def forecast(plan: Plan, results: Results) -> str:
  """List the runs, and estimate the rest from finished runs of each kind."""
  runs = plan(results)
  left = [run for run in runs if run.name not in results]
  lines = [f"{'' if r in left else 'finished':8}  {r.name}" for r in runs]
  lines += ["", f"{len(runs)} runs, {len(runs) - len(left)} of them finished."]
  seconds: dict[str, list[float]] = {}
  for run in runs:
    if run.name in results:
      took = results[run.name].wall_seconds
      seconds.setdefault(run.kind_or_name, []).append(took)
  known = [run for run in left if run.kind_or_name in seconds]
  if known:
    total = sum(statistics.mean(seconds[run.kind_or_name]) for run in known)
    lines.append(
      f"About {duration(total)} left for {len(known)} runs, by the time that "
      "finished ones of the same kind took."
    )
  if new := sorted({run.kind_or_name for run in left} - {*seconds}):
    lines.append(
      f"No run has finished yet of: {', '.join(new)}; `memory-vit train "
      "--dry_run` times a step."
    )
  return "\n".join(lines)


def duration(seconds: float) -> str:
  """75 -> "0:01:15"."""
  return str(datetime.timedelta(seconds=round(seconds)))


def _ready(plan: Plan, results: Results) -> list[Run]:
  return [run for run in plan(results) if run.configure]


def _data_key(config: mv.Config, role: str) -> list[Any]:
  """What distinguishes a split from others."""
  data = config.data
  key: list[Any] = [data.name, data.dir, data.label, getattr(data, role)]
  if role == "train" and (data.per_class or data.first):
    key += [data.per_class, data.first, data_seed(config)]
  return key


def hardware() -> str:
  """Devices and versions, for the report."""
  devices = jax.devices()
  return (
    f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )
