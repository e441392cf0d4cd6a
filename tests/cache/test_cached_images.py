"""Runs whose images are decoded once: `cache.what=images`."""

import dataclasses

import numpy as np
import pytest
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.errors import ConfigError
from memory_vit.model import trees
from memory_vit.train import run


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["cls_masked", "full"])
def test_run_with_cached_images_equals_run_without(regime, tmp_path):
  """The digits are small enough to be cached unresized."""
  mv.save_backbone(tiny_backbone(depth=1), tmp_path / "tiny.npz")
  config = config_lib.Config(
    backbone=str(tmp_path / "tiny.npz"), regime=regime, batch_size=8,
    batch_size_eval=8, total_steps=3,
    data=config_lib.DataConfig(
      name="digits:5-9", train="train[:12]", validation="", test="",
      train_crop="small",
    ),
    task=config_lib.TaskConfig(name="a", cells=0),
  )  # fmt: skip
  run.train_and_evaluate(config, tmp_path / "files")
  cache = config_lib.CacheConfig(what="images")
  run.train_and_evaluate(
    dataclasses.replace(config, cache=cache), tmp_path / "cached"
  )
  frozen = mv.load_backbone(tmp_path / "tiny.npz")
  one, other = (
    trees.flatten(mv.load_task(tmp_path / name / "tasks/a", frozen).params)
    for name in ("files", "cached")
  )
  assert one.keys() == other.keys()
  for name, values in one.items():
    np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_image_cache_is_refused_without_random_crops():
  cache = config_lib.CacheConfig(what="images")
  data = config_lib.DataConfig(train_crop="resize", flip=False)
  with pytest.raises(ConfigError, match="is for random crops, but"):
    config_lib.Config(cache=cache, data=data)


@pytest.mark.parametrize(
  "cache", [{"crops": 2}, {"dtype": "bfloat16"}, {"where": "device"}]
)
def test_image_cache_refuses_options_of_contexts(cache):
  with pytest.raises(ConfigError, match=f"config.cache.{next(iter(cache))} is"):
    config_lib.Config(cache=config_lib.CacheConfig(what="images", **cache))
