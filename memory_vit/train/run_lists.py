"""What lists of runs need: one backbone for all, and what has finished."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from memory_vit.backbones.save import save_backbone
from memory_vit.config import Config, PretrainConfig, to_dict
from memory_vit.errors import TrainingError
from memory_vit.model.backbone import Backbone
from memory_vit.model.vit_config import RANDOM
from memory_vit.run_result import RunResult
from memory_vit.runtime import files, paths, processes, schema, sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.train import pretrain, resume, run, settle
from memory_vit.train.open_run import open_backbone


def shared_backbone(
  config: Config, workdir: Path, stop: StopSignal | None = None
) -> tuple[Backbone, Config]:
  """Open the backbone that all runs of a list share; all processes must call.

  One that `config.pretrain` describes is trained first, as
  WORKDIR/backbone.npz; random weights are drawn once, and kept there as well.

  Args:
    config: of any run of the list.
    workdir: of the list; it is made where it is not there.
    stop: see `train_and_evaluate`.

  Returns:
    The backbone, on the devices; and the configuration for the runs, which
    names its file and has what it settles: the size of images, the GELU, ...

  Raises:
    MemoryVitError: for what cannot be used.
    Interrupted: where `stop` says so.
  """
  settle.require_same_start(config)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )
  processes.require_shared(workdir)
  if config.pretrain.variant:
    made = workdir / "backbone.npz"
    if processes.on_process_0(made.exists):  # a dry run writes nothing
      pretrain.require_made_by(config, workdir)
    else:
      run.pretrain_backbone(config, workdir, stop)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone, file = _open_saved_backbone(config, workdir, mesh)
  settled = settle.with_backbone(config, backbone)
  return backbone, dataclasses.replace(
    settled, backbone=file, pretrain=PretrainConfig()
  )


def run_differences(
  config: Config, workdir: Path, result: RunResult, backbone: Backbone
) -> list[str]:
  """How a finished run differs from what a configuration would make.

  Options that change no result may differ, and so may the file of the backbone:
  its weights count.

  Args:
    config: of the run as it would be.
    workdir: of the run.
    result: of the run.
    backbone: that `config` names.

  Returns:
    Lines such as "config.total_steps: 2, now 3"; none where nothing differs.
  """
  then = files.read_object(workdir / "config.json")
  now = to_dict(settle.with_backbone(config, backbone))
  found, wanted = (
    {**resume.what_matters(values), **_epochs(values), "backbone": fingerprint}
    for values, fingerprint in (
      (then, result.backbone.fingerprint),
      (now, backbone.fingerprint),
    )
  )
  return schema.differences(found, wanted)


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
  """Length in epochs, if it is given so, in place of steps.

  How many steps these are the run itself finds out, in its own data.
  """
  epochs = values["epochs"]
  return {"config.total_steps": f"{epochs} epochs"} if epochs else {}


def _open_saved_backbone(
  config: Config, workdir: Path, mesh: Mesh
) -> tuple[Backbone, str]:
  """`open_backbone` for a list of runs, and the path from which each loads it.

  Random weights depend on the seed of a run: they are saved once.

  Raises:
    TrainingError: if another configuration has saved others.
  """
  backbone = open_backbone(config, workdir, mesh)
  file = workdir / "backbone.npz"
  if config.pretrain.variant:
    return backbone, str(file)
  if not config.backbone.startswith(RANDOM):
    return backbone, config.backbone
  host = dataclasses.replace(backbone, params=sharding.to_host(backbone.params))

  def save() -> None:
    if not file.exists():
      save_backbone(host, file)

  processes.on_process_0(save)
  saved = dataclasses.replace(config, backbone=str(file))
  if open_backbone(saved, workdir, mesh).fingerprint != backbone.fingerprint:
    raise TrainingError(
      f"{file} is another backbone than {config.backbone!r} of config.seed "
      f"{config.seed}. Give what made it, or another --workdir."
    )
  return backbone, str(file)
