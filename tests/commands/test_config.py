"""One place for defaults; what is not known is refused."""

import dataclasses
import json

import ml_collections
import pytest

from configs import base
from memory_vit import config as config_lib
from memory_vit.errors import ConfigError
from memory_vit.runtime import options
from memory_vit.runtime.options import Number, option


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
  config = changed(
    task__attends_to=("x", "y"),
    learning_rate=1,
    sweep__learning_rate=(1, 0.1),
    sweep__overrides=({"optim.momentum": 0.5},),
  )
  values = json.loads(json.dumps(config_lib.to_dict(config)))
  assert config_lib.from_dict(values) == config
  assert config.task.attends_to == ("x", "y")
  assert config.learning_rate == 1.0
  assert config.sweep.learning_rate == (1.0, 0.1)
  assert config.sweep.is_on


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"regime": "memory_maskd"}, "config.regime is 'memory_maskd', expected"),
    ({"dtype": "float16"}, "config.dtype"),
    ({"learning_rate": float("nan")}, "positive number"),
    ({"learning_rate": 0.0}, "positive number"),
    ({"total_steps": 0}, "config.total_steps is 0, expected at least 1"),
    ({"optim__warmup": 500.0}, "share of the steps"),
    ({"image_size": -1}, "config.image_size is -1, expected at least 0"),
    ({"backbone": "random:Ti/16"}, "no image size: set it for 'random:Ti/16'"),
    ({"epochs": -0.5}, "config.epochs is -0.5, expected -1 or at"),
    ({"epochs": float("inf")}, "config.epochs is inf"),
    ({"optim__warmup_steps": -1}, "config.optim.warmup_steps is -1, expected"),
    ({"optim__warmup_steps": 20_001}, "20001, beyond config.total_steps 20000"),
    ({"optim__accumulation_steps": 3}, "is not a multiple of"),
    ({"task__cells": -1}, "config.task.cells"),
    ({"data__train_crop": "inceptoin"}, "config.data.train_crop"),
    ({"optim__momentum": -0.1}, "config.optim.momentum is -0.1, expected"),
    ({"optim__grad_clip": float("nan")}, "config.optim.grad_clip is nan"),
    ({"optim__clip_by": "layer"}, "config.optim.clip_by is 'layer', expected"),
    ({"optim__memory_factor": -1.0}, "config.optim.memory_factor is -1.0"),
    ({"task__memory_std": 0.0}, "config.task.memory_std is 0.0, expected"),
    ({"optim__weight_decay": 0.1}, "which 'sgd' does not use"),
    ({"optim__label_smoothing": 1.0}, "at least 0 and less than 1"),
    ({"data__resize": -1}, "config.data.resize is -1"),
    ({"data__seed": -2}, "config.data.seed is -2, expected at least -1"),
    (
      {"data__resize": 4097},
      "config.data.resize is 4097, expected at least 0 and at most 4,096",
    ),
    (
      {"upstream__resize": 4097},
      "config.upstream.resize is 4097, expected at least",
    ),
    (
      {"image_size": 2049},
      "config.image_size is 2049, expected at least 0 and at most 2,048",
    ),
    ({"data__cache_gib": -1.0}, "config.data.cache_gib"),
    ({"profile_at": 20_001}, "beyond config.total_steps 20000"),
    ({"upstream__eval_crop": "middle"}, "config.upstream.eval_crop"),
    ({"sweep__export": "some"}, "config.sweep.export is 'some', expected"),
    ({"sweep__cells": ("1",)}, r"config.sweep.cells\[0\] is '1', expected"),
    ({"sweep__overrides": (3,)}, r"config.sweep.overrides\[0\] is 3, expected"),
  ],
)
def test_invalid_values_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    changed(**changes)


def test_unknown_and_missing_keys_and_wrong_types_are_refused():
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


def test_an_option_without_rules_is_an_error():
  share = Number(0, 1, "a share")

  @dataclasses.dataclass(frozen=True)
  class Forgotten:
    known: float = option(0.5, share, resume="free")
    size: int = 3

  with pytest.raises(TypeError, match=r"Forgotten\.size declares no rules"):
    options.table(Forgotten)


def test_a_misspelt_override_fails():
  with pytest.raises(AttributeError):
    base.get_config().learning_rat = 0.1
  assert isinstance(base.get_config(), ml_collections.ConfigDict)


def test_a_seed_of_the_pictures_alone():
  assert config_lib.data_seed(changed(seed=3)) == 3
  assert config_lib.data_seed(changed(seed=3, data__seed=0)) == 0
