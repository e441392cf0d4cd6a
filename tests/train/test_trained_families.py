"""Every family of backbones is trained on real images, as a run."""

import dataclasses

import jax
import numpy as np
import pytest
from families import QUICK
from marks import NIGHTLY

import memory_vit as mv
from configs import tfds
from memory_vit import config as config_lib
from memory_vit.config import SweepConfig
from memory_vit.errors import TaskError
from memory_vit.model.backbone import init_backbone
from memory_vit.train import run

FAMILIES = {
  "timm": {
    "gelu": "exact", "registers": 1, "pooling": "gap",
    "norm_after_pooling": True,
  },
  "dinov2": {"gelu": "exact", "registers": 4, "mlp": "swiglu"},
  "dinov3": {
    "gelu": "exact", "registers": 4, "positions": "rope",
    "layer_norm_epsilon": 1e-5,
  },
  "siglip": {"class_tokens": 0, "pooling": "map"},
  "clip": {"gelu": "quick", "layer_norm_epsilon": 1e-5, "pre_norm": True},
}  # fmt: skip


def some_first():
  """Those of `families.QUICK`; in `make nightly` all."""
  for name in FAMILIES:
    yield pytest.param(
      name, marks=pytest.mark.slow if name in QUICK else NIGHTLY
    )


@pytest.mark.parametrize("family", [*some_first()])
def test_every_family_trains_above_chance(family, data_dir, tmp_path):
  """A sweep of two trials, in one pass; trained on random features."""
  config = mv.ViTConfig(
    width=96, depth=3, mlp_dim=192, num_heads=3, patch_size=8, image_size=32,
    **FAMILIES[family],
  )  # fmt: skip
  backbone = init_backbone(config, jax.random.key(0))
  mv.save_backbone(backbone, tmp_path / "random.npz")
  assert mv.load_backbone(tmp_path / "random.npz").id == backbone.id
  options = config_lib.from_dict(tfds.get_config("cifar10_small").to_dict())
  data = dataclasses.replace(options.data, dir=str(data_dir / "tfds"))
  result = run.train_and_evaluate(
    dataclasses.replace(
      options, backbone=str(tmp_path / "random.npz"), image_size=0, data=data,
      batch_size=64, total_steps=100, eval_every=50, learning_rate=0.1,
      sweep=SweepConfig(seed=(0, 1), export="all"),
    ),
    tmp_path / "run",
  )  # fmt: skip
  for trial in result.tasks:
    # Of ten classes; a head on a mean colour gets about 0.17.
    assert trial.test.accuracy > 0.2
  tasks = mv.load_tasks(
    [tmp_path / "run" / trial.exported for trial in result.tasks], backbone
  )
  images = np.random.default_rng(0).uniform(-1, 1, (4, 32, 32, 3))
  images = images.astype(np.float32)
  original = mv.forward(backbone, [], images)["backbone"]
  assert np.array_equal(
    mv.forward(backbone, tasks, images)["backbone"], original
  )
  other = dataclasses.replace(config, layer_norm_epsilon=1e-3)
  with pytest.raises(TaskError, match="layer_norm_epsilon"):
    mv.forward(dataclasses.replace(backbone, config=other), tasks, images)
