"""Fetch models of the Hugging Face hub, cached by huggingface_hub."""

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
  return _ADDRESS.fullmatch(text) is not None


@functools.cache  # a command calls it several times
def fetch(address: str) -> Path:
  """Fetch the configuration and .safetensors files into a directory."""
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
    import huggingface_hub  # only downloads need it
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
  except Exception as error:
    raise BackboneError(
      f"cannot fetch {address}: {named(error).rstrip('.')}. {by_hand}"
    ) from error
  return Path(directory)
