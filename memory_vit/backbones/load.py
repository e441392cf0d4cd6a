"""Load a pretrained ViT from .npz files, transformers or timm.

Two layouts of .npz files are read; a file that does not have exactly the
weights of one ViT is refused with a list of all problems.

  vit_jax      the tree of `vit.VisionTransformer`, with layers numbered as by
               Flax Linen or as before it (all files under gs://vit_models)
  big_vision   no position embedding for the class token, which already includes
               it; blocks may be stacked along a first axis; of SigLIP and
               SigLIP 2 only the image tower is read, which has a probe instead
               of a class token
"""

import dataclasses
import fnmatch
import os
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import jax

from memory_vit.backbones import (
  hub_models,
  layouts,
  model_files,
  model_import,
  stored_arrays,
)
from memory_vit.backbones.download import KNOWN, local_file
from memory_vit.backbones.image_processor import as_rgb, at_size
from memory_vit.backbones.layouts import BLOCK, MAX_DEPTH, POSITIONS, Arrays
from memory_vit.backbones.model_files import ModelFiles
from memory_vit.backbones.published import ENTRY, Note, Published
from memory_vit.backbones.published import parse as parse_note
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, fingerprint_of, rounded
from memory_vit.model.vit_config import ViTConfig, square_side, vit_config
from memory_vit.runtime import compilation, dtypes, hub, paths
from memory_vit.runtime.messages import listed

# {pattern of array names: axes}. The axes determine the configuration.
_CONFIG_SHAPES = {
  "embedding/kernel": ("patch", "patch", "3", "width"),
  POSITIONS: ("1", "patches + 1", "width"),
  f"{BLOCK}*/MultiHeadDotProductAttention_0/query/kernel": (
    "width",
    "heads",
    "width / heads",
  ),
  f"{BLOCK}*/MlpBlock_0/Dense_0/kernel": ("width", "mlp_dim"),
}

# Maximum length of the list of problems in an error.
_MAX_CHARACTERS = 1_500
_INDENTED = "\n  "


def load_backbone(
  path: str | os.PathLike[str],
  image_size: int | None = None,
  dtype: str = "float32",
  *,
  gelu: str | None = None,
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
) -> Backbone:
  """Read a pretrained ViT, of vit_jax, big_vision, transformers or timm.

  Args:
    path: a local .npz file, a name of `download.KNOWN`, or an address that
      starts with https://, http:// or gs:// (downloads are cached in
      $MEMORY_VIT_CACHE, or ~/.cache/memory_vit); a directory with config.json
      and model.safetensors, as transformers or timm saves it; the .safetensors
      file in it; or `hf://OWNER/NAME[@REVISION]` of the Hugging Face hub.
    image_size: side of the images in pixels; the position embedding is resized
      for it. None keeps the image size of the file.
    dtype: compute dtype, "float32" or "bfloat16"; or "auto", see
      `dtypes.resolve`.
    gelu: "tanh", "exact" or "quick", for an .npz file that states no GELU. None
      takes the GELU that the source states, or else "tanh".
    mean: red, green and blue mean by which the model normalizes images in
      [0, 1], for a model of transformers or timm whose files state no mean.
    std: red, green and blue standard deviation, if the files state no std.

  Returns:
    The backbone. Its parameters are on the default device, kernels in `dtype`
    and all others in float32. The fingerprint is computed from the weights
    in the file, independent of layout, `image_size` and `dtype`.

  Raises:
    BackboneError: if the source does not exist, cannot be fetched or read, or
      does not hold exactly the weights of a supported ViT; or if neither the
      source nor the arguments state a mean and std.
    ConfigError: if `image_size`, `dtype`, `gelu`, `mean` or `std` is invalid or
      contradicts the source.
  """
  published = read_published(os.fspath(path), mean, std)
  return rounded(to_backbone(published, image_size, dtype, gelu=gelu))


