"""Find the files of a model in the layout of transformers or timm.

config.json                   the architecture
model.safetensors             the weights, or
model.safetensors.index.json  an index of several files with weights
processor_config.json         image preprocessing, written by transformers 5, or
preprocessor_config.json      by transformers 4, and by 5 for image-only models;
                              timm writes preprocessing into config.json
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from memory_vit.backbones import json_files
from memory_vit.backbones.download import KNOWN
from memory_vit.backbones.stored_arrays import (
  SAFETENSORS,
  StoredArrays,
  open_safetensors,
)
from memory_vit.errors import BackboneError
from memory_vit.runtime import checksums
from memory_vit.runtime.messages import brief, first_line

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
# Files to fetch from the repository of a model. README.md states the licence.
PATTERNS = (CONFIG, PROCESSOR, PREPROCESSOR, WEIGHTS,
            "model-*-of-*.safetensors", INDEX, "README.md")  # fmt: skip
# An index names each shard by a file name, not a path: the shards of a model
# lie in the directory of the index.
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
  """Paths of the files of a model."""

  source: str  # path or address that the user gave
  config: Path
  weights: Path  # a .safetensors file, or the index of several shards
  # The file that states the image preprocessing; None if the file is missing.
  preprocessor: Path | None
  card: Path | None  # README.md

  @contextlib.contextmanager
  def open_weights(self) -> Iterator[StoredArrays]:
    """Open the weights; raise if an index disagrees with the files."""
    listed = _weight_map(self.weights) if self.weights.name == INDEX else {}
    shards = [self.weights.with_name(n) for n in sorted({*listed.values()})]
    with open_safetensors(shards or [self.weights]) as arrays:
      for name in sorted(listed.keys() | {*arrays} if listed else ()):
        expected = listed.get(name, "no file")
        actual = arrays.file_of(name).name if name in arrays else "no file"
        if expected != actual:
          raise BackboneError(
            f"{self.weights}: array {brief(name)} is listed in {expected}, but "
            f"lies in {actual}: fetch all files of the model again."
          )
      yield arrays

  def digests(self) -> dict[str, str]:
    """Return {file name: SHA-256} of all files that define the backbone."""
    used = {self.config, self.weights}
    if self.preprocessor:
      used.add(self.preprocessor)
    with self.open_weights() as tensors:
      used |= {tensors.file_of(name) for name in tensors}
    return {file.name: checksums.file_digest(file) for file in sorted(used)}


def is_model(path: Path) -> bool:
  """Return whether to read a path as a model of transformers or timm."""
  return path.is_dir() or path.suffix in (SAFETENSORS, *_PICKLES)


def holds_model(directory: Path) -> bool:
  names = (WEIGHTS, INDEX)
  return any((directory / name).is_file() for name in names)


def find(path: Path, source: str) -> ModelFiles:
  """Find the files of a model; `path` is a directory or a .safetensors file."""
  try:
    return _find(path, source)
  except OSError as error:  # such as missing permission to read the directory
    raise BackboneError(
      f"{path} cannot be read: {first_line(error)}"
    ) from error


def _find(path: Path, source: str) -> ModelFiles:
  if not path.is_dir():
    if path.suffix in _PICKLES:
      raise _pickle(path)
    if not path.is_file():
      raise BackboneError(f"no file {str(path)!r}.")
  directory = path if path.is_dir() else path.parent
  weights = _weights(path) if path.is_dir() else path
  if not (directory / CONFIG).is_file():
    raise BackboneError(
      f"{weights} has no {CONFIG} beside it. Copy the missing file, which "
      "describes the model, from where the weights were published."
    )
  return ModelFiles(
    source=source,
    config=directory / CONFIG,
    weights=weights,
    preprocessor=_preprocessor(directory),
    card=_if_there(directory / "README.md"),
  )


def _weights(directory: Path) -> Path:
  """Return the weights file of a directory, or the index of its shards."""
  places = [directory / WEIGHTS, directory / INDEX]
  existing = [place for place in places if place.is_file()]
  if len(existing) == 1:
    return existing[0]
  if existing:
    raise BackboneError(
      f"{directory} has both {WEIGHTS} and {INDEX}: keep "
      "only the file that belongs to the model."
    )
  for file in sorted(directory.iterdir()):
    if file.suffix in _PICKLES:
      raise _pickle(file)
  raise BackboneError(
    f"{str(directory)!r} is a directory without {WEIGHTS} or {INDEX}. "
    "Expected a model as saved by transformers or timm; the path of an .npz "
    f"file; or one of the names {', '.join(KNOWN)}."
  )


def _pickle(file: Path) -> BackboneError:
  return BackboneError(
    f"{file} is a pickle, which could run any code, so it is not read: fetch "
    f"the {WEIGHTS} of the same model. Or if you trust the file, convert it by "
    "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers, "
    f"and copy its {PREPROCESSOR} or {PROCESSOR} to NEW_DIR."
  )


def _preprocessor(directory: Path) -> Path | None:
  """Return the file that states image preprocessing; None if it is missing.

  Like version 5 of transformers, prefer processor_config.json to the older
  preprocessor_config.json, unless processor_config.json describes only texts.
  """
  newer = _if_there(directory / PROCESSOR)
  if newer and json_files.read_object(newer).get("image_processor") is not None:
    return newer
  return _if_there(directory / PREPROCESSOR)


def _if_there(file: Path) -> Path | None:
  return file if file.is_file() else None


def _weight_map(index: Path) -> dict[str, str]:
  """Read an index; return {array name: file name}."""
  shards = json_files.read_object(index).get("weight_map")
  if not isinstance(shards, dict) or not shards:
    raise BackboneError(
      f"{index}: weight_map is {brief(shards)}, expected an object that gives "
      "the file name for every array name."
    )
  for name, shard in shards.items():
    if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
      raise BackboneError(
        f"{index}: the file of array {brief(name)} is {brief(shard)}, expected "
        f"the name of a {SAFETENSORS} file in the same directory."
      )
  return shards
