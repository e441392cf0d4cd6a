"""Fetch models of the Hugging Face hub, cached by huggingface_hub."""

import functools
from pathlib import Path

from memory_vit.backbones import model_files
from memory_vit.errors import BackboneError
from memory_vit.runtime import hub
from memory_vit.runtime.messages import brief


def is_model(text: str) -> bool:
  """Whether it is the address of a model, and of no task."""
  found = hub.parse(text)
  return found is not None and not found.task


def has_config(text: str) -> bool:
  """Whether the repository is that of a model; only this file is fetched."""
  address = hub.parse(text)
  assert address
  names = [model_files.CONFIG]
  directory = hub.fetch(address, names, BackboneError, "")
  return (directory / model_files.CONFIG).is_file()


@functools.cache  # a command calls it several times
def fetch(text: str) -> Path:
  """Fetch the configuration and .safetensors files into a directory."""
  address = hub.parse(text)
  if not address or address.task:
    raise BackboneError(
      f"{brief(text)} is no model: expected hf://OWNER/NAME or "
      "hf://OWNER/NAME@REVISION, such as hf://google/vit-base-patch16-224."
    )
  by_hand = (
    f"Or fetch {model_files.CONFIG}, {model_files.PREPROCESSOR} or "
    f"{model_files.PROCESSOR}, and the .safetensors files of "
    f"{address.repository} by hand, put them into one directory, and give that."
  )
  return hub.fetch(address, model_files.PATTERNS, BackboneError, by_hand)
