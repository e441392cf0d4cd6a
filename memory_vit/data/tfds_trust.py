"""Refuse TFDS data sets that name code: only features of TFDS are allowed.

TFDS imports the module of every class that the files beside the records name.
So those files are first read here, as plain JSON.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath
from tensorflow_datasets.core import naming
from tensorflow_datasets.core.utils import file_utils

from memory_vit.data.quiet_tensorflow import tfds
from memory_vit.errors import DataError
from memory_vit.runtime import messages

# The files with the features of a data set, and their greatest sizes in bytes.
# Real ones have some kilobytes; the second lists all shards as well.
_INFO = "dataset_info.json"
_FILES = {"features.json": 2**20, _INFO: 16 * 2**20}
# Four levels for a feature inside of another.
_MAX_DEPTH = 64
# The key of a class, as protobuf spells it, and in the files of older TFDS.
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")
_EXPECTED = "expected NAME[/CONFIG][:VERSION]."
_ADVICE = "Where you trust who made it, give --trust_data_code."


def require_no_code(name: str, directory: str) -> None:
  """Refuse a data set that brings code of its own, in any version.

  TFDS decides which version and configuration is opened.
  """
  try:
    parsed, options = naming.parse_builder_name_kwargs(name)
  except ValueError as error:
    raise DataError(f"data set {messages.brief(name)}: {_EXPECTED}") from error
  if parsed.namespace:
    raise DataError(
      f"data set {messages.brief(name)} has a namespace: TFDS would fetch code "
      f"from there and run it. {_ADVICE}"
    )
  # Anything else could be another place to look at.
  if options.keys() - {"config", "version"} or not options.get(
    "config", "x"
  ).strip("."):
    raise DataError(f"data set {messages.brief(name)}: {_EXPECTED}")
  for root in file_utils.list_data_dirs(directory or None):
    base = epath.Path(root).expanduser() / parsed.name
    # NAME/VERSION, or NAME/CONFIG/VERSION.
    outer = _folders(base)
    for folder in [*outer, *(f for each in outer for f in _folders(each))]:
      require_own_features(folder)


def require_own_features(folder: epath.PathLike) -> None:
  """Refuse prepared data that name other classes than the features of TFDS."""
  for name, most in _FILES.items():
    file = epath.Path(folder) / name
    if not file.exists():
      continue
    values = _read(file, most)
    if name == _INFO:
      values = values.get("features") if isinstance(values, Mapping) else None
    for found in _classes(values, file):
      if found not in own_classes():
        raise DataError(
          f"{file} names {messages.brief(found)}, which is no feature of TFDS: "
          f"it would be imported, and run. {_ADVICE}"
        )


def _folders(path: epath.Path) -> list[epath.Path]:
  if not path.is_dir():
    return []
  return sorted(inner for inner in path.iterdir() if inner.is_dir())


def _read(file: epath.Path, most: int) -> Any:
  """A JSON file of at most `most` bytes."""
  try:
    with file.open("rb") as opened:
      content = opened.read(most + 1)
    if len(content) > most:
      raise DataError(f"{file} has more than {most / 2**20:g} MiB.")
    return json.loads(content)
  except DataError:
    raise
  except (OSError, RecursionError, ValueError) as error:
    reason = messages.brief(str(error))
    raise DataError(f"{file} cannot be read: {reason}.") from error


def _classes(values: Any, file: epath.Path) -> Iterator[str]:
  """All possible names of classes; older files have JSON inside strings."""
  left = [(values, 0)]
  while left:
    value, depth = left.pop()
    if depth > _MAX_DEPTH:
      raise DataError(f"{file} is nested deeper than {_MAX_DEPTH} levels.")
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):
      try:
        left.append((json.loads(value), depth + 1))
      except RecursionError:
        left.append(("", _MAX_DEPTH + 1))
      except ValueError:  # A description: TFDS cannot read it as JSON either.
        continue
    elif isinstance(value, Mapping):
      for key, inner in value.items():
        if key in _CLASS_KEYS and isinstance(inner, str):
          yield inner
        else:
          left.append((inner, depth + 1))
    elif isinstance(value, list):
      left += [(inner, depth + 1) for inner in value]


@functools.cache
def own_classes() -> frozenset[str]:
  """Names of the feature classes that TFDS itself exports, old ones too."""
  connector = tfds.features.FeatureConnector
  own = [
    each
    for each in vars(tfds.features).values()
    if isinstance(each, type) and issubclass(each, connector)
  ]
  names = {f"{each.__module__}.{each.__name__}" for each in own}
  names |= {name for each in own for name in vars(each).get("ALIASES", ())}
  return frozenset(n for n in names if n.startswith("tensorflow_datasets."))
