"""Base of every configuration: all options of `memory_vit.config`.

Each option is described there, in the class that declares it.
"""

import ml_collections

from memory_vit import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  """All options with their defaults, which are the paper's if it states any."""
  config = ml_collections.ConfigDict(config_lib.to_dict(config_lib.Config()))
  return config.lock()
