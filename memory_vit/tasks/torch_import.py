"""Import tasks of the public PyTorch reproduction, its `MemoryCapableViT`.

Its state dict holds a ViT of transformers and, for every head K >= 1,

  vit.embeddings.cls_tokens.K                                  (1, 1, d)
  vit.encoder.layer.L.attention.attention.memory_tokens.K-1    (1, m, d)
  classifiers.K.weight, classifiers.K.bias                     (c, d), (c,)

Memory is inserted after the LayerNorm. The `attention_mask` of each layer shows
whether heads attend to earlier heads (model extension).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memory_vit.backbones import json_files, load, stored_arrays
from memory_vit.backbones.families import detect
from memory_vit.backbones.families.table import Shape, take
from memory_vit.backbones.stored_arrays import as_float32
from memory_vit.errors import BackboneError, TaskError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing, Task, TaskSpec
from memory_vit.runtime import checksums
from memory_vit.runtime.messages import brief, first_line

State = Mapping[str, np.ndarray]
_ATTENTION = "vit.encoder.layer.{}.attention.attention"
_LEARNED = re.compile(
  r"vit\.embeddings\.cls_tokens\.[0-9]+|classifiers\.[0-9]+\.(weight|bias)|"
  r"vit\.encoder\.layer\.[0-9]+\.attention\.attention\."
  r"(memory_tokens\.[0-9]+|attention_mask)"
)
_FIRST_CLASS, _CLASS = "vit.embeddings.cls_tokens.0", "vit.embeddings.cls_token"
# Maximum number of heads besides the original head. Real models have far fewer.
_MOST_HEADS = 256


def read_tasks(file: Path, source: str, **mean_std: Any) -> tuple[Task, ...]:
  """Read the tasks of a `torch.save` file without running its code."""
  model = load.model_source(source)
  if model is None:
    raise BackboneError(
      f"{brief(source)} is not a model of transformers: expected the model on "
      f"which the tasks of {file} were trained, as a directory or "
      "hf://OWNER/NAME."
    )
  config = json_files.read_object(model.config)
  backbone = load.load_backbone(source, **mean_std)
  state = _state(file)
  provenance = {
    "converted_from": {
      "file": file.name, "sha256": checksums.file_digest(file),
    }
  }  # fmt: skip
  return tasks_of(state, config, backbone, str(file), provenance)


def tasks_of(
  state: State,
  config: Mapping[str, Any],
  backbone: Backbone,
  where: str,
  provenance: Mapping[str, Any],
) -> tuple[Task, ...]:
  """Return the tasks of a state dict, in the order of its heads."""
  try:
    _require_trunk(state, config, backbone, where)
    learned = {
      name: as_float32(array, f"{where}: {name}")
      for name, array in state.items()
      if _LEARNED.fullmatch(name) and not name.endswith("attention_mask")
    }
    heads = range(1, _count(learned, where) + 1)
    expected: dict[str, Shape] = {}
    for k in heads:
      expected |= _shapes(learned, backbone, k)
    weights = take(learned, expected, where, (_FIRST_CLASS, "classifiers.0.*"))
    params = [_params(weights, backbone, k) for k in heads]
  except BackboneError as error:
    raise TaskError(str(error)) from error
  extended = _is_extended(state, backbone, params, where)
  return _tasks(params, extended, backbone, provenance)


def _state(file: Path) -> State:
  try:
    import torch  # an optional dependency, needed only for these files
  except ModuleNotFoundError as error:
    raise TaskError(
      f"{file} is a PyTorch file, and {error.name} is not installed: install "
      "it for this one command (pip install torch)."
    ) from error
  _require_plain_zip(file)
  try:
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    _require_stored(tensors, file)
    return {
      name: tensor.detach().to(torch.float32).numpy()
      for name, tensor in tensors.items()
    }
  # For a hostile file, torch may raise an exception of any type.
  except Exception as error:
    raise TaskError(
      f"{file} is not a state dict of arrays: {first_line(error)}"
    ) from error


def _require_stored(tensors: Mapping[Any, Any], file: Path) -> None:
  """Raise `ValueError` unless all names are strings, and `tensors` fit `file`.

  The tensors must not have more numbers than the file has bytes.
  """
  for name in tensors:
    if not isinstance(name, str):
      raise ValueError(f"{brief(name)} is not the name of an array")
  # A tensor of stride 0 may have a billion values, but store only one of them.
  values = sum(tensor.numel() for tensor in tensors.values())
  if values > (size := file.stat().st_size):
    raise ValueError(f"{values:,} values do not fit into {size:,} bytes")


def _require_plain_zip(file: Path) -> None:
  """Raise `TaskError` unless `file` is a ZIP that does not grow if unpacked."""
  if not zipfile.is_zipfile(file):
    raise TaskError(
      f"{file} does not exist, or was not written by torch.save (of PyTorch "
      "1.6 or later): expected the state dict of a MemoryCapableViT."
    )
  try:
    with zipfile.ZipFile(file) as archive:
      entries = archive.infolist()
  except Exception as error:  # zipfile raises many types of errors
    raise TaskError(f"{file} cannot be read: {first_line(error)}") from error
  is_packed = any(e.compress_type != zipfile.ZIP_STORED for e in entries)
  total = sum(entry.file_size for entry in entries)
  if is_packed or total > min(stored_arrays.MAX_BYTES, file.stat().st_size):
    raise TaskError(
      f"{file} is compressed, or too large: unpacking would give {total:,} "
      "bytes. The file is not read: expected a state dict as torch.save writes "
      "it, which is not compressed."
    )


def _require_trunk(
  state: State, config: Mapping[str, Any], backbone: Backbone, where: str
) -> None:
  """Raise `BackboneError` unless `state` has `backbone`'s frozen weights."""
  trunk = {
    name: as_float32(array, f"{where}: {name}")
    for name, array in state.items()
    if not _LEARNED.fullmatch(name)
  }
  if _FIRST_CLASS in state:
    trunk[_CLASS] = as_float32(state[_FIRST_CLASS], where)
  converted = detect.convert(config, trunk, where)
  expected = trees.flatten(backbone.params)
  for name, array in converted.arrays.items():
    # Do not compare the heads, nor the patch embedding, into which
    # `load_backbone` has folded the normalization of images.
    is_folded = name.startswith(("embedding/", "head/", "pre_logits/"))
    if not is_folded and not np.array_equal(array, np.asarray(expected[name])):
      raise BackboneError(
        f"{where} was trained on another ViT than the given model: the weights "
        f"{name} differ."
      )


