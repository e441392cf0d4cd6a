"""Convert the arrays of a model family by a table of names.

A row maps the name of a PyTorch layer (NAME.weight and NAME.bias) or array to
our name; "{l}" stands for the number of a block. The shapes of our tree
determine the shapes that the source must have.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from memory_vit.backbones import layouts
from memory_vit.backbones.families import fold
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime.messages import brief, listed

# {name: float32 array}. A `StoredArrays` reads a file at each access.
Arrays = Mapping[str, np.ndarray]
Shape = tuple[int, ...]

# Names of the layers and arrays of this package.
PATCHES, CLASS, REGISTERS = "embedding", "cls", "registers"
POSITIONS = layouts.POSITIONS
PRE_NORM, LAST_NORM = "Transformer/pre_norm", "Transformer/encoder_norm"
HEAD, PRE_LOGITS = "head", "pre_logits"
QKV = tuple(
  f"{layouts.BLOCK}{{l}}/MultiHeadDotProductAttention_0/{part}"
  for part in ("query", "key", "value")
)
QUERY, KEY, VALUE = QKV
OUT = f"{layouts.BLOCK}{{l}}/MultiHeadDotProductAttention_0/out"
NORM_1, NORM_2, UP, GATE, DOWN = (
  f"{layouts.BLOCK}{{l}}/{layer}"
  for layer in (
    *("LayerNorm_0", "LayerNorm_1"),
    *("MlpBlock_0/Dense_0", "MlpBlock_0/gate", "MlpBlock_0/Dense_1"),
  )
)
# The pooling head, whose learned probe attends to all tokens.
PROBE, PROBE_NORM = f"{layouts.MAP_HEAD}probe", f"{layouts.MAP_HEAD}LayerNorm_0"
PROBE_QKV = tuple(
  f"{layouts.MAP_HEAD}MultiHeadDotProductAttention_0/{part}"
  for part in ("query", "key", "value")
)
PROBE_OUT = f"{layouts.MAP_HEAD}MultiHeadDotProductAttention_0/out"
PROBE_UP, PROBE_DOWN = (
  f"{layouts.MAP_HEAD}MlpBlock_0/Dense_{i}" for i in (0, 1)
)

_MOST_CHARACTERS = 1_500
_INDENTED = "\n  "


@dataclasses.dataclass(frozen=True)
class To:
  """Rule to convert a layer or array of a source model to our layout."""

  # Name of our layer or array; or a tuple of names if one source layer computes
  # the outputs of several of our layers (such as GATE and UP).
  ours: str | tuple[str, ...]
  bias: bool = True  # whether the source has a bias; if not, our bias is zero
  scale: str = ""  # source name of the LayerScale that multiplies the outputs
  shape: Shape | None = None  # source shape; None if equal to ours


Table = Mapping[str, str | To]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """Configuration of a source model, and the table that converts its arrays."""

  config: ViTConfig
  # A row is skipped if a ViT with this `config` lacks the row's layer or array.
  # If two rows convert to the same layer or array, the later row wins.
  table: Table
  # Names or patterns of source arrays to ignore, such as buffers.
  ignored: tuple[str, ...] = ()
  # A function that edits the dict of source arrays in place, after the check of
  # shapes and before the conversion.
  adapt: Callable[[dict[str, np.ndarray]], None] = lambda arrays: None


def prefixed(prefix: str, table: Table, arrays: Arrays) -> Table:
  """Add a prefix to names in a table if `arrays` has names with this prefix."""
  if not any(name.startswith(prefix) for name in arrays):
    return table
  return {f"{prefix}{name}": place for name, place in table.items()}


def convert(model: Model, arrays: Arrays, where: str) -> dict[str, np.ndarray]:
  """Convert a source's arrays to ours, without folding in normalization."""
  ours = {
    name: array.shape
    for name, array in layouts.expected_shapes(model.config).items()
  }
  rows = [row for row in _rows(model) if _leaf(row[1].ours[0], ours)]
  expected: dict[str, Shape] = {}
  for name, to in rows:
    expected |= _source_shapes(name, to, ours)
  source = take(arrays, expected, where, model.ignored)
  model.adapt(source)
  converted: dict[str, np.ndarray] = {}
  for name, to in rows:
    converted |= _folded(name, to, ours, source)
  return converted


