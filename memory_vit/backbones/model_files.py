"""Find the files of a model, as transformers and timm lay them out.

config.json                   how the model computes
model.safetensors             its weights, or
model.safetensors.index.json  the list of several files of weights
processor_config.json         how its images are prepared, by transformers 5;
preprocessor_config.json      by transformers 4, or 5 for images alone;
                              timm writes it into config.json
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
# The files that are fetched of a published model; README.md has its licence.
PATTERNS = (CONFIG, PROCESSOR, PREPROCESSOR, WEIGHTS,
            "model-*-of-*.safetensors", INDEX, "README.md")  # fmt: skip
# A name and no path: a shard lies beside its index.
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
  """The paths of the files of a model."""

  source: str  # as the user named it
  config: Path
  weights: Path  # a .safetensors file, or the index of several
  preprocessor: Path | None  # the one of the two that transformers 5 reads
  card: Path | None  # README.md

  @contextlib.contextmanager
  def open_weights(self) -> Iterator[StoredArrays]:
    """Open the weights, which must be the arrays that their index lists."""
    listed = _weight_map(self.weights) if self.weights.name == INDEX else {}
    shards = [self.weights.with_name(n) for n in sorted({*listed.values()})]
    with open_safetensors(shards or [self.weights]) as arrays:
      for name in sorted(listed.keys() | {*arrays} if listed else ()):
        expected = listed.get(name, "no file")
        found = arrays.file_of(name).name if name in arrays else "no file"
        if expected != found:
          raise BackboneError(
            f"{self.weights}: array {brief(name)} is listed in {expected}, and "
            f"lies in {found}."
          )
      yield arrays

  def digests(self) -> dict[str, str]:
    """{file: SHA-256} of all files that the backbone is made of."""
    used = {self.config, self.weights}
    if self.preprocessor:
      used.add(self.preprocessor)
    with self.open_weights() as tensors:
      used |= {tensors.file_of(name) for name in tensors}
    return {file.name: checksums.file_digest(file) for file in sorted(used)}


def is_model(path: Path) -> bool:
  """Whether a path is read as such a model, rather than as an .npz file."""
  return path.is_dir() or path.suffix in (
    SAFETENSORS,
    *_PICKLES,
  )


def holds_model(directory: Path) -> bool:
  names = (WEIGHTS, INDEX)
  return any((directory / name).is_file() for name in names)


def find(path: Path, source: str) -> ModelFiles:
  """Find the files beside `path`: a directory or a .safetensors file."""
  try:
    return _find(path, source)
  except OSError as error:  # such as a directory without permission
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
      f"{weights} has no {CONFIG} beside it, which says what model it holds: "
      "put there the one that was published with it."
    )
  return ModelFiles(
    source=source,
    config=directory / CONFIG,
    weights=weights,
    preprocessor=_preprocessor(directory),
    card=_if_there(directory / "README.md"),
  )


def _weights(directory: Path) -> Path:
  """The weights in a directory, or the index of their shards."""
  places = [directory / WEIGHTS, directory / INDEX]
  found = [place for place in places if place.is_file()]
  if len(found) == 1:
    return found[0]
  if found:
    raise BackboneError(
      f"{directory} has both {WEIGHTS} and {INDEX}: leave "
      "the one that belongs to the model."
    )
  for file in sorted(directory.iterdir()):
    if file.suffix in _PICKLES:
      raise _pickle(file)
  raise BackboneError(
    f"no file {str(directory)!r}: it is a directory without {WEIGHTS} or "
    f"{INDEX}. Expected a model as transformers or timm save "
    f"it, the path of an .npz file, or one of {', '.join(KNOWN)}."
  )


def _pickle(file: Path) -> BackboneError:
  return BackboneError(
    f"{file} is a pickle, which can run any code, and is not read: fetch the "
    f"{WEIGHTS} of the same model, or if you trust the file make one, with "
    "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers, "
    f"and copy its {PREPROCESSOR} or {PROCESSOR}."
  )


def _preprocessor(directory: Path) -> Path | None:
  """The file about images; transformers 5 takes the newer one if it states it.

  Others of this name are about texts alone.
  """
  newer = _if_there(directory / PROCESSOR)
  if newer and json_files.read_object(newer).get("image_processor") is not None:
    return newer
  return _if_there(directory / PREPROCESSOR)


def _if_there(file: Path) -> Path | None:
  return file if file.is_file() else None


def _weight_map(index: Path) -> dict[str, str]:
  """{array: file} of an index."""
  found = json_files.read_object(index).get("weight_map")
  if not isinstance(found, dict) or not found:
    raise BackboneError(
      f"{index}: weight_map is {brief(found)}, expected an object with the "
      "file of every array."
    )
  for name, shard in found.items():
    if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
      raise BackboneError(
        f"{index}: array {brief(name)} is listed in {brief(shard)}, expected "
        f"the name of a {SAFETENSORS} file in the same directory."
      )
  return found
