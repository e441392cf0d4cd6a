"""Models of the Hugging Face hub, fetched and kept by huggingface_hub."""

import functools
import re
from pathlib import Path

from memory_vit.backbones import model_files
from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief, named

PREFIX = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,95})"
_ADDRESS = re.compile(
  rf"hf://(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]{{1,100}}))?"
)


def is_address(text: str) -> bool:
  """Whether a text is the address of a model on the hub."""
  return _ADDRESS.fullmatch(text) is not None


@functools.cache  # a command asks several times, and the hub is far away
def fetch(address: str) -> Path:
  """Fetch a model, where it is not in the cache of huggingface_hub already.

  Of the repository only what describes the model, and .safetensors files.

  Args:
    address: hf://OWNER/NAME or hf://OWNER/NAME@REVISION, a branch, tag or
      commit.

  Returns:
    A directory with the files.

  Raises:
    BackboneError: for anything else; where huggingface_hub is not installed, or
      cannot fetch it: with what to fetch by hand.
  """
  found = _ADDRESS.fullmatch(address)
  if not found:
    raise BackboneError(
      f"{brief(address)} is no model: expected hf://OWNER/NAME or "
      "hf://OWNER/NAME@REVISION, such as hf://google/vit-base-patch16-224."
    )
  by_hand = (
    f"Or fetch {model_files.CONFIG}, {model_files.PREPROCESSOR} and the "
    f".safetensors files of {found['name']} by hand, put them into one "
    "directory, and give that."
  )
  try:
    import huggingface_hub  # Only who fetches needs it.
  except ModuleNotFoundError as error:
    raise BackboneError(
      f"{address} needs {error.name}, which is not installed: "
      f"pip install 'memory_vit[hf]'. {by_hand}"
    ) from error
  try:
    directory = huggingface_hub.snapshot_download(
      found["name"],
      revision=found["revision"],
      allow_patterns=list(model_files.PATTERNS),
    )
  # Any: of the network, of the hub, of the disk.
  except Exception as error:
    raise BackboneError(
      f"cannot fetch {address}: {named(error).rstrip('.')}. {by_hand}"
    ) from error
  return Path(directory)
