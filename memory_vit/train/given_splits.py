"""Splits that a caller in Python has opened, in place of a named data set."""

import dataclasses
from collections.abc import Mapping

from memory_vit.config import Config
from memory_vit.data.reader import Reader
from memory_vit.errors import ConfigError, DataError

_ROLES = ("train", "validation", "test")


def with_splits(config: Config, splits: Mapping[str, Reader]) -> Config:
  """The configuration with the names of the splits that are given.

  Args:
    config: names no data set.
    splits: {"train": reader, ...}; without "validation" the last step is kept,
      without "test" no result is reported.

  Raises:
    ConfigError: for options that name, or compare, other data.
    DataError: for roles that are unknown, or classes that differ.
  """
  unknown = [role for role in splits if role not in _ROLES]
  if unknown or "train" not in splits:
    raise DataError(
      f"splits are given for {[*splits]}, expected 'train', and perhaps "
      "'validation' and 'test'."
    )
  data = config.data
  for key in ("name", "dir", "label"):
    if value := getattr(data, key):
      raise ConfigError(
        f"config.data.{key} is {value!r}, but the splits are given from "
        "Python: expected ''."
      )
  if data.digest != "files":
    raise ConfigError(
      "config.data.digest is 'contents', which cannot be had of splits that "
      "are given from Python: expected 'files', and a version in their place."
    )
  train = splits["train"]
  for role, reader in splits.items():
    if reader.class_names != train.class_names:
      raise DataError(
        f"the split for {role!r}, {reader.source}, has {reader.num_classes} "
        f"classes other than the {train.num_classes} of {train.source}."
      )
  data = dataclasses.replace(
    data,
    name=train.name,
    train=train.split,
    validation=splits["validation"].split if "validation" in splits else "",
    test=splits["test"].split if "test" in splits else "",
  )
  return dataclasses.replace(config, data=data)
