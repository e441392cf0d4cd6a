"""Checks that all processes have the same configuration, code and data."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

from memory_vit.config import Config, to_dict
from memory_vit.data.reader import Reader
from memory_vit.model import trees
from memory_vit.runtime import processes
from memory_vit.train.trainer import Trainer


def require_same_start(config: Config) -> None:
  """Compare configuration, code, versions and devices of all processes.

  Raises:
    ConfigError: on every process, with what differs.
  """
  if jax.process_count() == 1:
    return
  options = trees.flatten(json.loads(json.dumps(to_dict(config))))
  facts = {f"config.{k.replace('/', '.')}": t for k, t in options.items()}
  facts["code of memory_vit (SHA-256)"] = _code_digest()
  for module in (jax, flax, optax, np):
    facts[f"version of {module.__name__}"] = module.__version__
  facts["kind of devices"] = jax.devices()[0].device_kind
  processes.require_same("configuration", facts)


def require_same_data(trainer: Trainer, splits: Mapping[str, Reader]) -> None:
  """Compare backbone, parents, and classes and files of all splits.

  Not the times of files: copies on several hosts differ in these.

  Args:
    trainer: of the run.
    splits: {"train": the split, ..., "upstream": ...}.

  Raises:
    ConfigError: on every process, with what differs.
  """
  if jax.process_count() == 1:
    return
  facts: dict[str, Any] = {"backbone": trainer.backbone.fingerprint}
  for task in trainer.parents:
    facts[f"task {task.spec.name!r}"] = task.digest
  for name, reader in splits.items():
    key = "config.upstream" if name == "upstream" else f"config.data.{name}"
    facts[f"{key}: size"] = reader.size
    facts[f"{key}: classes"] = list(reader.class_names)
    facts[f"{key}: names and sizes of files"] = reader.source.inventory.sizes()
  processes.require_same("data", facts)


def _code_digest() -> str:
  """Of this package as it lies on this host."""
  digest = hashlib.sha256()
  package = Path(__file__).parents[1]
  for file in sorted(package.rglob("*.py")):
    digest.update(file.relative_to(package).as_posix().encode())
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
