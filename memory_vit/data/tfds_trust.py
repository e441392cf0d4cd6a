"""Refuse TFDS data sets that name code: only features of TFDS are allowed.

TFDS imports the module of every class that the files beside the records name.
So these files are first read here, as plain JSON, and the classes are checked.
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

# Files that name the features of a data set: {name: maximum size in bytes}.
# dataset_info.json may be larger, because this file also lists all shards.
_INFO = "dataset_info.json"
_FILES = {"features.json": 2**20, _INFO: 16 * 2**20}
# Maximum depth of JSON; each nested feature takes four levels.
_MAX_DEPTH = 64
# JSON keys whose values are names of Python classes. protobuf accepts the first
# two; the third is from older versions of TFDS.
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")
_EXPECTED = "the name is not valid, expected NAME[/CONFIG][:VERSION]."
_ADVICE = "If you trust the author of the data set, give --trust_data_code."


def require_no_code(name: str, directory: str) -> None:
  """Raise if any version of a data set brings its own code.

  All versions are checked, because TFDS decides which one is opened.
  """
  try:
    parsed, options = naming.parse_builder_name_kwargs(name)
  except ValueError as error:
    raise DataError(f"data set {messages.brief(name)}: {_EXPECTED}") from error
  if parsed.namespace:
    raise DataError(
      f"data set {messages.brief(name)} has a namespace, from which "
      f"TFDS would download and run code. {_ADVICE}"
    )
  # Accept only config and version: other options could name a directory.
  if options.keys() - {"config", "version"} or not options.get(
    "config", "x"
  ).strip("."):
    raise DataError(f"data set {messages.brief(name)}: {_EXPECTED}")
  for root in file_utils.list_data_dirs(directory or None):
    base = epath.Path(root).expanduser() / parsed.name
    # Prepared data lie in NAME/VERSION or in NAME/CONFIG/VERSION.
    outer = _folders(base)
    for folder in [*outer, *(f for path in outer for f in _folders(path))]:
      require_own_features(folder)


def require_own_features(folder: epath.PathLike) -> None:
  """Raise if prepared data name Python classes that are not TFDS features."""
  for name, most in _FILES.items():
    file = epath.Path(folder) / name
    if not file.exists():
      continue
    values = _read(file, most)
    if name == _INFO:
      values = values.get("features") if isinstance(values, Mapping) else None
    for class_name in _classes(values, file):
      if class_name not in own_classes():
        raise DataError(
          f"{file} names {messages.brief(class_name)}, which is not a feature "
          f"of TFDS: TFDS would import and run code of this class. {_ADVICE}"
        )


def _folders(path: epath.Path) -> list[epath.Path]:
  if not path.is_dir():
    return []
  return sorted(inner for inner in path.iterdir() if inner.is_dir())


def _read(file: epath.Path, most: int) -> Any:
  """Read a JSON file of at most `most` bytes."""
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
  """Yield all strings in JSON that may be names of Python classes.

  Strings that hold JSON themselves, as in older files, are parsed as well.
  """
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
      except ValueError:  # neither we nor TFDS can parse the text
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
  """Return old and new names of all feature classes that belong to TFDS."""
  connector = tfds.features.FeatureConnector
  classes = [
    item
    for item in vars(tfds.features).values()
    if isinstance(item, type) and issubclass(item, connector)
  ]
  names = {f"{item.__module__}.{item.__name__}" for item in classes}
  names |= {name for item in classes for name in vars(item).get("ALIASES", ())}
  return frozenset(n for n in names if n.startswith("tensorflow_datasets."))