def read_published(
  path: str,
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
) -> Published:
  """Read any source that `load_backbone` takes, in float32 on the host."""
  arguments = {"mean": mean, "std": std}
  stated = {k: as_rgb(v, k) for k, v in arguments.items() if v is not None}
  if files := model_source(path):
    published = model_import.read(files, stated)
  elif stated:
    raise ConfigError(
      f"{path} is an .npz file, whose model takes images in [-1, 1]. Leave "
      f"out {' and '.join(stated)}."
    )
  else:
    published = _read_npz(local_file(path))
  _require_weights(published.arrays, published.config, published.where)
  return published


def known_config(path: str) -> ViTConfig | None:
  """Return the configuration of a ViT in `KNOWN`; None for any other path.

  No file is read: all these models were trained on ImageNet-21k at 224 pixels.
  """
  source, _, variant = path.partition("-")
  if path not in KNOWN or not variant:
    return None
  config = vit_config(variant, num_classes=21_843)
  if source == "i21k":
    return dataclasses.replace(config, representation_size=config.width)
  return config


def model_source(path: str) -> ModelFiles | None:
  """Return the files of a transformers or timm model; None for .npz sources."""
  if hub.is_address(path):
    return model_files.find(hub_models.fetch(path), path)
  if path in KNOWN or "://" in path:
    return None
  place = paths.local(path, "the backbone", BackboneError)
  return model_files.find(place, path) if model_files.is_model(place) else None


def to_backbone(
  published: Published,
  image_size: int | None = None,
  dtype: str = "float32",
  *,
  gelu: str | None = None,
) -> Backbone:
  """Put a published ViT on the default device, with float32 parameters."""
  compilation.enable_cache()
  stated = published.config
  if published.states_config and gelu not in (None, stated.gelu):
    raise ConfigError(
      f"gelu is {gelu!r}, but {published.where} states {stated.gelu!r}: leave "
      "out gelu."
    )
  fingerprint = fingerprint_of(stated, trees.unflatten(published.arrays))
  config = dataclasses.replace(
    stated,
    image_size=stated.image_size if image_size is None else image_size,
    dtype=dtypes.resolve(dtype),
    gelu=gelu or stated.gelu,
  )
  arrays = dict(published.arrays)
  if POSITIONS in arrays:
    arrays[POSITIONS] = layouts.resize_positions(
      arrays[POSITIONS],
      config.image_size // config.patch_size,
      config.position_resize,
      config.class_tokens,
    )
  params = jax.device_put(trees.unflatten(arrays))
  preprocessing = at_size(published.preprocessing, config.image_size)
  return Backbone(config, params, fingerprint, preprocessing)


def _read_npz(file: Path) -> Published:
  with stored_arrays.open_npz(file) as archive:
    content = archive.note
    entries = layouts.without_prefix(archive)
    stored = {name: archive[entry] for name, entry in entries.items()}
    dtypes = {name: archive.dtypes[entry] for name, entry in entries.items()}
  note = None
  if content is not None:
    note = parse_note(content, f"{file}: entry {ENTRY}")
  arrays = layouts.as_vit_jax(stored, file)
  note = note or Note(config=infer_config(arrays, file))
  return Published(
    config=note.config,
    preprocessing=note.preprocessing,
    source=note.source,
    preprocessing_from=ENTRY if note.preprocessing else "",
    arrays=arrays,
    where=str(file),
    layout=_layout_of(entries),
    states_config=content is not None,
    dtypes={
      new: dtypes[name]
      for name, array in stored.items()
      for new, _ in layouts.as_published(name, array)
    },
  )


def _layout_of(names: Collection[str]) -> str:
  """Return the layout's name; `names` are parameter names without a prefix."""
  parts = {part for name in names for part in name.split("/")}
  if "pos_embedding" in names:
    stacked = any(n.startswith(layouts.STACKED_BLOCKS) for n in names)
    return "big_vision, blocks stacked" if stacked else "big_vision"
  if parts & layouts.FROM_PRE_LINEN.keys():
    return "vit_jax, layers numbered as before Linen"
  return "vit_jax, layers numbered as by Linen"


