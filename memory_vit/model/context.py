"""Keys and values that task tokens attend to: of images, and of memory."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32

# Keys and values of a sequence of tokens, in one layer.
KeysValues = tuple[Float[Array, "b h s k"], Float[Array, "b h s k"]]
# Keys and values of task tokens, in one layer.
TaskKeysValues = tuple[Float[Array, "b h t k"], Float[Array, "b h t k"]]
# Keys and values of memory cells, in one layer.
CellKeysValues = tuple[Float[Array, "t h m k"], Float[Array, "t h m k"]]
# `CellKeysValues` of every layer. All images share the same memory cells.
Cells = tuple[CellKeysValues, ...]


class Context(NamedTuple):
  """The keys and values of images in every layer of a backbone.

  Tasks need nothing else of the images. No task changes a context, so it can be
  cached and read many times. It is a pytree for JAX.

  Attributes:
    layers: keys and values of each layer, in the compute dtype.
    pooled: the output of the backbone below its head, for tasks of the regime
      "head"; None if no task needs it, for example when masked tasks train.
  """

  layers: tuple[KeysValues, ...]
  pooled: Float32[Array, "b d"] | None = None
