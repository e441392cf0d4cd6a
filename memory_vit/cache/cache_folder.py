"""Folder of cached rows on disk, named by a hash of all they depend on."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epy
from jax.sharding import Mesh

from memory_vit.cache.plan import SplitPlan
from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.model.backbone import Backbone
from memory_vit.runtime import lock, paths, processes
from memory_vit.runtime.preemption import StopSignal
from memory_vit.version import __version__

with epy.lazy_imports():  # importing `image_ops` loads TensorFlow
  from memory_vit.data import image_ops

logger = logging.getLogger(__name__)


def dependencies(
  config: Config,
  backbone: Backbone,
  mesh: Mesh,
  plan: SplitPlan,
  files: Mapping[str, str],
) -> dict[str, Any]:
  """Collect all that the rows of a split depend on, as JSON values.

  `files` is the digest of the split's files, see `DataRecord.digests`.
  """
  split = plan.examples.split
  data_files = split.data_files
  if not data_files.files and data_files.facts.get("version") == "":
    raise ConfigError(
      f"config.cache.where is 'disk', but {split} is a Python object "
      "without a version, so later runs could not recognize the data: expected "
      "a version, or config.cache.where 'host' or 'device'."
    )
  leaves = zip(plan.layout.stored, plan.layout.shapes, strict=True)
  return {
    "memory_vit": __version__,
    "what": config.cache.what,
    "row": [[dtype.name, list(shape)] for dtype, shape in leaves],
    "backbone": backbone.fingerprint,
    "model": dataclasses.asdict(backbone.config),
    "data": {
      "name": split.name,
      "split": split.split,
      "size": split.size,
      "kind": split.kind,
      "classes": list(split.class_names),
      "files": files,
    },
    "images": {"role": plan.role, **plan.facts},
    # Rows are bitwise identical only if the same program computes the rows.
    "program": {
      "rows": plan.starts.step,
      "processes": jax.process_count(),
      "mesh": dict(mesh.shape),
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      **image_ops.decoders(),
    },
  }


def name_of(facts: Mapping[str, Any]) -> str:
  """Return a folder name, the same for equal dependencies."""
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def root_of(config: Config) -> Path:
  if config.cache.dir:
    return paths.local(config.cache.dir, "config.cache.dir")
  root = os.environ.get("MEMORY_VIT_CACHE") or "~/.cache/memory_vit"
  return paths.local(root, "MEMORY_VIT_CACHE") / "rows"


@contextlib.contextmanager
def locked(folder: Path, stop: StopSignal) -> Iterator[None]:
  """Let one run at a time fill a folder; all processes must call this.

  Process 0 holds the lock until the `with` block ends. Runs that have folders
  on different disks share no rows: every run computes all rows.
  """

  def wait(owner: str) -> None:
    logger.info("waiting for %s, which fills the cache", owner or "another run")
    end = time.monotonic() + 5
    while time.monotonic() < end:
      # Only process 0 waits here, but `check` must run on all processes. So
      # `check` is called only if there is a single process.
      if jax.process_count() == 1:
        stop.check()
      time.sleep(0.2)

  def enter() -> None:
    held = lock.one_at_a_time(folder / ".lock", wait, "config.cache.dir")
    stack.enter_context(held)

  with contextlib.ExitStack() as stack:
    processes.on_process_0(enter)
    yield
