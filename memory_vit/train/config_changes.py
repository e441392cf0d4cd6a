"""Options that may change on purpose when a run resumes.

The structure of the saved state, the classes and the order of the images never
change.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.config import OPTIONS
from memory_vit.errors import ConfigError

# Not an option: allows other image files than those of the saved state.
DATA = "data"
ON_REQUEST = (
  DATA, *(key for key, o in OPTIONS.items() if o.resume == "on_request")
)  # fmt: skip


def allowed(keys: Sequence[str]) -> tuple[str, ...]:
  """Check keys such as "total_steps"; return them with "config." in front."""
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
  """Advise what to do if options differ from those of the saved state."""
  names = [key.removeprefix("config.") for key in keys]
  flags = [f"--allow_config_change={key}" for key in names if key in ON_REQUEST]
  fixed = [key for key in names if key not in ON_REQUEST]
  if not fixed:
    return f"To resume with the new values, on purpose: {' '.join(flags)}."
  refusal = f"{', '.join(fixed)} can never change within a run."
  return refusal + (f" Others may, with {' '.join(flags)}." if flags else "")


def changes(
  step: int,
  began: Mapping[str, Any],
  now: Mapping[str, Any],
  keys: Sequence[str],
) -> list[dict[str, Any]]:
  """List allowed differences from the options of a saved state."""
  return [
    {"step": step, "key": key, "from": began[key], "to": now[key]}
    for key in dict.fromkeys(keys)
    if key in began and began[key] != now[key]
  ]
