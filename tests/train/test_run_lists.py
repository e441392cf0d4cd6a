"""What lists of runs need: a backbone for all, and what has finished."""

import dataclasses

import pytest
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit.config import Config
from memory_vit.errors import TrainingError
from memory_vit.run_result import BackboneResult, RunResult
from memory_vit.runtime import files
from memory_vit.train import run_differences, shared_backbone


def test_random_backbone_is_shared_by_all_runs(tmp_path):
  """For runs with seeds of their own."""
  config = Config(backbone="random:Micro/2", image_size=8, seed=3)
  first, settled = shared_backbone(config, tmp_path)
  assert settled.backbone == str(tmp_path / "backbone.npz")
  assert (settled.image_size, settled.gelu) == (8, "tanh")
  again, _ = shared_backbone(config, tmp_path)
  assert again.fingerprint == first.fingerprint
  seed_4 = dataclasses.replace(config, seed=4)
  with pytest.raises(TrainingError, match="those of the backbone 'random:"):
    shared_backbone(seed_4, tmp_path)
  # A run loads it, whatever its seed is.
  other = dataclasses.replace(settled, seed=4)
  assert shared_backbone(other, tmp_path)[0].fingerprint == first.fingerprint


def test_only_options_that_change_results_are_compared(tmp_path):
  backbone = tiny_backbone(depth=1)
  config = Config(backbone="a.npz", total_steps=5)
  settled = dict(image_size=8, gelu="tanh", **{"data.eval_crop": "resize"})
  files.write_json(
    tmp_path / "config.json", dataclasses.asdict(config.replaced(settled))
  )
  result = RunResult(
    backbone=BackboneResult(fingerprint=backbone.fingerprint), wall_seconds=1.0
  )

  def differences(found=backbone, **values):
    return run_differences(config.replaced(values), tmp_path, result, found)

  assert differences() == differences(backbone="b.npz", log_every=7) == []
  assert differences(total_steps=6) == ["config.total_steps: 5, now 6"]
  (line,) = differences(epochs=2.0)
  assert line == "config.total_steps: 5, now '2.0 epochs'"
  (line,) = differences(tiny_backbone(seed=1, depth=1))
  assert line.startswith("backbone: ")


def test_read_config_accepts_values_and_flags_of_the_commands():
  config = mv.read_config(
    "tfds:cifar10", {"data.flip": False}, ["--config.seed=3"]
  )
  assert (config.data.name, config.data.flip, config.seed) == (
    "cifar10", False, 3,
  )  # fmt: skip
  for source, values, flags in (
    ("nonesuch", {}, []), ("digits", {"nope": 1}, []),
    ("digits", {"seed": -1}, []), ("digits", {}, ["--nope=1"]),
  ):  # fmt: skip
    with pytest.raises(mv.MemoryVitError):
      mv.read_config(source, values, flags)
