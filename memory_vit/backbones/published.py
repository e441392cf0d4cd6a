"""A published ViT before it is put on a device, and what is noted beside it.

Beside the arrays of an .npz file may stand one more entry, `memory_vit.json`,
which says what the shapes do not: how the model computes, how it wants its
images, and the files that it was converted from. Files without it are read as
ever, and numpy opens those that have it.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones import json_files
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.stated import LIMITS, stated
from memory_vit.errors import BackboneError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import schema
from memory_vit.runtime.messages import brief

ENTRY = "memory_vit.json"
FORMAT_VERSION = 1
# Of the entry, which lists the files of a source.
MAX_BYTES = 2**20
_KEYS = ("format_version", "config", "evaluation", "source")
# Who loads a backbone chooses it.
_CHOSEN = "dtype"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneSource:
  """Where a converted backbone is from.

  Attributes:
    name: what was converted, such as "hf://google/vit-base-patch16-224".
    family: as its config.json calls it.
    licence: as its files state it.
    files: {file: SHA-256} of all that it was made of.
  """

  name: str
  family: str
  licence: str
  files: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
  """What the entry holds: configuration, image preprocessing and origin."""

  config: ViTConfig
  evaluation: EvalPreprocessing | None = None
  source: BackboneSource | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(Note):
  """A ViT as it was published.

  Attributes:
    arrays: "a/b/c" -> float32, for images in [-1, 1].
    where: its file, for messages.
    layout: the layout of the weights in the file, for people.
    states_config: whether the source states how the model computes; otherwise
      only shapes tell.
  """

  arrays: dict[str, np.ndarray]
  where: str
  layout: str
  states_config: bool = False


def to_text(note: Note) -> str:
  """The content of the entry."""
  config = dataclasses.asdict(note.config)
  del config[_CHOSEN]
  values = {
    "format_version": FORMAT_VERSION,
    "config": config,
    "evaluation": note.evaluation and dataclasses.asdict(note.evaluation),
    "source": note.source and dataclasses.asdict(note.source),
  }
  return json.dumps(values, indent=2, sort_keys=True) + "\n"


def parse(content: bytes, where: str) -> Note:
  """Read the content of the entry, of at most `MAX_BYTES`.

  Raises:
    BackboneError: where it is not what `to_text` writes.
  """
  values = json_files.parse_object(content, where)
  schema.require_keys(values, _KEYS, where, BackboneError)
  if values["format_version"] != FORMAT_VERSION:
    raise BackboneError(
      f"{where} has format_version {brief(values['format_version'])}, this "
      f"version of memory_vit reads {FORMAT_VERSION}: update memory_vit."
    )
  return Note(
    config=_config(values["config"], f"{where}: config"),
    evaluation=_optional(EvalPreprocessing, values, "evaluation", where),
    source=_source(values, where),
  )


def _config(values: Any, where: str) -> ViTConfig:
  fields = Fields(values, where)
  for name in LIMITS:
    stated(fields, name, name)
  config: ViTConfig = schema.build(
    ViTConfig, {**values, _CHOSEN: "float32"}, where, BackboneError
  )
  return config


def _optional(
  cls: type, values: Mapping[str, Any], key: str, where: str
) -> Any:
  if values[key] is None:
    return None
  return schema.build(cls, values[key], f"{where}: {key}", BackboneError)


def _source(values: Mapping[str, Any], where: str) -> BackboneSource | None:
  source: BackboneSource | None = _optional(
    BackboneSource, values, "source", where
  )
  if source and not all(type(d) is str for d in source.files.values()):
    raise BackboneError(f"{where}: source.files has digests that are no text.")
  return source
