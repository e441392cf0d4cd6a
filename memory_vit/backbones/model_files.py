"""The files of a model as transformers and timm lay them out.

config.json                 how it computes
model.safetensors           its weights, or
model.safetensors.index.json  the list of several files of them
preprocessor_config.json    how its images are prepared; not of timm
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from memory_vit.backbones import safetensors_files
from memory_vit.backbones.download import KNOWN
from memory_vit.backbones.safetensors_files import Tensors
from memory_vit.errors import BackboneError
from memory_vit.runtime import checksums
from memory_vit.runtime.messages import first_line

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPROCESSOR = "preprocessor_config.json"
# What is fetched of a published model; README.md for its licence.
PATTERNS = (CONFIG, PREPROCESSOR, WEIGHTS, "model-*-of-*.safetensors",
            safetensors_files.INDEX, "README.md")  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
  """Where the parts of a model lie.

  Attributes:
    source: what the user gave, such as "hf://google/vit-base-patch16-224".
    config: config.json.
    weights: a .safetensors file, or the index of several.
    preprocessor: preprocessor_config.json, where there is one.
    card: README.md, where there is one.
  """

  source: str
  config: Path
  weights: Path
  preprocessor: Path | None
  card: Path | None

  @contextlib.contextmanager
  def open_weights(self) -> Iterator[Tensors]:
    """Open the weights; see `safetensors_files`."""
    if self.weights.name == safetensors_files.INDEX:
      opened = safetensors_files.open_shards(self.weights)
    else:
      opened = safetensors_files.open_file(self.weights)
    with opened as tensors:
      yield tensors

  def digests(self) -> dict[str, str]:
    """{file: SHA-256} of everything that the backbone is made of."""
    used = {self.config, self.weights}
    if self.preprocessor:
      used.add(self.preprocessor)
    with self.open_weights() as tensors:
      used |= {tensors.file_of(name) for name in tensors}
    return {file.name: checksums.file_digest(file) for file in sorted(used)}


def is_model(path: Path) -> bool:
  """Whether a path is to be read as such a model, rather than as an .npz."""
  return path.is_dir() or path.suffix in (
    safetensors_files.SUFFIX,
    *_PICKLES,
  )


def holds_model(directory: Path) -> bool:
  """Whether a directory has the weights of such a model."""
  names = (WEIGHTS, safetensors_files.INDEX)
  return any((directory / name).is_file() for name in names)


def find(path: Path, source: str) -> ModelFiles:
  """Find the files of a model.

  Args:
    path: a directory, or a .safetensors file with its config.json beside it.
    source: what the user gave.

  Raises:
    BackboneError: where there is none, or what there is cannot be used.
  """
  try:
    return _find(path, source)
  except OSError as error:  # such as of a directory that may not be read
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
    preprocessor=_if_there(directory / PREPROCESSOR),
    card=_if_there(directory / "README.md"),
  )


def _weights(directory: Path) -> Path:
  """The weights in a directory, or the index of their shards."""
  places = [directory / WEIGHTS, directory / safetensors_files.INDEX]
  found = [place for place in places if place.is_file()]
  if len(found) == 1:
    return found[0]
  if found:
    raise BackboneError(
      f"{directory} has both {WEIGHTS} and {safetensors_files.INDEX}: leave "
      "the one that belongs to the model."
    )
  for file in sorted(directory.iterdir()):
    if file.suffix in _PICKLES:
      raise _pickle(file)
  raise BackboneError(
    f"no file {str(directory)!r}: it is a directory without {WEIGHTS} or "
    f"{safetensors_files.INDEX}. Expected a model as transformers or timm save "
    f"it, the path of an .npz file, or one of {', '.join(KNOWN)}."
  )


def _pickle(file: Path) -> BackboneError:
  return BackboneError(
    f"{file} is a pickle, which can run any code, and is not read: fetch the "
    f"{WEIGHTS} of the same model, or make one where you trust the file, with "
    "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers."
  )


def _if_there(file: Path) -> Path | None:
  return file if file.is_file() else None
