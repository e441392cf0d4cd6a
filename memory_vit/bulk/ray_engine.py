"""Make the shards of a bulk run on a Ray cluster, by Ray Data.

The unit of work is a shard, not an image: a row of the data set is the number
of a shard, and the class that `map_batches` calls writes that shard. If Ray
Data repeats the work of a dead worker, finished shards are skipped, and others
are written again under the same name: no row is lost or duplicated.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memory_vit.bulk import make_shards, shard_file
from memory_vit.bulk import plan as plans
from memory_vit.bulk.plan import Plan
from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime import messages
from memory_vit.runtime.messages import escaped, first_line, shortened

# Bytes of a local cluster's object store, which only holds shard numbers.
_OBJECT_STORE = 200 * 2**20
# Maximum number of seconds to start a local cluster: twice Ray's default, in
# case the machine is busy. A longer limit would delay the error if Ray's node
# process (raylet) died at the start.
_PATIENCE = "60"
# Number of attempts to reach a cluster (about 40 s each). Ray's default is 20.
_TRIES = "2"
# Maximum number of seconds until all workers have resources and a model. The
# limit leaves time for a cluster to grow. By default, Ray Data waits forever.
_MOST_WAIT = 600
# Maximum number of workers that may die while making the same shard. Without
# this limit, Ray Data would repeat the work of a dead worker forever.
_MOST_TRIES = 10


@dataclasses.dataclass(frozen=True)
class RayEngine:
  """An `Engine` that makes shards on a Ray cluster."""

  workers: int  # processes, each with its own model
  worker_cpus: float = 0  # CPUs reserved for each worker; 0: Ray's default
  worker_gpus: float = 0  # GPUs reserved for each worker, or a fraction of one
  # Address of the cluster; "auto" for the cluster of this machine; "" for the
  # address in RAY_ADDRESS or, if RAY_ADDRESS is not set, a new local cluster.
  address: str = ""

  def __call__(
    self,
    plan: Plan,
    folder: Path,
    job: Any,
    missing: Sequence[int],
    count: Callable[[int], None],
  ) -> None:
    if not missing:
      return
    workers = min(self.workers, len(missing))
    self._require_cpus(workers)
    ray = self._connected()
    try:
      context = ray.data.DataContext.get_current()
      context.enable_progress_bars = False
      context.print_on_execution_start = False
      # Hand out later shards even while an earlier shard is repeated.
      context.execution_options.preserve_order = False
      context.wait_for_min_actors_s = _MOST_WAIT
      shards = ray.data.from_items(
        [{"shard": i} for i in missing], override_num_blocks=len(missing)
      ).map_batches(
        ShardWorker,
        fn_constructor_args=(str(folder.absolute()), plan.digest, job),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=self.worker_cpus or None,
        num_gpus=self.worker_gpus or None,
      )
      for row in shards.iter_rows():
        count(len(plan.numbers(int(row["shard"]))))
    except ray.exceptions.RayError as error:
      raise _converted(error) from error
    finally:
      ray.shutdown()

  @property
  def _address(self) -> str | None:
    """Address of a running cluster, or None to start a local cluster."""
    return self.address or os.environ.get("RAY_ADDRESS") or None

  @property
  def _local_cpus(self) -> int:
    """Number of CPUs that a local cluster offers: at least one per worker."""
    return max(self.workers, os.cpu_count() or 1)

  def _require_cpus(self, workers: int) -> None:
    """Raise an error if workers need more CPUs than a local cluster has."""
    needed = workers * self.worker_cpus
    if not self._address and needed > self._local_cpus:
      raise ConfigError(
        f"--worker_cpus={self.worker_cpus:g} for each of {workers} workers is "
        f"{needed:g} CPUs, but the cluster that is started here has "
        f"{self._local_cpus} CPUs. Give fewer CPUs or workers, or the address "
        "of a larger cluster (--ray_address)."
      )

  def _connected(self) -> Any:
    """Return module `ray`, connected to a cluster; usage statistics are off."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", _PATIENCE)
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", _TRIES)
    try:
      ray: Any = importlib.import_module("ray")
      importlib.import_module("ray.data")
    except ModuleNotFoundError as error:
      raise ConfigError(
        messages.not_installed("--engine=ray", error.name, "ray")
      ) from error
    address = self._address
    local = {} if address else {
      "object_store_memory": _OBJECT_STORE, "include_dashboard": False,
      "num_cpus": self._local_cpus,
    }  # fmt: skip
    try:
      with warnings.catch_warnings():
        # JAX warns of forks, but Ray forks only to start another program.
        warnings.simplefilter("ignore", RuntimeWarning)
        ray.init(address=address, logging_level="warning", **local)
    except Exception as error:  # Ray also raises plain `Exception`
      where = f"reached at {address}" if address else "started here"
      raise ConfigError(
        f"--engine=ray: no cluster can be {where}: {first_line(error)}."
      ) from error
    return ray


class ShardWorker:
  """Makes shards in a worker process; Ray Data creates and calls it."""

  def __init__(self, folder: str, digest: str, job: Any) -> None:
    """Load the model of `job`, and the plan in `folder`.

    Raise if the plan's digest is not `digest`, or if the plan states another
    model than the loaded one.
    """
    self._folder = Path(folder)
    self._model = job.open()
    self._plan = plans.read_plan(self._folder)
    if self._plan.digest != digest or self._plan.model != plans.as_json(
      self._model.facts
    ):
      raise TrainingError(
        f"{folder}: a worker found another plan or another model than this run "
        "has. Expected a file system that all workers share, with the same "
        "backbone and tasks at the same paths."
      )
    self._plan.columns.absolute()
    self._plan.inventory.require_seen()

  def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the shards whose numbers are in batch["shard"]; return `batch`."""
    for shard in batch["shard"]:
      self._make(int(shard))
    return batch

  def _make(self, shard: int) -> None:
    """Make a shard, unless it is whole: a dead worker may have finished it."""
    if shard_file.is_whole(self._folder, self._plan, shard):
      return
    tries = self._folder / plans.FOLDER / f"{self._plan.name(shard)}.tries"
    with tries.open("ab") as file:
      if file.tell() >= _MOST_TRIES:
        raise TrainingError(
          f"{_MOST_TRIES} workers have died while making the shard "
          f"{self._plan.name(shard)} (images {self._plan.numbers(shard)}). If "
          "memory ran out, give a smaller --batch_size or --memory_mib."
        )
      file.write(b".")
    make_shards.make_shards(self._plan, self._folder, self._model, [shard])
    tries.unlink(missing_ok=True)


def _converted(error: BaseException) -> MemoryVitError:
  """Convert an error of Ray to a `MemoryVitError` with the worker's message."""
  cause: BaseException | None = error
  while cause:
    if isinstance(cause, MemoryVitError):
      return type(cause)(str(cause))
    cause = getattr(cause, "cause", None) or cause.__cause__
  # Use only the last line: the lines above it are a traceback and notes.
  reason = shortened(escaped(str(error).rstrip().rpartition("\n")[2]))
  return TrainingError(
    f"a worker of Ray failed: {reason} Finished shards are kept: give the same "
    "command again."
  )
