"""Many named runs in one directory: planned, found or trained, and measured.

A list of runs is a `Plan`: a function from the results by now to all its runs.
What is finished goes in, and what is to be done comes out, until there is
nothing new: so a run may depend on the results of earlier ones. Each run is
trained once; the same command resumes what was interrupted.
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

# Below that of the package, whose lines a command shows.
logger = logging.getLogger("memory_vit.studies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of a list.

  Attributes:
    name: of its directory, below WORKDIR/runs; "cifar/head/search".
    configure: makes its configuration; None as long as runs that it depends on
      have not finished.
    kind: runs of one kind take about the same time; "" is one of its own.
  """

  name: str
  configure: Callable[[], mv.Config] | None
  kind: str = ""

  @property
  def kind_or_name(self) -> str:
    """What it is listed under in a forecast."""
    return self.kind or self.name

  def config(self) -> mv.Config:
    """The configuration, of a run that is ready."""
    assert self.configure, f"{self.name} waits for other runs"
    return self.configure()


Results = dict[str, mv.RunResult]
Plan = Callable[[Mapping[str, mv.RunResult]], Sequence[Run]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """The directory of a list of runs; every process calls all methods.

  Attributes:
    config: for the runs, with what the backbone settles.
    workdir: of the list.
    backbone: of all runs, on the devices.
    stop: is handed to the runs.
  """

  config: mv.Config
  workdir: Path
  backbone: mv.Backbone
  stop: StopSignal | None = None

  def finished(self, plan: Plan) -> Results:
    """Find the runs that earlier calls have finished with this configuration.

    Raises:
      MemoryVitError: where their data are not those that are there now.
    """
    results: Results = {}
    seen: set[str] = set()
    compared: set[str] = set()
    while new := [run for run in _ready(plan, results) if run.name not in seen]:
      for run in new:
        seen.add(run.name)
        config, found = run.config(), self._ending(run.name)
        if found and not self._differences(config, run.name, found):
          self._require_same_data(config, run.name, found, compared)
          self._remove_states(run.name)  # of one killed once it was finished
          results[run.name] = found
    return results

  def train(self, plan: Plan, results: Results) -> None:
    """Train what is left of a plan, in its order, into `results`.

    Raises:
      MemoryVitError: as `mv.train_and_evaluate`; where another configuration
        has finished a run there.
      Interrupted: where `stop` says so.
    """
    while left := [
      run for run in _ready(plan, results) if run.name not in results
    ]:
      every, run = plan(results), left[0]
      done = sum(run.name in results for run in every)
      logger.info("run %d of %d: %s", done + 1, len(every), run.name)
      results[run.name] = self.finish(run)

  def finish(self, run: Run) -> mv.RunResult:
    """Train a run, or resume it; a finished one is only read.

    A run all of whose trials diverge has finished: its result has no tasks.
    """
    config = run.config()
    if found := self._ending(run.name):
      if lines := self._differences(config, run.name, found):
        raise mv.MemoryVitError(
          f"the run {run.name} was finished with another configuration. Give "
          "that one, or another --workdir.\n  " + "\n  ".join(lines)
        )
      return found
    directory = files.directory_of(self.workdir, run.name)
    began = time.perf_counter()
    try:
      mv.train_and_evaluate(config, directory, self.stop)
    except DivergedError as error:
      logger.warning("%s", error)
      diverged = {
        "backbone": {"fingerprint": self.backbone.fingerprint},
        "wall_seconds": round(time.perf_counter() - began, 2),
      }
      self.write(f"runs/{run.name}/{files.DIVERGED}", diverged)
    self._remove_states(run.name)
    found = self._ending(run.name)
    if found is None:
      raise mv.MemoryVitError(
        f"{directory} does not hold the result of its run any more. Give the "
        "same command again."
      )
    return found

  def measure_once(
    self, name: str, key: Callable[[], Any], measure: Callable[[], Any]
  ) -> None:
    """Measure into WORKDIR/NAME, unless it holds this already.

    Args:
      name: of the file.
      key: returns all that the numbers depend on; process 0 alone calls it.
      measure: returns the numbers.
    """
    file, now = self.workdir / name, on_process_0(key)
    if on_process_0(lambda: files.read_measured(file, now)) is None:
      if self.stop:
        self.stop.check()
      self.write(name, {"what": now, "found": measure()})

  def write(self, name: str, values: Any) -> None:
    """Write WORKDIR/NAME, as JSON."""
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
    """Write the record of the list, and have the report made of it.

    Args:
      write_report: is given the directory, and reads files in it alone.
      results: of the runs that this configuration has finished.
      command: for the report.
      config: as it was given; what the backbone settles is added.
      options: of the study itself, which JSON can hold.
    """
    record = Record(
      command=command,
      hardware=hardware(),
      config=dataclasses.replace(
        self.config, backbone=config.backbone, pretrain=config.pretrain
      ),
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

  def _ending(self, name: str) -> mv.RunResult | None:
    """How a run ended, as process 0 sees it; None of an unfinished one."""

    def read() -> Any:
      found = files.load_ending(self.workdir, name)
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
    """Refuse a finished run whose data are others now.

    Each look takes time: of runs on the same data one is compared.
    """
    keys = [_data_key(config, role) for role in found.data]
    key = json.dumps([keys, dict(found.data)])
    if key in compared:
      return
    compared.add(key)
    directory = files.directory_of(self.workdir, name)
    if lines := data_differences(config, directory, found.data):
      raise mv.MemoryVitError(
        f"the data are not those of the finished run {name}. Put those back, "
        "or give another --workdir.\n  " + "\n  ".join(lines)
      )

  def _remove_states(self, name: str) -> None:
    """Remove the saved states of a finished run.

    With its two states, each with the best so far, a run of the regime `full`
    holds a backbone many times over; its result and its tasks stay.
    """
    states = files.directory_of(self.workdir, name) / "checkpoints"
    on_process_0(lambda: shutil.rmtree(states, ignore_errors=True))


def open_grid(
  config: mv.Config, workdir: Path, stop: StopSignal | None = None
) -> Grid:
  """Open, or make, the backbone that all runs share; see `shared_backbone`."""
  backbone, settled = shared_backbone(config, workdir, stop)
  return Grid(config=settled, workdir=workdir, backbone=backbone, stop=stop)


@contextlib.contextmanager
def opened(
  config: mv.Config,
  workdir: Path,
  options: Mapping[str, Any],
  stop: StopSignal | None = None,
) -> Iterator[Grid]:
  """Open a grid, and keep other processes out of its directory until the end.

  Args:
    config: of all runs.
    workdir: of the list.
    options: of the list itself, as JSON values: equal on all processes.
    stop: is handed to the runs.

  Raises:
    MemoryVitError: where processes differ, or another one uses the directory.
  """
  require_same("list of runs", options)
  grid = open_grid(config, workdir, stop)
  # Each run, and the training of a backbone, has a lock of its own beside this.
  with only_run(workdir / "runs"):
    yield grid


def finished_before(
  config: mv.Config, workdir: Path, plan_of: Callable[[mv.Config], Plan]
) -> tuple[Plan, Results]:
  """The plan of a list and its finished runs, for a dry run: nothing is made.

  Args:
    config: as it was given.
    workdir: of the list.
    plan_of: makes the plan, from the configuration for the runs.
  """
  made = config.pretrain.variant or config.backbone.startswith("random:")
  known = (workdir / "backbone.npz").exists() if made else workdir.exists()
  if not on_process_0(lambda: known):
    return plan_of(config), {}
  grid = open_grid(config, workdir)
  plan = plan_of(grid.config)
  return plan, grid.finished(plan)


def require_data(
  plan: Plan, results: Results, *, prepared: bool = False
) -> None:
  """Open what runs will read: a wrong split must not cost those before it.

  Args:
    plan: of the runs.
    results: of those that have finished, and read nothing.
    prepared: whether data sets have to be there: nothing is downloaded.
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
  """List the runs, and estimate the time that is left.

  A run is taken to last as long as finished ones of its kind have, on average.
  """
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
  """The runs of a plan whose configuration is known by now."""
  return [run for run in plan(results) if run.configure]


def _data_key(config: mv.Config, role: str) -> list[Any]:
  """What tells a split from others."""
  data = config.data
  key: list[Any] = [data.name, data.dir, data.label, getattr(data, role)]
  if role == "train" and (data.per_class or data.first):
    key += [data.per_class, data.first, data_seed(config)]
  return key


def hardware() -> str:
  """Devices and versions of this call."""
  devices = jax.devices()
  return (
    f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )
