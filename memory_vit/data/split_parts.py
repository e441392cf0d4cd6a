"""Parse splits in the notation of TFDS, such as "train[:98%]+test"."""

from collections.abc import Mapping

from etils import epy

from memory_vit.errors import DataError
from memory_vit.runtime.messages import named

with epy.lazy_imports():
  from memory_vit.data import quiet_tensorflow


def split_names(split: str) -> list[str]:
  """Return the names in a split: "train" and "val" in "train[:90%]+val"."""
  names = [part.partition("[")[0].strip() for part in split.split("+")]
  return list(dict.fromkeys(names))


def split_parts(
  name: str, split: str, sizes: Mapping[str, int]
) -> list[tuple[str, slice]]:
  """Parse a split into (name, slice) pairs; `sizes` is {name: size}."""
  if "all" in sizes:
    raise DataError(
      f"data set {name!r} has a split 'all', which means all splits in TFDS's "
      "notation: rename the split, for example to 'images'."
    )
  tfds = quiet_tensorflow.tfds
  infos = {
    key: tfds.core.SplitInfo(name=key, shard_lengths=[size], num_bytes=0)
    for key, size in sizes.items()
  }
  try:
    parts = tfds.core.ReadInstruction.from_spec(split).to_absolute(infos)
  except (AssertionError, NotImplementedError, ValueError) as error:
    advice = ""
    if "test" in split_names(split) and "test" not in sizes:
      advice = (
        " Without a test split, add --config.data.test='' to a run, and give "
        "`evaluate` another split by --split."
      )
    raise DataError(
      f"data set {name!r} has no split {split!r} ({named(error)}); its "
      f"splits are {dict(sizes)}.{advice}"
    ) from error
  chosen = [(part.splitname, slice(part.from_, part.to)) for part in parts]
  if not count_examples(chosen, sizes):
    raise DataError(
      f"data set {name!r}: split {split!r} is empty; the data set has the "
      f"splits {dict(sizes)}."
    )
  return chosen


def count_examples(
  parts: list[tuple[str, slice]], sizes: Mapping[str, int]
) -> int:
  """Count the examples in the parts that `split_parts` returns."""
  return sum(len(range(sizes[key])[part]) for key, part in parts)
