"""Options are declared in one way, and refused in the same words everywhere."""

import dataclasses

import pytest

from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.prediction import PredictorConfig
from memory_vit.runtime import launch, options
from memory_vit.runtime.options import Number, Text
from memory_vit.serving import ServerSettings
from memory_vit.serving.ray import Scaling

DECLARED = {
  Config: {"prefix": "config."},
  PredictorConfig: {"required": {"backbone": "glyphs"}},
  ServerSettings: {},
  Scaling: {},
  launch.Options: {"prefix": "--"},
}


def default(cls):
  return cls(**DECLARED[cls].get("required", {}))


@pytest.mark.parametrize("cls", DECLARED)
def test_defaults_are_of_their_types_and_rules(cls):
  options.require(default(cls))
  assert len(options.table(cls)) >= 6


@pytest.mark.parametrize("cls", DECLARED)
def test_a_refusal_names_what_was_found_and_what_is_expected(cls):
  prefix = DECLARED[cls].get("prefix", "")
  for name, option in options.table(cls).items():
    if "." in name:
      continue
    wrong = {option.expected: object}
    if isinstance(option.rule, Number):
      above = type(option.rule.least)(option.rule.most) + 1
      wrong[option.rule.expected] = above
    if isinstance(option.rule, Text):
      wrong[option.rule.expected] = "a" * (option.rule.most + 1)
    for expected, value in wrong.items():
      with pytest.raises(ConfigError) as refused:
        dataclasses.replace(default(cls), **{name: value})
      message = str(refused.value)
      found = repr(value)[:100]
      assert message.startswith(f"{prefix}{name} is {found}"), message
      assert f", expected {expected}" in message
      assert message.endswith(".")
      assert "\n" not in message


def test_first_wrong_value_of_a_tuple_is_named():
  with pytest.raises(
    ConfigError, match=r"^tasks\[1\] is '', expected the path"
  ):
    PredictorConfig("glyphs", ("a", "", ""))
  with pytest.raises(ConfigError, match=r"^tasks\[1\] is 3, expected str: the"):
    PredictorConfig("glyphs", ("a", 3))


def test_none_is_accepted_only_if_the_type_allows_it():
  assert ServerSettings(state_dir=None).state_dir is None
  with pytest.raises(ConfigError, match="max_queue is None, expected int"):
    ServerSettings(max_queue=None)


def test_unknown_option_names_the_nearest():
  known = ("data.train", "data.flip", "seed", "task.cells")
  assert options.unknown("config", "data.trian", known, "config.").startswith(
    "config has no option 'data.trian'; nearest: config.data.train, "
  )
  assert "nearest: task.cells, " in options.unknown("config", "cells", known)
