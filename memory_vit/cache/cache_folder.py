"""Folder on disk of cached rows, named by what the rows depend on."""

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

with epy.lazy_imports():  # TensorFlow
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

  `files` is the digest of the files of the split.
  """
  split = plan.examples.split
  found = split.data_files
  if not found.files and found.facts.get("version") == "":
    raise ConfigError(
      f"config.cache.where is 'disk', but {split} comes from Python "
      "without a version, so that later runs could not tell it from others: "
      "give it one, or expected 'host' or 'device'."
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
    # The bits of a row depend on the program, which is one for each batch.
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
  """Equal dependencies have equal names."""
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def root_of(config: Config) -> Path:
  if config.cache.dir:
    return paths.local(config.cache.dir, "config.cache.dir")
  root = os.environ.get("MEMORY_VIT_CACHE") or "~/.cache/memory_vit"
  return paths.local(root, "MEMORY_VIT_CACHE") / "rows"


@contextlib.contextmanager
def locked(folder: Path, stop: StopSignal) -> Iterator[None]:
  """Allow one run at a time to fill a folder; all processes must call.

  Process 0 holds the lock for its whole run. Runs whose folders are on
  different disks compute equal rows twice.
  """

  def wait(owner: str) -> None:
    logger.info("waiting for %s, which fills the cache", owner or "another run")
    end = time.monotonic() + 5
    while time.monotonic() < end:
      if jax.process_count() == 1:  # else all would have to ask
        stop.check()
      time.sleep(0.2)

  def enter() -> None:
    held = lock.one_at_a_time(folder / ".lock", wait, "config.cache.dir")
    stack.enter_context(held)

  with contextlib.ExitStack() as stack:
    processes.on_process_0(enter)
    yield
