"""Audit the splits of a configuration, and report what is wrong with them."""

import dataclasses
import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

from memory_vit.config import EMBEDDINGS, Config
from memory_vit.data import audit, datasets
from memory_vit.data.audit import SplitAudit
from memory_vit.data.split_ref import SplitRef, configured_splits
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

# From so many times as many images of a class as of another on, accuracy says
# little of the smaller one. Work on imbalanced data begins there: Cui et al.
# and Cao et al. (2019) measure at 10 to 200.
IMBALANCED = 10.0

# Whose splits are of one data set, and must not share files.
_OF_THE_TASK = ("train", "validation", "test")


def audit_data(config: Config, splits: Sequence[str] = ()) -> dict[str, Any]:
  """Audit the splits of a configuration.

  Args:
    config: names the data sets, and how much of them memory may hold.
    splits: of `config.data.name`, instead of all that the configuration names.

  Returns:
    {"splits": what each holds, "duplicates": files that are in two of them,
    "clean": whether nothing is wrong}, as JSON takes it.

  Raises:
    ConfigError: where no data set is named.
    DataError: for a data set or a split that is not there.
  """
  entries, own = [], {}
  for role, ref in splits_to_audit(config, splits).items():
    logger.info("%s: %s, split %s", role, ref.name, ref.split)
    entry = {"role": role, "data": ref.name, "split": ref.split}
    try:
      found = _audit(role, ref)
    except BrokenDataError as error:
      problem = {"kind": "cannot be opened", "where": str(error), "detail": ""}
      entries.append({**entry, "examples": 0, "problems": [problem]})
      continue
    entries.append({**entry, **_contents(found, all_classes=not entries)})
    if splits or role in _OF_THE_TASK:
      own[role] = found
  duplicates = _duplicates(own)
  return {
    "splits": entries,
    "duplicates": duplicates,
    "clean": not any(entry["problems"] for entry in entries)
    and not any(found["count"] for found in duplicates),
  }


def splits_to_audit(
  config: Config, splits: Sequence[str]
) -> dict[str, SplitRef]:
  """The splits that `audit_data` reads, by role; the training split first."""
  if not config.data.name:
    raise ConfigError("config.data.name is empty: name a data set.")
  found = configured_splits(config)
  if any(ref.name == EMBEDDINGS for ref in found.values()):
    raise ConfigError(
      f"config.data.name is {EMBEDDINGS!r}, and images are what is checked: "
      "name the data set that was embedded."
    )
  return {
    split: dataclasses.replace(found["train"], split=split) for split in splits
  } or found


def _audit(role: str, ref: SplitRef) -> SplitAudit:
  """Open a split and read all of it."""
  # Unreadable examples are what is looked for.
  reader = datasets.open_reader(dataclasses.replace(ref, max_bad=sys.maxsize))
  with ProgressBar(role, reader.size) as bar:
    return audit.audit_split(reader, bar.update)


def _contents(found: SplitAudit, *, all_classes: bool) -> dict[str, Any]:
  """The contents and the problems of a split, as JSON takes them.

  `all_classes` makes a class without an image a problem.
  """
  source = found.reader.source
  per_class = dict(
    zip(source.class_names, found.per_class.tolist(), strict=True)
  )
  problems = [dataclasses.asdict(problem) for problem in found.problems]
  if all_classes:
    problems += [
      {"kind": "class without an image", "where": name, "detail": ""}
      for name, count in per_class.items()
      if not count
    ]
    if detail := source.single_class():
      where = repr(source.class_names[0])
      problems.append(
        {"kind": "a single class", "where": where, "detail": detail}
      )
  return {
    "examples": source.size,
    "classes": source.num_classes,
    "labels": found.labels,
    "per_class": per_class,
    "balance": _balance(per_class),
    "kinds": dict(found.kinds.most_common()),
    "turned": found.turned,
    "smallest": found.smallest,
    "largest": found.largest,
    "repeated": audit.repeated(found),
    "skipped": source.skipped,
    "problems": problems,
  }


def _balance(per_class: dict[str, int]) -> dict[str, Any] | None:
  """The smallest and the largest class; None where no image can be read."""
  counts = {name: count for name, count in per_class.items() if count}
  if not counts:
    return None
  fewest = min(counts.items(), key=lambda item: item[1])
  most = max(counts.items(), key=lambda item: item[1])
  ratio = most[1] / fewest[1]
  return {
    "fewest": fewest,
    "most": most,
    "ratio": ratio,
    "share": most[1] / sum(counts.values()),
    "imbalanced": ratio >= IMBALANCED,
  }


def _duplicates(audits: dict[str, SplitAudit]) -> list[dict[str, Any]]:
  """The files that each two of the splits share."""
  duplicates = []
  for roles in itertools.combinations(audits, 2):
    first, second = (audits[role] for role in roles)
    pairs = [
      [first.reader.source.describe(a), second.reader.source.describe(b)]
      for a, b in audit.shared(first, second)
    ]
    found = {"splits": [*roles], "count": len(pairs), "pairs": pairs}
    duplicates.append(found)
  return duplicates