def infer_config(arrays: Arrays, file: Path) -> ViTConfig:
  """Infer the configuration from array shapes; raise if they are not enough."""
  shapes = {
    pattern: _common_shape(arrays, pattern, len(axes))
    for pattern, axes in _CONFIG_SHAPES.items()
  }
  missing = [
    f"missing: {pattern} ({', '.join(_CONFIG_SHAPES[pattern])})"
    for pattern, shape in shapes.items()
    if not shape
  ]
  if missing:
    present = [f"found: {name} {arrays[name].shape}" for name in sorted(arrays)]
    raise _refusal(file, missing + present, arrays)

  (patch, *_), (_, positions, _), (_, heads, head_dim), (_, mlp_dim) = (
    shape for shape in shapes.values() if shape
  )
  pools = layouts.has_map_head(arrays)
  side = square_side(positions if pools else positions - 1)
  if not side:
    raise BackboneError(
      f"{file}: the position embedding has {positions} entries. Expected one "
      "per patch of a square grid, and one more for the class token (except in "
      "files of big_vision)."
    )
  return ViTConfig(
    width=heads * head_dim,
    depth=_depth(arrays, file),
    mlp_dim=mlp_dim,
    num_heads=heads,
    patch_size=patch,
    image_size=side * patch,
    num_classes=_outputs(arrays, "head"),
    representation_size=_outputs(arrays, "pre_logits"),
    class_tokens=0 if pools else 1,
    pooling="map" if pools else "tok",
  )


def _depth(arrays: Arrays, file: Path) -> int:
  """Return the largest block number plus 1; smaller numbers may be missing."""
  matches = [layouts.BLOCK_NUMBER.match(name) for name in arrays]
  depth = 1 + max((int(match[1]) for match in matches if match), default=-1)
  if depth > MAX_DEPTH:
    raise BackboneError(
      f"{file} has a block with number {depth - 1:,}: expected at most "
      f"{MAX_DEPTH} blocks, with numbers from 0 to {MAX_DEPTH - 1}."
    )
  return depth


def _common_shape(
  arrays: Arrays, pattern: str, rank: int
) -> tuple[int, ...] | None:
  """Return the most frequent shape of the arrays whose names match `pattern`.

  Ignore empty arrays and arrays of another `rank`. None if no array is left.
  """
  matching = [arrays[name] for name in sorted(fnmatch.filter(arrays, pattern))]
  shapes = [a.shape for a in matching if a.ndim == rank and a.size]
  return statistics.mode(shapes) if shapes else None


def _outputs(arrays: Arrays, layer: str) -> int:
  """Return the number of outputs of a layer; 0 if the layer is absent."""
  for name in (f"{layer}/bias", f"{layer}/kernel"):
    if name in arrays and arrays[name].ndim:
      return arrays[name].shape[-1]
  return 0


def _require_weights(arrays: Arrays, config: ViTConfig, file: str) -> None:
  expected = layouts.expected_shapes(config)
  problems = trees.differences(expected, arrays)
  if problems:
    raise _refusal(file, problems, arrays)


def _refusal(
  file: str | Path, lines: list[str], arrays: Arrays
) -> BackboneError:
  message = [
    f"{file} does not hold exactly the weights of a ViT:",
    listed(lines, _INDENTED, _MAX_CHARACTERS),
  ]
  if "cls" not in arrays and not layouts.has_map_head(arrays):
    message.append(
      "There is neither a class token (cls) nor a probe (MAPHead_0): models of "
      "big_vision that take the mean of the patches ('gap') are not supported."
    )
  message.append(
    "Supported .npz files: vit_jax (either numbering of layers), big_vision "
    "(pos_embedding at the top level, blocks stacked or not), both also under "
    f"{' or '.join(layouts.PREFIXES)}, and SigLIP (under {layouts.TOWER})."
  )
  return BackboneError(_INDENTED.join(message))
