"""Fetch models of the Hugging Face hub, cached by huggingface_hub."""

import functools
from pathlib import Path

from memory_vit.backbones import model_files
from memory_vit.errors import BackboneError
from memory_vit.runtime import hub
from memory_vit.runtime.messages import brief


def is_model(text: str) -> bool:
  """Return whether a text is the hub address of a model, not of a task."""
  address = hub.parse(text)
  return address is not None and not address.task


def has_config(text: str) -> bool:
  """Return whether a repository has a config.json; fetches only this file."""
  address = hub.parse(text)
  assert address
  names = [model_files.CONFIG]
  directory = hub.fetch(address, names, BackboneError, "")
  return (directory / model_files.CONFIG).is_file()


@functools.cache  # a command calls `fetch` several times for a model
def fetch(text: str) -> Path:
  """Fetch the files of a model; return the directory that contains them."""
  address = hub.parse(text)
  if not address or address.task:
    raise BackboneError(
      f"{brief(text)} is not an address of a model: expected hf://OWNER/NAME "
      "or hf://OWNER/NAME@REVISION, such as hf://google/vit-base-patch16-224."
    )
  by_hand = (
    f"Or fetch {model_files.CONFIG}, {model_files.PREPROCESSOR} or "
    f"{model_files.PROCESSOR}, and the .safetensors files of "
    f"{address.repository} by hand into one directory, and give its path."
  )
  return hub.fetch(address, model_files.PATTERNS, BackboneError, by_hand)
