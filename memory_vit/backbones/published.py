"""A published ViT on the host, and the note that is stored with its arrays.

The note is an optional entry of an .npz file, `memory_vit.json`. It states what
array shapes do not: the configuration, the preprocessing, and the files that
the model was converted from. numpy also opens files with this entry.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones import json_files
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.fold import Rgb
from memory_vit.backbones.families.vit_fields import LIMITS, vit_field
from memory_vit.errors import BackboneError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import schema
from memory_vit.runtime.messages import brief

ENTRY = "memory_vit.json"
FORMAT_VERSION = 1
# Maximum size of the entry `ENTRY` in bytes.
MAX_BYTES = 2**20
_KEYS = ("format_version", "config", "evaluation", "source")
# {field of `ViTConfig`: value} for fields that the user chooses on loading. The
# JSON text of a `Note` omits these fields.
_CHOSEN = {"dtype": "float32", "platform": ""}
# {"mean" or "std": (value for images in [0, 1], source of the value)}.
Normalization = Mapping[str, tuple[Rgb, str]]
_LAYOUT = ((0.5, 0.5, 0.5), ".npz files: images in [-1, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneSource:
  """Origin of a converted backbone."""

  name: str  # path or address that the user gave
  family: str  # "timm", or the `model_type` in config.json
  licence: str
  files: dict[str, str]  # {file name: SHA-256}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
  """Content of the entry `memory_vit.json` in an .npz file."""

  config: ViTConfig
  preprocessing: EvalPreprocessing | None = None
  source: BackboneSource | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(Note):
  """A published ViT as read from its source."""

  # {"a/b/c": float32 array} of a ViT that takes images in [-1, 1].
  arrays: dict[str, np.ndarray]
  where: str  # path of the file, shown in messages
  layout: str  # name of the layout of the weights, for display
  # Whether the files state `config`; if not, array shapes determine it.
  states_config: bool = False
  # Mean and std of the source's images. In `arrays`, they are already folded
  # into the patch embedding.
  normalization: Normalization = dataclasses.field(
    default_factory=lambda: {"mean": _LAYOUT, "std": _LAYOUT}
  )
  preprocessing_from: str = ""  # where `preprocessing` is stated, for display
  # {name in `arrays`: stored dtype} of an .npz file; {} for other formats.
  dtypes: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)


def to_text(note: Note) -> str:
  config = dataclasses.asdict(note.config)
  for field in _CHOSEN:
    del config[field]
  values = {
    "format_version": FORMAT_VERSION,
    "config": config,
    "evaluation": note.preprocessing and dataclasses.asdict(note.preprocessing),
    "source": note.source and dataclasses.asdict(note.source),
  }
  return json.dumps(values, indent=2, sort_keys=True) + "\n"


def parse(content: bytes, where: str) -> Note:
  """Parse the content of the entry `ENTRY`; the caller limits the size."""
  values = json_files.parse_object(content, where)
  schema.require_keys(values, _KEYS, where, BackboneError)
  if values["format_version"] != FORMAT_VERSION:
    raise BackboneError(
      f"{where} has format_version {brief(values['format_version'])}, but "
      f"this version of memory_vit reads {FORMAT_VERSION}: update memory_vit."
    )
  return Note(
    config=_config(values["config"], f"{where}: config"),
    preprocessing=_optional(EvalPreprocessing, values, "evaluation", where),
    source=_source(values, where),
  )


def _config(values: Any, where: str) -> ViTConfig:
  fields = Fields(values, where)
  for name in LIMITS:
    vit_field(fields, name, name)
  config: ViTConfig = schema.build(
    ViTConfig, {**values, **_CHOSEN}, where, BackboneError
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
    raise BackboneError(
      f"{where}: source.files has a digest that is no string, expected SHA-256."
    )
  return source