def unconverted(
  table: Table, config: ViTConfig, ours: Arrays
) -> dict[str, np.ndarray]:
  """Invert `convert`; each row of the table must have a single target."""
  shapes = {name: array.shape for name, array in ours.items()}
  theirs: dict[str, np.ndarray] = {}
  for name, to in _rows(Model(config=config, table=table)):
    place = to.ours[0]
    if leaf := _leaf(place, shapes):
      bias = "" if leaf == place else f"{place}/bias"
      weight, shift = _parameters(name) if bias else (name, "")
      theirs[weight] = fold.to_torch(ours[leaf], shapes.get(bias))
      if bias:
        theirs[shift] = ours[bias].reshape(-1)
  return theirs


def take(
  arrays: Arrays,
  expected: Mapping[str, Shape],
  where: str,
  ignored: Sequence[str] = (),
) -> dict[str, np.ndarray]:
  """Read the arrays of a source; raise unless they are exactly as expected.

  The error lists all arrays that are missing, misshapen or extra. `ignored` has
  names or patterns of arrays that are allowed but not read.
  """
  names = {
    name
    for name in arrays
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
  }
  taken = {name: arrays[name] for name in sorted(names & expected.keys())}
  lines = [
    f"shape of {name}: {taken[name].shape}, expected {shape}"
    if name in taken
    else f"missing: {name} {shape}"
    for name, shape in expected.items()
    if name not in taken or taken[name].shape != shape
  ]
  lines += [f"extra: {brief(n)}" for n in sorted(names - expected.keys())]
  if lines:
    raise BackboneError(
      f"{where}: the arrays in this directory are not exactly those that this "
      "file describes:"
      f"{_INDENTED}{listed(lines, _INDENTED, _MOST_CHARACTERS)}"
    )
  return taken


def _rows(model: Model) -> Iterator[tuple[str, To]]:
  """Yield (source name, `To`) for each row of the table of `model`.

  A row with "{l}" in its name is yielded once for each block.
  """
  for name, place in model.table.items():
    to = place if isinstance(place, To) else To(place)
    ours = (to.ours,) if isinstance(to.ours, str) else to.ours
    for i in range(model.config.depth if "{l}" in name else 1):
      yield (
        name.replace("{l}", str(i)),
        dataclasses.replace(
          to,
          ours=tuple(target.replace("{l}", str(i)) for target in ours),
          scale=to.scale.replace("{l}", str(i)),
        ),
      )


def _leaf(place: str, ours: Mapping[str, Shape]) -> str:
  """Return which of PLACE, PLACE/kernel and PLACE/scale is a name in `ours`.

  PLACE stands for `place`. Return "" if `ours` has none of these names.
  """
  leaves = (place, f"{place}/kernel", f"{place}/scale")
  return next((leaf for leaf in leaves if leaf in ours), "")


def _parameters(name: str) -> tuple[str, str]:
  """Return (name of the weight, name of the bias) of a source layer.

  A layer "a" has "a.weight"; a layer "a_", which ends in "_", has "a_weight".
  """
  start = name if name.endswith("_") else f"{name}."
  return f"{start}weight", f"{start}bias"


def _source_shapes(
  name: str, to: To, ours: Mapping[str, Shape]
) -> dict[str, Shape]:
  """Return {source name: expected shape} of the arrays of a table row."""
  place = to.ours[0]
  leaf = _leaf(place, ours)
  if leaf == place:
    return {name: to.shape or ours[place]}
  weight, bias = _parameters(name)
  width, *inputs = fold.torch_shape(ours[leaf], ours[f"{place}/bias"])
  outputs = (width * len(to.ours),)
  shapes = {weight: (*outputs, *inputs)}
  if to.bias:
    shapes[bias] = outputs
  if to.scale:
    shapes[to.scale] = outputs
  return shapes


def _folded(
  name: str, to: To, ours: Mapping[str, Shape], source: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Pop the arrays of a table row from `source`, and convert them.

  Return {our name: our array}.
  """
  if to.ours[0] in ours:
    return {to.ours[0]: source.pop(name).reshape(ours[to.ours[0]])}
  names = _parameters(name)
  weight = source.pop(names[0])
  zero = np.zeros(len(weight), np.float32)
  bias = source.pop(names[1]) if to.bias else zero
  if to.scale:
    weight, bias = fold.fold_layer_scale(weight, bias, source.pop(to.scale))
  converted: dict[str, np.ndarray] = {}
  parts = [np.split(array, len(to.ours)) for array in (weight, bias)]
  for place, kernel, shift in zip(to.ours, *parts, strict=True):
    leaf = _leaf(place, ours)
    converted[leaf] = fold.from_torch(kernel, ours[leaf])
    converted[f"{place}/bias"] = shift.reshape(ours[f"{place}/bias"])
  return converted