def _count(learned: State, where: str) -> int:
  """Return the number of heads, not counting the original head."""
  heads = sum(f"classifiers.{k}.weight" in learned
              for k in range(1, len(learned) + 1))  # fmt: skip
  if not 1 <= heads <= _MOST_HEADS:
    raise BackboneError(
      f"{where} has {heads} heads (classifiers.1, ...) besides the original "
      f"head: expected 1 to {_MOST_HEADS}."
    )
  return heads


def _shapes(learned: State, backbone: Backbone, k: int) -> dict[str, Shape]:
  """Return the shapes, {name: shape}, that the arrays of head `k` must have.

  The number of cells is read from the memory of layer 0, and the number of
  classes from the classifier weight.
  """
  d = backbone.config.width
  first = learned.get(f"{_ATTENTION.format(0)}.memory_tokens.{k - 1}")
  cells = first.shape[1] if first is not None and first.ndim == 3 else 1
  head = learned[f"classifiers.{k}.weight"]
  classes = len(head) if head.ndim else 1
  memory = {
    f"{_ATTENTION.format(layer)}.memory_tokens.{k - 1}": (1, cells, d)
    for layer in range(backbone.config.depth)
  }
  return {
    f"vit.embeddings.cls_tokens.{k}": (1, 1, d),
    f"classifiers.{k}.weight": (classes, d),
    f"classifiers.{k}.bias": (classes,),
    **memory,
  }


def _params(arrays: State, backbone: Backbone, k: int) -> dict[str, Any]:
  memory = [
    arrays[f"{_ATTENTION.format(layer)}.memory_tokens.{k - 1}"]
    for layer in range(backbone.config.depth)
  ]
  return {
    "cls": arrays[f"vit.embeddings.cls_tokens.{k}"][0, 0],
    "memory": np.concatenate(memory),
    "head": {
      "kernel": arrays[f"classifiers.{k}.weight"].T,
      "bias": arrays[f"classifiers.{k}.bias"],
    },
  }


def _is_extended(
  state: State,
  backbone: Backbone,
  params: Sequence[Mapping[str, Any]],
  where: str,
) -> bool:
  """Return True if the mask lets each head attend to all earlier heads.

  Return False if it separates all heads; raise `TaskError` for other masks.
  """
  cells = [arrays["memory"].shape[1] for arrays in params]
  masks = [
    state.get(f"{_ATTENTION.format(layer)}.attention_mask")
    for layer in range(backbone.config.depth)
  ]
  for extended in (False, True):
    expected = _mask(backbone.config.num_patches, cells, extended)
    if all(m is not None and np.array_equal(m, expected) for m in masks):
      return extended
  raise TaskError(
    f"{where}: attention_mask is missing, or fits neither concatenated heads "
    "nor model extension."
  )


def _mask(patches: int, cells: Sequence[int], extended: bool) -> np.ndarray:
  """Return the mask (1, queries, keys) that is added to attention scores."""
  # The queries are the patches, the original class token, and the class tokens
  # of the heads. The keys are all these tokens, then the memory of each head.
  queries = patches + 1 + len(cells)
  mask = np.zeros((1, queries, queries + sum(cells)), np.float32)
  mask[:, :, patches + 1 :] = -np.inf
  start = queries
  for i, count in enumerate(cells):
    token = patches + 1 + i
    last = queries if extended else token + 1
    mask[:, token:last, token] = 0
    mask[:, token:last, start : start + count] = 0
    start += count
  return mask


def _tasks(
  params: Sequence[Mapping[str, Any]],
  extended: bool,
  backbone: Backbone,
  provenance: Mapping[str, Any],
) -> tuple[Task, ...]:
  size = backbone.config.image_size
  tasks: list[Task] = []
  for k, head in enumerate(params, 1):
    parents = tasks if extended else []
    spec = TaskSpec(
      name=f"head-{k}",
      num_classes=len(head["head"]["bias"]),
      cells=head["memory"].shape[1],
      memory_norm=False,
      attends_to=tuple(parent.name for parent in parents),
      parent_digests=tuple(parent.digest for parent in parents),
      backbone=backbone.id,
      preprocessing=backbone.preprocessing
      or EvalPreprocessing(image_size=size),
    )
    arrays = jax.tree.map(jnp.asarray, dict(head))
    tasks.append(Task(spec, arrays, provenance))
  return tuple(tasks)
