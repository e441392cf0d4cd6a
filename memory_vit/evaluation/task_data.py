"""Choose the data of a task: by the command line, never by the task file.

Task files are untrusted, and opening a data set can import, download and read.
The data set that a task names is a hint, shown if the command line names none.
A hint is followed if it opens nothing (digits and glyphs come with packages),
if its data set is in a directory that the command line names, or if its
directory is below one that the command line trusts as a whole.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memory_vit.config import EMBEDDINGS, UpstreamConfig
from memory_vit.data.split_ref import OF_A_DIRECTORY, SplitRef
from memory_vit.errors import ConfigError, TaskError
from memory_vit.model.task import BACKBONE, NAME_PATTERN, Task
from memory_vit.runtime import messages
from memory_vit.tasks.manifest import Manifest

if TYPE_CHECKING:  # this import loads TensorFlow
  from memory_vit.data.split import Split

# Pattern of data set names that a task file may give. The pattern excludes a
# namespace, as in "community:name", for which TFDS would fetch data and code.
_DATA_NAME = re.compile(r"\w+(/\w[\w.-]*)?(:\d+\.\d+\.\d+)?", re.ASCII)
_SHIPPED = re.compile(r"digits(:\d-\d)?|glyphs:(inverted|angle)", re.ASCII)
# Pattern of texts that need no quotes in a shell.
_PLAIN = re.compile(r"[\w@%+:,./~-]{1,200}", re.ASCII)
_SHOWN = 80  # maximum length of a name or directory that an error quotes
_LISTED = 20  # maximum number of tasks that an error lists


@dataclasses.dataclass(frozen=True)
class Given:
  """Data that the command line names: {task: value}, with "" for all tasks."""

  data: Mapping[str, str]  # names of data sets
  directories: Mapping[str, str]  # directories of data sets
  splits: Mapping[str, str]  # splits to evaluate
  roots: tuple[str, ...] = ()  # tasks may name data below these directories


@dataclasses.dataclass(frozen=True)
class Upstream:
  """The data for the original outputs; options as in `config.upstream`."""

  ref: SplitRef
  eval_crop: str
  resize: int


@dataclasses.dataclass(frozen=True)
class _Hint:
  """Data that a task file names; fields that the file leaves out are ""."""

  name: str = ""
  directory: str = ""
  split: str = ""
  label: str = ""
  path: str = ""
  kind: str = "classes"


# Error text that says which options to give for a task without usable data.
_Missing = str


def parse(
  option: str,
  texts: Sequence[str],
  owners: Iterable[str],
  original: str = "",
) -> dict[str, str]:
  """Return {task: value} from texts TASK=VALUE, or VALUE for all tasks ("").

  A TASK must be in `owners`. If "backbone" is given but is not in `owners`, the
  error asks for the option `original`.
  """
  owners = set(owners)
  values: dict[str, str] = {}
  for text in texts:
    owner, separator, value = text.partition("=")
    if not (separator and NAME_PATTERN.fullmatch(owner)):
      owner, value = "", text
    elif owner == BACKBONE and owner not in owners and original:
      raise ConfigError(
        f"{option}={text} has an effect only with {original}: give both, or "
        "neither."
      )
    elif owner not in owners:
      raise ConfigError(
        f"{option}={text}: there is no task {owner!r}; expected one of "
        f"{sorted(owners)}."
      )
    if owner in values:
      raise ConfigError(
        f"{option} is given twice: {values[owner]!r}, {value!r}."
      )
    values[owner] = value
  return values


def choose(
  tasks: Sequence[Manifest], flags: Given, upstream: bool
) -> tuple[dict[str, SplitRef], Upstream | None]:
  """Choose the data of all tasks and, with `upstream`, of the original head.

  One `TaskError` lists everything that is missing, with the options to give.
  """
  for root in flags.roots:
    if not os.path.isdir(os.path.expanduser(root)):
      raise ConfigError(f"--data_root={root}: there is no such directory.")
  chosen: dict[str, SplitRef] = {}
  missing = []
  for task in tasks:
    ref = _of_task(task, flags)
    if isinstance(ref, _Missing):
      missing.append(ref)
    else:
      chosen[task.spec.name] = ref
  original = _of_backbone(tasks, flags) if upstream else None
  if isinstance(original, _Missing):
    missing.append(original)
    original = None
  if missing:
    more = len(missing) - _LISTED
    shown = missing[:_LISTED] + ([f"and {more} more"] if more > 0 else [])
    raise TaskError(
      f"data to evaluate on are missing: {'; '.join(shown)}. Data are not "
      "opened if only a task file names them, because anybody may have written "
      "that file. To open them, give --data_root=DIR: then all data below DIR "
      "may be opened."
    )
  return chosen, original


def require_classes(task: Task, source: Split) -> None:
  """Raise `TaskError` if the data set has other classes than the task."""
  spec = task.spec
  learned = spec.kind.name, spec.class_names
  if learned != (source.kind, source.class_names):
    raise TaskError(
      f"task {task.name!r} has {spec.num_classes} {spec.kind.name} "
      f"({_first_of(spec.class_names)}, ...), but the data set "
      f"{source.full_name!r} has {source.num_classes} {source.kind} "
      f"({_first_of(source.class_names)}, ...): expected the same names in the "
      "same order."
    )


def _first_of(class_names: Sequence[str]) -> str:
  return messages.shortened(messages.escaped(", ".join(class_names[:3])))


def _of_task(task: Manifest, flags: Given) -> SplitRef | _Missing:
  keys = ("name", "dir", "test", "validation", "label", "path")
  settings = _said(task, "data", keys)
  hint = _Hint(
    settings.get("name", ""),
    settings.get("dir", ""),
    settings.get("test") or settings.get("validation", ""),
    settings.get("label", ""),
    settings.get("path", ""),
    task.spec.kind.name,
  )
  return _ref(task.spec.name, hint, flags, flags.data.get(""))


def _of_backbone(
  tasks: Sequence[Manifest], flags: Given
) -> Upstream | _Missing | None:
  """Return the data for the original head, an error text, or None.

  --data=backbone=NAME chooses the data set. Without this option, take the data
  set from the first task that names one for the original head. Return None if
  the option is missing and no task names such a data set. Also return None if
  NAME is empty (--data=backbone=).
  """
  if flags.data.get(BACKBONE) == "":
    return None
  keys = ("name", "dir", "split", "eval_crop", "resize")
  candidates = [_said(task, "upstream", keys) for task in tasks]
  settings = next((values for values in candidates if values.get("name")), {})
  if not settings and BACKBONE not in flags.data:
    return None
  default = UpstreamConfig()
  split = settings.get("split") or default.split
  hint = _Hint(settings.get("name", ""), settings.get("dir", ""), split)
  ref = _ref(BACKBONE, hint, flags, None)
  if isinstance(ref, _Missing):
    return f"{ref} (--data={BACKBONE}= leaves it out)"
  return Upstream(
    ref,
    settings.get("eval_crop", default.eval_crop),
    settings.get("resize", default.resize),
  )


def _ref(
  owner: str, hint: _Hint, flags: Given, common: str | None
) -> SplitRef | _Missing:
  """Return the split to evaluate, or an error text about missing options.

  The name of the data set is `flags.data[owner]`, or else `common`. If both are
  missing, the name is `hint.name`. A data set that only `hint` names is opened
  in three cases only: it needs no directory and no download (`_SHIPPED`), or
  --data_dir gives its directory, or `hint.directory` is below a --data_root.
  """
  name = flags.data.get(owner, common)
  directory = flags.directories.get(owner, flags.directories.get(""))
  if name == EMBEDDINGS or (name is None and hint.name == EMBEDDINGS):
    return (
      f"{owner!r} has embeddings as data, but images are needed (give "
      f"--data={owner}=NAME --data_dir={owner}=DIR of a data set of images)"
    )
  common_split = "" if owner == BACKBONE else flags.splits.get("", "")
  split = flags.splits.get(owner, common_split) or hint.split
  ref: SplitRef | None = None
  if name is None and _SHIPPED.fullmatch(hint.name):
    ref = SplitRef(hint.name, "", split, download=False)
  elif name is not None and (directory or name not in OF_A_DIRECTORY):
    ref = SplitRef(name, directory or "", split, download=True)
  elif name is None and _DATA_NAME.fullmatch(hint.name):
    directory = directory or _below(hint.directory, flags.roots)
    if directory:
      ref = SplitRef(hint.name, directory, split, download=False)
  if not ref:
    return _needed(owner, hint, name)
  if not split:
    return f"{owner!r} names no split (give --split={owner}=SPLIT)"
  # If the task file names the chosen data set, take `label` and `path` (column
  # of paths in a table) from the task file. These two settings do not decide
  # which data set is opened.
  if ref.name == hint.name:
    ref = dataclasses.replace(ref, label=hint.label, path=hint.path)
  return dataclasses.replace(ref, kind=hint.kind)


def _below(directory: str, roots: Sequence[str]) -> str:
  """Return the resolved directory, or "" if it is not below any root."""
  if not directory or "\0" in directory:
    return ""
  resolved = os.path.realpath(os.path.expanduser(directory))
  for root in roots:
    root = os.path.realpath(os.path.expanduser(root))
    if os.path.commonpath([root, resolved]) == root:
      return resolved
  return ""


def _needed(owner: str, hint: _Hint, name: str | None) -> str:
  """Return an error text that names the options needed to open the data."""
  directory = hint.directory if _PLAIN.fullmatch(hint.directory) else "DIR"
  flag = f"--data_dir={owner}={directory}"
  if name is not None:  # --data gave the name: only --data_dir is missing
    return f"{owner!r} has no directory (give {flag})"
  place = f" in {_shown(hint.directory)}" if hint.directory else ""
  text = f"{owner!r} names {_shown(hint.name)}{place}"
  if not _DATA_NAME.fullmatch(hint.name):
    text = text if hint.name else f"{owner!r} names no data set"
    return f"{text} (give --data={owner}=NAME --data_dir={owner}=DIR)"
  if hint.directory or hint.name in OF_A_DIRECTORY:
    return f"{text} (give {flag})"
  option = f"--data={owner}={hint.name}"
  return f"{text} (give {option}, which TFDS may download, or {flag})"


def _said(task: Manifest, part: str, keys: Sequence[str]) -> dict[str, Any]:
  """Return {key: value} for `keys` in section `part` of the training options.

  Keys with a missing value, or with a value of a wrong type, are left out.
  """
  config = task.provenance.get("config")
  values = config.get(part) if isinstance(config, Mapping) else None
  if not isinstance(values, Mapping):
    return {}
  kinds = {key: int if key == "resize" else str for key in keys}
  return {k: values[k] for k in keys if type(values.get(k)) is kinds[k]}


def _shown(text: str) -> str:
  return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
