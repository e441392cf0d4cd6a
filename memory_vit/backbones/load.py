"""Published checkpoints: an .npz file -> `Backbone`, and back.

Understood are the layouts in which ViT weights are published:

  vit_jax      the tree of `vit.VisionTransformer`, and the same with the
               numbers that flax gave to layers before Linen (all files under
               gs://vit_models have these)
  big_vision   no position embedding for the class token, which has it added
               already; blocks optionally stacked along a first axis

Nothing is guessed and nothing is skipped: a file that does not have exactly the
weights of one ViT is refused, with all that is wrong.
"""

import dataclasses
import fnmatch
import os
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memory_vit.backbones import layouts, npz
from memory_vit.backbones.download import local_file
from memory_vit.backbones.layouts import BLOCK, MAX_DEPTH, POSITIONS, Arrays
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, backbone_shapes
from memory_vit.model.vit_config import ViTConfig, square_side
from memory_vit.runtime import files
from memory_vit.runtime.messages import listed

# The entries that tell the shape of the model, and their axes.
_TELLING = {
  "embedding/kernel": ("patch", "patch", "3", "width"),
  POSITIONS: ("1", "patches + 1", "width"),
  f"{BLOCK}*/MultiHeadDotProductAttention_0/query/kernel": (
    "width",
    "heads",
    "width / heads",
  ),
  f"{BLOCK}*/MlpBlock_0/Dense_0/kernel": ("width", "mlp_dim"),
}

# Of problems in one message.
_MAX_CHARACTERS = 1_500
_INDENTED = "\n  "


def load_backbone(
  path: str | os.PathLike[str],
  image_size: int | None = None,
  dtype: str = "float32",
  *,
  gelu: str = "tanh",
) -> Backbone:
  """Read a pretrained ViT, in a layout of vit_jax or big_vision.

  Args:
    path: a local .npz file, a name of `download.KNOWN`, or an address that
      starts with https://, http:// or gs://. Downloads are kept in
      $MEMORY_VIT_CACHE, or ~/.cache/memory_vit.
    image_size: side in pixels with which the backbone is to be used; the
      position embedding is resized for it. None keeps that of the file.
    dtype: of the computation, "float32" or "bfloat16".
    gelu: "tanh", or "exact" for weights that were trained in PyTorch.

  Returns:
    The backbone; its parameters are float32, on the default device. The
    fingerprint is that of the weights in the file, whatever the layout,
    `image_size` and `dtype`.

  Raises:
    BackboneError: where there is no such file, it cannot be fetched or read,
      or does not hold exactly the weights of a ViT with a class token.
    ConfigError: for an `image_size`, `dtype` or `gelu` that cannot be.
  """
  file = local_file(os.fspath(path))
  arrays = layouts.as_vit_jax(_read(file), file)
  published = infer_config(arrays, file)
  _require_weights(arrays, published, file)
  fingerprint = trees.fingerprint(trees.unflatten(arrays))

  config = dataclasses.replace(
    published,
    image_size=published.image_size if image_size is None else image_size,
    dtype=dtype,
    gelu=gelu,
  )
  arrays[POSITIONS] = layouts.resize_positions(
    arrays[POSITIONS], config.image_size // config.patch_size
  )
  params = jax.tree.map(jnp.asarray, trees.unflatten(arrays))
  return Backbone(config, params, fingerprint)


def save_backbone(backbone: Backbone, path: str | os.PathLike[str]) -> None:
  """Write the .npz file of a backbone, in the layout of the published files.

  `load_backbone` reads the same float32 parameters from it, and so the same
  fingerprint, unless the position embedding was resized: that is another set of
  weights. An existing file is replaced once the new one is complete.

  Args:
    backbone: to be written.
    path: of the file.
  """
  arrays: dict[str, Any] = {
    layouts.renumbered(name, layouts.TO_PRE_LINEN): np.asarray(leaf)
    for name, leaf in trees.flatten(backbone.params).items()
  }
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with files.replacing(path) as part, part.open("wb") as file:
    np.savez(file, **arrays)  # of float32: nothing of Python is in it


def _read(file: Path) -> Arrays:
  """Read all parameters, as float32, under their names without prefix."""
  with npz.open_npz(file) as archive:
    return {
      name: _as_float32(archive.read(entry), f"{file}: entry {entry!r}")
      for name, entry in layouts.without_prefix(archive.names).items()
    }


