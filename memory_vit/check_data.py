"""Walks the data of a configuration, and reports what is wrong with it.

  python -m memory_vit.check_data --config=configs/folder.py \\
    --config.data.dir=DATA [--split=SPLIT ...] [--json=FILE]

Every picture of data.train, data.validation, data.test and upstream.split (of
pretrain.data too, where there is one) is read and decoded; of --split, those of
data.name that are named. Looked for are records and pictures that cannot be
read, labels that are no classes, classes without a picture in the first split,
pictures that are a line, or too long for crops, and files that are in two
splits of data.name. The exit status is 0 where nothing of that was found, 1
where something was, 2 for bad usage.
"""

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tqdm
from absl import app, flags
from ml_collections import config_flags

from memory_vit import checking, commands, data, progress
from memory_vit import config as config_lib
from memory_vit.checking import Checked
from memory_vit.config import Config
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.tables import table

logger = logging.getLogger("memory_vit")

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
_SPLIT = flags.DEFINE_multi_string(
  "split", [], "A split of data.name, instead; may be given several times."
)
_TRUSTING = commands.define_trust_flag()
_JSON = flags.DEFINE_string("json", None, "Write all that was found to a file.")

# Problems of a kind that the screen shows; --json has all.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Where:
  """A split to check.

  Attributes:
    role: "train", ..., "upstream", or the split itself where it was asked for.
    name: of the data set.
    directory: as `config.data.dir`.
    split: in the notation of TFDS.
    own: whether it is a split of the task's data set.
    cache_gib: as `config.data.cache_gib`.
  """

  role: str
  name: str
  directory: str
  split: str
  own: bool
  cache_gib: float


def main(argv: list[str]) -> int:
  """Checks what the flags name; returns the exit status."""
  if len(argv) > 1:
    raise ConfigError(f"unknown arguments {argv[1:]}; options start with --.")
  progress.log_to_stderr()
  # What cannot be read is in the report.
  logging.getLogger("memory_vit.sources").setLevel(logging.ERROR)
  if _JSON.value and not Path(_JSON.value).absolute().parent.is_dir():
    raise ConfigError(f"--json is {_JSON.value}: there is no such directory.")
  report = check_data(_TRUSTING(_config()), _SPLIT.value)
  commands.show(text(report))
  if _JSON.value:
    content = json.dumps(report, indent=2) + "\n"
    Path(_JSON.value).write_text(content, encoding="utf-8")
  return 0 if report["clean"] else 1


def check_data(config: Config, splits: Sequence[str] = ()) -> dict[str, Any]:
  """Checks the splits of a configuration.

  Args:
    config: names the data sets, and how much of them memory may hold.
    splits: of `config.data.name`, instead of all that the configuration names.

  Returns:
    {"splits": what each holds, "duplicates": files that are in two of them,
    "clean": whether nothing is wrong}, as JSON takes it.

  Raises:
    DataError: for a data set or a split that is not there.
  """
  entries, own = [], []
  for where in _wanted(config, splits):
    entry, checked = _check(
      where, first=not entries, trust_data_code=config.trust_data_code
    )
    entries.append(entry)
    if checked and where.own:
      own.append((where.role, checked))
  duplicates = [
    _shared(*one, *other) for i, one in enumerate(own) for other in own[i + 1 :]
  ]
  return {
    "splits": entries,
    "duplicates": duplicates,
    "clean": not any(entry["problems"] for entry in entries)
    and not any(found["count"] for found in duplicates),
  }


def _wanted(config: Config, splits: Sequence[str]) -> list[Where]:
  """What to check, the training split first."""
  where, upstream, pretrain = config.data, config.upstream, config.pretrain
  if not where.name:
    raise ConfigError("config.data.name is empty: name a data set.")
  roles = {split: split for split in splits} or {
    "train": where.train,
    "validation": where.validation,
    "test": where.test,
  }
  wanted = [
    Where(role, where.name, where.dir, split, True, where.cache_gib)
    for role, split in roles.items()
    if split
  ]
  if not splits and upstream.name:
    wanted.append(
      Where(
        "upstream", upstream.name, upstream.dir, upstream.split, False,
        where.cache_gib,
      )
    )  # fmt: skip
  if not splits and pretrain.variant:
    of = pretrain.data
    wanted.append(
      Where("pretrain", of.name, of.dir, of.train, False, of.cache_gib)
    )
  return wanted


