"""Choose the data of a task: by the command line, never by the task file.

Task files are untrusted, and opening a data set can import, download and read.
The data set that a task names is a hint, shown if the command line names none.
It is followed if it opens nothing (digits and glyphs come with packages), for
the name of a set inside a directory of the command line, and below a directory
that the command line trusts as a whole.
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

if TYPE_CHECKING:  # it brings TensorFlow
  from memory_vit.data.split import Split

# A TFDS name with a namespace in front ("community:name") would be fetched from
# elsewhere, with its code.
_DATA_NAME = re.compile(r"\w+(/\w[\w.-]*)?(:\d+\.\d+\.\d+)?", re.ASCII)
_SHIPPED = re.compile(r"digits(:\d-\d)?|glyphs:(inverted|angle)", re.ASCII)
# Needs no quotes in a shell.
_PLAIN = re.compile(r"[\w@%+:,./~-]{1,200}", re.ASCII)
# Characters of a hint, and the number of tasks, that a message shows.
_SHOWN = 80
_LISTED = 20


@dataclasses.dataclass(frozen=True)
class Given:
  """Data that the command line names for a task; the key "" stands for all."""

  data: Mapping[str, str]  # names of data sets
  directories: Mapping[str, str]  # where they are
  splits: Mapping[str, str]  # what is evaluated
  roots: tuple[str, ...] = ()  # directories below which tasks may name others


@dataclasses.dataclass(frozen=True)
class Upstream:
  """The data of the original outputs, prepared as `config.upstream` says."""

  ref: SplitRef
  eval_crop: str
  resize: int


@dataclasses.dataclass(frozen=True)
class _Hint:
  """Data that a task names; "" if it names nothing usable."""

  name: str = ""
  directory: str = ""
  split: str = ""
  label: str = ""
  path: str = ""
  kind: str = "classes"


# What the command line must name, and why.
_Missing = str


def parse(
  option: str,
  texts: Sequence[str],
  owners: Iterable[str],
  original: str = "",
) -> dict[str, str]:
  """Parse values for all tasks, or as TASK=VALUE for one of `owners`.

  `original` is the option that adds the backbone to them, if the command has
  one.
  """
  owners = set(owners)
  found: dict[str, str] = {}
  for text in texts:
    owner, separator, value = text.partition("=")
    if not (separator and NAME_PATTERN.fullmatch(owner)):
      owner, value = "", text
    elif owner == BACKBONE and owner not in owners and original:
      raise ConfigError(
        f"{option}={text} is for {original}, which is not given."
      )
    elif owner not in owners:
      raise ConfigError(
        f"{option}={text}: there is no task {owner!r}; expected one of "
        f"{sorted(owners)}."
      )
    if owner in found:
      raise ConfigError(
        f"{option} is given twice: {found[owner]!r}, {value!r}."
      )
    found[owner] = value
  return found


def choose(
  tasks: Sequence[Manifest], flags: Given, upstream: bool
) -> tuple[dict[str, SplitRef], Upstream | None]:
  """The data of every task; with `upstream` of the backbone, if they are named.

  One `TaskError` names what all tasks together lack, with what to give.
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
  own = _of_backbone(tasks, flags) if upstream else None
  if isinstance(own, _Missing):
    missing.append(own)
    own = None
  if missing:
    more = len(missing) - _LISTED
    shown = missing[:_LISTED] + ([f"and {more} more"] if more > 0 else [])
    raise TaskError(
      "which data are opened the command line says, not a task. Missing: "
      f"{'; '.join(shown)}. Or give --data_root=DIR, for all that tasks name "
      "below a directory that you trust."
    )
  return chosen, own


def require_classes(task: Task, source: Split) -> None:
  """Refuse a data set with other classes than the task has learned."""
  spec = task.spec
  learned = spec.kind.name, spec.class_names
  if learned != (source.kind, source.class_names):
    raise TaskError(
      f"task {task.name!r} has {spec.num_classes} {spec.kind.name} "
      f"({_first_of(spec.class_names)}, ...), the data set "
      f"{source.full_name!r} has {source.num_classes} {source.kind} "
      f"({_first_of(source.class_names)}, ...)."
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
  """Data of the command line, or of the first task that names any."""
  if flags.data.get(BACKBONE) == "":
    return None
  keys = ("name", "dir", "split", "eval_crop", "resize")
  all_said = [_said(task, "upstream", keys) for task in tasks]
  settings = next((found for found in all_said if found.get("name")), {})
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
  """The split of the command line, else of a hint that may be followed."""
  name = flags.data.get(owner, common)
  directory = flags.directories.get(owner, flags.directories.get(""))
  if name == EMBEDDINGS or (name is None and hint.name == EMBEDDINGS):
    return (
      f"{owner!r} was trained on embeddings, and images are evaluated (give "
      f"--data={owner}=NAME --data_dir={owner}=DIR of a data set of images)"
    )
  common_split = "" if owner == BACKBONE else flags.splits.get("", "")
  split = flags.splits.get(owner, common_split) or hint.split
  found: SplitRef | None = None
  if name is None and _SHIPPED.fullmatch(hint.name):
    found = SplitRef(hint.name, "", split, download=False)
  elif name is not None and (directory or name not in OF_A_DIRECTORY):
    found = SplitRef(name, directory or "", split, download=True)
  elif name is None and _DATA_NAME.fullmatch(hint.name):
    directory = directory or _below(hint.directory, flags.roots)
    if directory:
      found = SplitRef(hint.name, directory, split, download=False)
  if not found:
    return _needed(owner, hint, name)
  if not split:
    return f"{owner!r} knows no split (give --split={owner}=SPLIT)"
  # The choice of columns or features opens nothing.
  if found.name == hint.name:
    found = dataclasses.replace(found, label=hint.label, path=hint.path)
  return dataclasses.replace(found, kind=hint.kind)


def _below(directory: str, roots: Sequence[str]) -> str:
  """A directory without links if it lies below one of `roots`; else ""."""
  if not directory or "\0" in directory:
    return ""
  found = os.path.realpath(os.path.expanduser(directory))
  for root in roots:
    root = os.path.realpath(os.path.expanduser(root))
    if os.path.commonpath([root, found]) == root:
      return found
  return ""


def _needed(owner: str, hint: _Hint, name: str | None) -> str:
  """The hint of a task, and the flags that would open its data."""
  directory = hint.directory if _PLAIN.fullmatch(hint.directory) else "DIR"
  flag = f"--data_dir={owner}={directory}"
  if name is not None:  # a folder or a list, without a directory
    return f"{owner!r} has no directory (give {flag})"
  place = f" in {_shown(hint.directory)}" if hint.directory else ""
  says = f"{owner!r} says {_shown(hint.name)}{place}"
  if not _DATA_NAME.fullmatch(hint.name):
    says = says if hint.name else f"{owner!r} says nothing of its data"
    return f"{says} (give --data={owner}=NAME --data_dir={owner}=DIR)"
  if hint.directory or hint.name in OF_A_DIRECTORY:
    return f"{says} (give {flag})"
  named = f"--data={owner}={hint.name}"
  return f"{says} (give {named}, which TFDS may download, or {flag})"


def _said(task: Manifest, part: str, keys: Sequence[str]) -> dict[str, Any]:
  """Options of the run that made a task, if their types are right."""
  made = task.provenance.get("config")
  values = made.get(part) if isinstance(made, Mapping) else None
  if not isinstance(values, Mapping):
    return {}
  kinds = {key: int if key == "resize" else str for key in keys}
  return {k: values[k] for k in keys if type(values.get(k)) is kinds[k]}


def _shown(text: str) -> str:
  return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
