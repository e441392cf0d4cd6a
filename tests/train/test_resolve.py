"""What a configuration leaves open becomes a number, once."""

import dataclasses
import types

import psutil
import pytest
from conftest import tiny_backbone

from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import sharding
from memory_vit.train import settle


@pytest.mark.parametrize(
  ("epochs", "examples", "batch_size", "steps"),
  [
    (1.0, 100, 10, 10),
    (1.0, 101, 10, 11),  # every example is seen
    (2.5, 308, 128, 7),
    (0.07, 100, 1, 7),  # 0.07 * 100 is more than 7 in binary
    (1e-5, 3, 128, 1),
    (30.0, 76_128, 512, 4461),
    (-1.0, 5_120, 128, 2_000),  # 50
    (-1.0, 13, 128, 25),  # and never fewer steps
    (5.0, 13, 128, 1),  # unless that is asked for
  ],
)
def test_epochs_become_a_number_of_steps(epochs, examples, batch_size, steps):
  config = Config(epochs=epochs, batch_size=batch_size)
  found = settle.with_steps(config, examples)
  assert found == dataclasses.replace(config, total_steps=steps)
  # Once more is the same, and so is what was recorded, without its epochs.
  assert settle.with_steps(found, examples) == found
  recorded = dataclasses.replace(found, epochs=0.0)
  assert settle.with_steps(recorded, 7 * examples) == recorded


def test_steps_are_unchanged_without_epochs():
  assert settle.with_steps(Config(), 100) == Config()


@pytest.mark.parametrize("given", [0, 12])
def test_image_size_is_that_of_the_backbone(given):
  config = Config(image_size=given)
  found = settle.with_backbone(config, tiny_backbone(image_size=12))
  assert found.image_size == 12


def test_backbone_without_preprocessing_gets_the_defaults():
  """As it was recorded before there was anything to leave to it."""
  found = settle.with_backbone(Config(image_size=8), tiny_backbone())
  assert (found.gelu, found.data.eval_crop) == ("tanh", "resize")
  assert found.upstream.eval_crop == "resize"
  assert settle.with_backbone(found, tiny_backbone()) == found


def test_preprocessing_of_the_backbone_does_not_override_options():
  preprocessing = EvalPreprocessing(image_size=8, interpolation="bicubic")
  backbone = dataclasses.replace(
    tiny_backbone(gelu="exact"), preprocessing=preprocessing
  )
  found = settle.with_backbone(Config(), backbone)
  assert (found.gelu, found.data.eval_crop) == ("exact", "backbone")
  own = dataclasses.replace(Config().data, eval_crop="central")
  found = settle.with_backbone(Config(data=own), backbone)
  assert found.data == own


def test_part_of_a_batch_must_be_a_multiple_of_the_devices(tmp_path):
  config = Config(batch_size=8, batch_size_eval=8).replaced(
    {"data.name": "digits", "optim.accumulation_steps": 2}
  )
  with pytest.raises(
    ConfigError, match="accumulation_steps is 4, expected a multiple of 8, the"
  ):
    settle.require_sound(config, tmp_path, sharding.make_mesh())


@pytest.mark.parametrize("key", ["batch_size", "batch_size_eval"])
def test_batch_that_exceeds_memory_is_refused(key, monkeypatch):
  config = Config(image_size=16, batch_size=1, batch_size_eval=1)
  config = config.replaced({key: 8})
  takes = 8 * 16 * 16 * 3 * 4
  memory = types.SimpleNamespace(total=takes)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
  settle.require_memory(config)
  memory.total -= 1
  with pytest.raises(ConfigError, match=rf"config\.{key} is 8: the images"):
    settle.require_memory(config)


def test_profile_step_is_checked_once_steps_are_known():
  """20,000 steps are the default; of epochs nothing is known before."""
  options = {"epochs": 1.0, "profile_at": 20_001}
  assert Config(**options).epochs == 1.0
  with pytest.raises(ConfigError, match="20001, beyond config.total_steps"):
    Config(**options | {"epochs": 0.0})