def _check(
  where: Where, first: bool, trust_data_code: bool
) -> tuple[dict[str, Any], Checked | None]:
  """Checks a split: an entry of the report, and what it is made of."""
  entry = {"role": where.role, "data": where.name, "split": where.split}
  logger.info("%s: %s, split %s", where.role, where.name, where.split)
  try:
    source = data.open_source(
      where.name,
      where.split,
      where.directory,
      where.cache_gib,
      max_bad=sys.maxsize,  # they are what is looked for
      trust_data_code=trust_data_code,
    )
  except BrokenDataError as error:
    return {**entry, "examples": 0, "problems": [_broken(str(error))]}, None

  def bar(examples: Any) -> Any:
    # A line again and again on a terminal, in a log now and then a new one.
    often = 1 if sys.stderr.isatty() else 30
    return tqdm.tqdm(
      examples, where.role, source.size, unit=" pictures", mininterval=often
    )

  checked = checking.check(source, bar)
  problems = [dataclasses.asdict(problem) for problem in checked.problems]
  missing = [
    name
    for name, count in zip(source.class_names, checked.per_class, strict=True)
    if not count
  ]
  if first and missing:
    problems += [
      {"kind": "class without a picture", "where": name, "detail": ""}
      for name in missing
    ]
  return {
    **entry,
    "examples": source.size,
    "classes": source.num_classes,
    "labels": checked.labels,
    "per_class": dict(
      zip(source.class_names, checked.per_class.tolist(), strict=True)
    ),
    "kinds": dict(checked.kinds),
    "turned": checked.turned,
    "smallest": checked.smallest,
    "largest": checked.largest,
    "repeated": checking.repeated(checked),
    "problems": problems,
  }, checked


def _broken(reason: str) -> dict[str, Any]:
  return {"kind": "cannot be opened", "where": reason, "detail": ""}


def _shared(
  role: str, checked: Checked, other_role: str, other: Checked
) -> dict[str, Any]:
  """The files that two splits share."""
  pairs = checking.shared(checked, other)
  return {
    "splits": [role, other_role],
    "count": len(pairs),
    "pairs": [
      [checked.source.describe(i), other.source.describe(j)] for i, j in pairs
    ],
  }


def text(report: dict[str, Any]) -> str:
  """The report for people."""
  lines = [_table(report["splits"])]
  for entry in report["splits"]:
    lines += _kinds(entry) + _problems(entry)
  for found in report["duplicates"]:
    if found["count"]:
      first, second = found["splits"]
      lines.append(f"\n{first} and {second} share {found['count']:,} files:")
      lines += _some([f"{a} = {b}" for a, b in found["pairs"]])
  lines += ["", "clean" if report["clean"] else "NOT clean: see above"]
  return "\n".join(lines)


def _table(entries: Sequence[dict[str, Any]]) -> str:
  header = ("split", "data set", "examples", "classes", "per class", "smallest",
            "largest", "repeated", "problems")  # fmt: skip
  return table(header, [_row(entry) for entry in entries])


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
  start = (entry["role"], f"{entry['data']} {entry['split']}")
  problems = f"{len(entry['problems']):,}"
  if "classes" not in entry:
    return (*start, *["-"] * 6, problems)
  counts = list(entry["per_class"].values())
  return (
    *start,
    f"{entry['examples']:,}",
    f"{entry['classes']:,}",
    f"{min(counts):,} to {max(counts):,}",
    *(_size(entry[key]) for key in ("smallest", "largest")),
    f"{entry['repeated']:,}",
    problems,
  )


def _size(size: tuple[int, int] | None) -> str:
  return " x ".join(map(str, size)) if size else "-"


def _kinds(entry: dict[str, Any]) -> list[str]:
  """A line on the kinds of pictures."""
  if not entry.get("kinds"):
    return []
  kinds = ", ".join(f"{n:,} {kind}" for kind, n in entry["kinds"].items())
  turned = entry["turned"]
  exif = f"; {turned:,} to be turned by EXIF, which is not done" * bool(turned)
  return [f"\n{entry['role']}: {kinds}{exif}"]


def _problems(entry: dict[str, Any]) -> list[str]:
  """The problems of a split, by kind."""
  lines = []
  for kind in dict.fromkeys(p["kind"] for p in entry["problems"]):
    some = [p for p in entry["problems"] if p["kind"] == kind]
    lines.append(f"\n{entry['role']}: {kind}: {len(some):,}")
    lines += _some([": ".join(filter(None, (p["where"], p["detail"])))
                    for p in some])  # fmt: skip
  return lines


def _some(lines: Sequence[str]) -> list[str]:
  more = len(lines) - _SHOWN
  shown = [f"  {line}" for line in lines[:_SHOWN]]
  return shown + ([f"  and {more:,} more, see --json"] if more > 0 else [])


def _config() -> Config:
  """What the configuration file says."""
  try:
    return config_lib.from_dict(_CONFIG.value.to_dict())
  except OSError as error:  # where there is none, when it is first looked at
    raise ConfigError(str(error)) from error


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  # Around all, since a configuration file runs while flags are parsed.
  start = functools.partial(app.run, main, flags_parser=commands.parse_flags)
  sys.exit(commands.run_command(start))
