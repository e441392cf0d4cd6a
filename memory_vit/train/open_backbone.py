"""The backbone that a configuration names, on the devices."""

import dataclasses
import logging
from pathlib import Path

import jax
from jax.sharding import Mesh

from memory_vit.backbones.load import read_published, to_backbone
from memory_vit.backbones.save import save_backbone
from memory_vit.config import Config
from memory_vit.errors import TrainingError
from memory_vit.model.backbone import Backbone, init_backbone
from memory_vit.model.vit_config import RANDOM, vit_config
from memory_vit.runtime import dtypes, processes, sharding
from memory_vit.train import settle

logger = logging.getLogger(__name__)


def open_backbone(
  config: Config, workdir: Path, mesh: Mesh, loaded: Backbone | None = None
) -> Backbone:
  """Load the backbone and put it on the devices.

  Args:
    config: of the run.
    workdir: of the run, where one lies that was pretrained.
    mesh: on whose devices it is put.
    loaded: the backbone, if it is loaded already.
  """
  path = config.backbone
  if config.pretrain.variant:
    path = str(workdir / "backbone.npz")
  if loaded:
    backbone = loaded
  elif path.startswith(RANDOM):
    backbone = init_backbone(
      vit_config(
        path.removeprefix(RANDOM),
        image_size=config.image_size,
        dtype=dtypes.resolve(config.dtype),
        gelu=settle.made_gelu(config),
      ),
      jax.random.key(config.seed),
    )
  else:
    # In float32: the regime `full` trains these weights.
    backbone = to_backbone(
      read_published(path),
      config.image_size or None,
      config.dtype,
      gelu=settle.stated_gelu(config),
    )
  logger.info(
    "backbone %s: %s, %d px, fingerprint %s",
    path, backbone.config.variant, backbone.config.image_size,
    backbone.fingerprint[:16],
  )  # fmt: skip
  params = sharding.put_backbone(backbone.params, mesh)
  return dataclasses.replace(backbone, params=params)


def open_saved_backbone(
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
