"""Lists of runs: their shared backbone, and which runs have finished."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from memory_vit.backbones.save import save_backbone
from memory_vit.config import Config, to_dict
from memory_vit.errors import TrainingError
from memory_vit.model.backbone import Backbone
from memory_vit.model.vit_config import RANDOM
from memory_vit.run_result import RunResult
from memory_vit.runtime import files, paths, processes, schema, sharding
from memory_vit.train import settle
from memory_vit.train.inputs import open_backbone
from memory_vit.train.state import what_matters


def shared_backbone(config: Config, workdir: Path) -> tuple[Backbone, Config]:
  """Open the backbone that all runs of a list share; all processes must call.

  Random weights are initialized once, and saved as WORKDIR/backbone.npz.

  Args:
    config: configuration of any run of the list.
    workdir: directory of the list; created if it does not exist.

  Returns:
    The backbone on the devices, and `config` with the file of the backbone and
    the options that the backbone determines: the image size, the GELU, ...

  Raises:
    MemoryVitError: for unusable input.
  """
  settle.require_same_start(config)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )
  processes.require_shared(workdir)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone, file = _open_saved_backbone(config, workdir, mesh)
  settled = settle.with_backbone(config, backbone)
  return backbone, dataclasses.replace(settled, backbone=file)


def run_differences(
  config: Config, workdir: Path, result: RunResult, backbone: Backbone
) -> list[str]:
  """List how a finished run differs from a new run of a configuration.

  Options that do not affect the result may differ. Backbones are compared by
  their weights, not by their files.

  Args:
    config: configuration of the new run.
    workdir: directory of the finished run.
    result: result of the finished run.
    backbone: the backbone that `config` names.

  Returns:
    Lines such as "config.total_steps: 2, now 3"; empty without differences.
  """
  then = files.read_object(workdir / "config.json")
  now = to_dict(settle.with_backbone(config, backbone))
  old_facts, new_facts = (
    {**what_matters(values), **_epochs(values), "backbone": fingerprint}
    for values, fingerprint in (
      (then, result.backbone.fingerprint),
      (now, backbone.fingerprint),
    )
  )
  return schema.differences(old_facts, new_facts)


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return {"config.total_steps": "2 epochs"} if `values["epochs"]` is 2.

  This text replaces the number of steps when two runs are compared, because the
  number depends on the data. If `values["epochs"]` is 0, return {}.
  """
  epochs = values["epochs"]
  return {"config.total_steps": f"{epochs} epochs"} if epochs else {}


def _open_saved_backbone(
  config: Config, workdir: Path, mesh: Mesh
) -> tuple[Backbone, str]:
  """Return (backbone, name or path by which each run loads this backbone).

  Random weights are saved to a file, because runs with different seeds would
  initialize different weights.
  """
  backbone = open_backbone(config, mesh)
  file = workdir / "backbone.npz"
  if not config.backbone.startswith(RANDOM):
    return backbone, config.backbone
  host = dataclasses.replace(backbone, params=sharding.to_host(backbone.params))

  def save() -> None:
    if not file.exists():
      save_backbone(host, file)

  processes.on_process_0(save)
  saved = dataclasses.replace(config, backbone=str(file))
  if open_backbone(saved, mesh).fingerprint != backbone.fingerprint:
    raise TrainingError(
      f"the weights in {file} differ from those of the backbone "
      f"{config.backbone!r} with config.seed {config.seed}. Give the options "
      "that the file was made with, or another --workdir."
    )
  return backbone, str(file)
