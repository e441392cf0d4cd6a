"""One place for defaults; what is not known is refused."""

import json

import ml_collections
import pytest

from configs import base
from memory_vit import config as config_lib
from memory_vit.errors import ConfigError


def changed(**changes):
  values = base.get_config()
  with values.unlocked():
    values.update_from_flattened_dict(
      {key.replace("__", "."): value for key, value in changes.items()}
    )
  return config_lib.from_dict(values.to_dict())


def test_base_is_the_defaults():
  assert changed() == config_lib.Config()


def test_round_trip_through_json():
  config = changed(task__attends_to=("x", "y"), learning_rate=1)
  values = json.loads(json.dumps(config_lib.to_dict(config)))
  assert config_lib.from_dict(values) == config
  assert config.task.attends_to == ("x", "y")
  assert config.learning_rate == 1.0


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"regime": "memory_maskd"}, "config.regime is 'memory_maskd', expected"),
    ({"dtype": "float16"}, "config.dtype"),
    ({"learning_rate": float("nan")}, "positive number"),
    ({"learning_rate": 0.0}, "positive number"),
    ({"total_steps": 0}, "config.total_steps is 0, expected at least 1"),
    ({"optim__warmup": 500.0}, "share of the steps"),
    ({"optim__accumulation_steps": 3}, "does not divide"),
    ({"task__cells": -1}, "config.task.cells"),
    ({"data__train_crop": "inceptoin"}, "config.data.train_crop"),
    ({"pretrain__variant": "Micro/2"}, "config.pretrain.total_steps"),
  ],
)
def test_values_that_cannot_be(changes, message):
  with pytest.raises(ConfigError, match=message):
    changed(**changes)


def test_unknown_and_missing_keys_and_wrong_types():
  values = config_lib.to_dict(config_lib.Config())
  with pytest.raises(ConfigError, match=r"unknown keys \['lr'\]"):
    config_lib.from_dict({**values, "lr": 0.1})
  with pytest.raises(
    ConfigError, match=r"config.task: .*unknown keys \['cell'\]"
  ):
    config_lib.from_dict({**values, "task": {**values["task"], "cell": 1}})
  with pytest.raises(ConfigError, match=r"missing keys \['seed'\]"):
    config_lib.from_dict({k: v for k, v in values.items() if k != "seed"})
  with pytest.raises(ConfigError, match="config.seed is '1', expected"):
    config_lib.from_dict({**values, "seed": "1"})


def test_a_misspelt_override_fails():
  with pytest.raises(AttributeError):
    base.get_config().learning_rat = 0.1
  assert isinstance(base.get_config(), ml_collections.ConfigDict)
