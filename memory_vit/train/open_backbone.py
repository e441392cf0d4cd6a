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


def study_backbone(
  config: Config, workdir: Path, mesh: Mesh
) -> tuple[Backbone, str]:
  """`open_backbone` for runs with seeds of their own; and what they load.

  Random weights depend on the seed of a run: they are made once, and kept.

  Raises:
    TrainingError: where others were made before.
  """
  backbone = open_backbone(config, workdir, mesh)
  path = study_file(config, workdir)
  if config.backbone.startswith(RANDOM) and not config.pretrain.variant:
    made = Path(path)

    def save() -> None:
      if not made.exists():
        save_backbone(dataclasses.replace(backbone, params=params), made)

    params = sharding.to_host(backbone.params)
    processes.on_process_0(save)
    kept = dataclasses.replace(config, backbone=path)
    found = open_backbone(kept, workdir, mesh)
    if found.fingerprint != backbone.fingerprint:
      raise TrainingError(
        f"{made} is another backbone than {config.backbone!r} of config.seed "
        f"{config.seed}. Give what made it, or another --workdir."
      )
  return backbone, path


def study_file(config: Config, workdir: Path) -> str:
  """What the runs of the study in `workdir` load, or will load."""
  made_here = config.pretrain.variant or config.backbone.startswith(RANDOM)
  return str(workdir / "backbone.npz") if made_here else config.backbone
