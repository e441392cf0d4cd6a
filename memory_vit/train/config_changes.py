"""Options that may be changed on purpose when a run goes on.

A run goes on with the configuration and the data that it began with. Where
somebody says so, some of it may change; what the saved state consists of, which
classes it has and the order of the images may not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.config import OPTIONS
from memory_vit.errors import ConfigError

# No option, but the images: other files than those that a run began with.
DATA = "data"
ON_REQUEST = (
  DATA, *(key for key, o in OPTIONS.items() if o.resume == "on_request")
)  # fmt: skip


def allowed(keys: Sequence[str]) -> tuple[str, ...]:
  """Check options of a command line: "total_steps" or "config.total_steps".

  Returns:
    The keys with "config." in front of them.

  Raises:
    ConfigError: for a key that can never change.
  """
  found = [key.removeprefix("config.") for key in keys]
  for key in found:
    if key not in ON_REQUEST:
      raise ConfigError(
        f"--allow_config_change={key[:60]!r}: expected one of "
        f"{list(ON_REQUEST)}. Anything else is another run: give it another "
        "--workdir."
      )
  return tuple(f"config.{key}" for key in found)


def advice(keys: Sequence[str]) -> str:
  """Say what to do where options are not those that a run began with."""
  names = [key.removeprefix("config.") for key in keys]
  flags = [f"--allow_config_change={key}" for key in names if key in ON_REQUEST]
  fixed = [key for key in names if key not in ON_REQUEST]
  if not fixed:
    return f"To go on with what is new, on purpose: {' '.join(flags)}."
  told = f"{', '.join(fixed)} can never change within a run."
  return told + (f" Others may, with {' '.join(flags)}." if flags else "")


def changes(
  step: int,
  began: Mapping[str, Any],
  now: Mapping[str, Any],
  keys: Sequence[str],
) -> list[dict[str, Any]]:
  """List the allowed differences from the options of a saved state.

  Args:
    step: after which.
    began: {key: value} of the saved state.
    now: of the run that goes on.
    keys: from `allowed`.
  """
  return [
    {"step": step, "key": key, "from": began[key], "to": now[key]}
    for key in dict.fromkeys(keys)
    if key in began and began[key] != now[key]
  ]
