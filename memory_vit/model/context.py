"""Keys and values that task tokens attend to: of images, and of memory."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32

# In one layer: of a sequence of tokens,
KeysValues = tuple[Float[Array, "b h s k"], Float[Array, "b h s k"]]
# of the task tokens, and of the memory of tasks.
TaskKeysValues = tuple[Float[Array, "b h t k"], Float[Array, "b h t k"]]
CellKeysValues = tuple[Float[Array, "t h m k"], Float[Array, "t h m k"]]
# In every layer, of the memory of tasks: the same for all images.
Cells = tuple[CellKeysValues, ...]


class Context(NamedTuple):
  """The keys and values of images in every layer of a backbone.

  All that tasks read of these images: no task changes it, so it can be cached
  and read many times. A tree of arrays for JAX.

  Attributes:
    layers: keys and values of each layer, in the compute dtype.
    pooled: the output of the backbone below its head, for tasks of the regime
      "head"; None where there can be none, as in training.
  """

  layers: tuple[KeysValues, ...]
  pooled: Float32[Array, "b d"] | None = None