def _as_float32(array: np.ndarray, what: str) -> np.ndarray:
  """Cast finite numbers; refuse what float32 cannot hold."""
  with np.errstate(over="ignore"):
    cast = array.astype(np.float32)
  if array.dtype.itemsize > cast.dtype.itemsize and not np.isfinite(cast).all():
    raise BackboneError(
      f"{what} has values that are not finite as float32, in which the weights "
      "are used."
    )
  return cast


def infer_config(arrays: Arrays, file: Path) -> ViTConfig:
  """Read the configuration from the shapes."""
  shapes = {
    pattern: _common_shape(arrays, pattern, len(axes))
    for pattern, axes in _TELLING.items()
  }
  missing = [
    f"missing: {pattern} ({', '.join(_TELLING[pattern])})"
    for pattern, shape in shapes.items()
    if not shape
  ]
  if missing:
    found = [f"found: {name} {arrays[name].shape}" for name in sorted(arrays)]
    raise _refusal(file, missing + found, arrays)

  (patch, *_), (_, positions, _), (_, heads, head_dim), (_, mlp_dim) = (
    shape for shape in shapes.values() if shape
  )
  side = square_side(positions - 1)
  if not side:
    raise BackboneError(
      f"{file}: the position embedding has {positions} entries, expected those "
      "of a square grid of patches and, except in files of big_vision, one for "
      "the class token."
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
  )


def _depth(arrays: Arrays, file: Path) -> int:
  """The number of blocks, with those that are missing in between.

  What has the name of a block but no number is none, and will be refused.
  """
  found = [layouts.BLOCK_NUMBER.match(name) for name in arrays]
  depth = 1 + max((int(number[1]) for number in found if number), default=-1)
  if depth > MAX_DEPTH:
    raise BackboneError(
      f"{file} has a block of number {depth - 1:,}, expected at most "
      f"{MAX_DEPTH} blocks."
    )
  return depth


def _common_shape(
  arrays: Arrays, pattern: str, rank: int
) -> tuple[int, ...] | None:
  """The shape of most arrays of that name and rank, if there are any.

  An error names the one block that differs from the others.
  """
  found = [arrays[name] for name in sorted(fnmatch.filter(arrays, pattern))]
  shapes = [a.shape for a in found if a.ndim == rank and a.size]
  return statistics.mode(shapes) if shapes else None


def _outputs(arrays: Arrays, layer: str) -> int:
  """The width of a layer that may be absent; 0 then."""
  for name in (f"{layer}/bias", f"{layer}/kernel"):
    if name in arrays and arrays[name].ndim:
      return arrays[name].shape[-1]
  return 0


def _require_weights(arrays: Arrays, config: ViTConfig, file: Path) -> None:
  """Raise unless the arrays are exactly the parameters of the model."""
  expected = _expected_shapes(config)
  problems = trees.differences(expected, arrays)
  if problems:
    raise _refusal(file, problems, arrays)


def _expected_shapes(config: ViTConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """The parameters of the model; one block is traced, and stands for all."""
  one = dataclasses.replace(config, depth=1)
  expected = trees.flatten(backbone_shapes(one))
  first = {n: a for n, a in expected.items() if n.startswith(f"{BLOCK}0/")}
  for i in range(1, config.depth):
    for name, array in first.items():
      expected[name.replace(f"{BLOCK}0/", f"{BLOCK}{i}/", 1)] = array
  return expected


def _refusal(file: Path, lines: list[str], arrays: Arrays) -> BackboneError:
  """The error with all problems of a file."""
  message = [
    f"{file} does not hold exactly the weights of a ViT:",
    listed(lines, _INDENTED, _MAX_CHARACTERS),
  ]
  if "cls" not in arrays:
    message.append(
      "There is no class token (cls): models that pool all patches, such as "
      "those of big_vision with 'gap' or 'map', cannot be used."
    )
  message.append(
    "Understood are the .npz files of vit_jax (either numbering of layers) and "
    "big_vision (pos_embedding at the top, blocks stacked or not), optionally "
    f"under {' or '.join(layouts.PREFIXES)}."
  )
  return BackboneError(_INDENTED.join(message))
