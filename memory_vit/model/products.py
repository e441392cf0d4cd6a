"""Matrix products with operands in the compute dtype and sums in float32.

XLA has fast bfloat16 kernels for CPUs with matrix units, and uses them only if
the result is float32; GPUs and TPUs sum in float32 anyway. Operands are rounded
just before a product. Between products, values stay float32, except the tokens
after each half of a block, which `EncoderBlock` rounds.
"""

import functools
import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.trees import AnyArray
from memory_vit.runtime import dtypes
from memory_vit.runtime.dtypes import Precision


def einsum(
  spec: str,
  a: Float[AnyArray, "..."],
  b: Float[AnyArray, "..."],
  precision: Precision,
) -> Float32[Array, "..."]:
  """Return `jnp.einsum` of rounded operands, summed in float32.

  Gradients are computed by einsum too, so each axis of an operand must also be
  an axis of the other operand or of the result.
  """
  dtype = precision.dtype
  if dtype == "float32":
    return jnp.einsum(spec, a, b)
  a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
  return _product(spec, precision.on_cpu, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
  spec: str, on_cpu: bool, a: Float[Array, "..."], b: Float[Array, "..."]
) -> Float32[Array, "..."]:
  if on_cpu and not dtypes.cpu_runs_bfloat16():
    a, b = _widened(a, b)
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _widened(*operands: Array) -> tuple[Array, ...]:
  """Widen operands to float32: XLA for CPUs fails on some bfloat16 products."""
  # Without this cast, some products compile, but fail at run time ("Unsupported
  # element type for DotThunk"). Before jax 0.10, forward and backward products
  # fail; in jax 0.10 and 0.11, only backward products fail.
  return tuple(a.astype(jnp.float32) for a in operands)


def _forward(
  spec: str, on_cpu: bool, a: Float[Array, "..."], b: Float[Array, "..."]
) -> tuple[Float32[Array, "..."], tuple[Array, Array]]:
  return _product(spec, on_cpu, a, b), (a, b)


def _backward(
  spec: str,
  on_cpu: bool,
  operands: tuple[Array, Array],
  gradient: Float32[AnyArray, "..."],
) -> tuple[Array, Array]:
  """Round `gradient` to the operands' dtype; return the operands' gradients."""
  a, b = operands
  dtype = a.dtype
  # An operand's gradient is the einsum in which this operand and the result
  # swap places. Jax's own rule would compute that einsum in float32.
  inputs, out = spec.split("->")
  first, second = inputs.split(",")
  gradient = jnp.asarray(gradient, dtype)
  if on_cpu:
    gradient, a, b = _widened(gradient, a, b)
  return (
    _product(f"{out},{second}->{first}", on_cpu, gradient, b).astype(dtype),
    _product(f"{first},{out}->{second}", on_cpu, a, gradient).astype(dtype),
  )


_product.defvjp(_forward, _backward)


# Name of a parameter (f, d) that replaces the kernel (d, f) of a dense layer.
TRANSPOSED = "transposed_kernel"


class Dense(nn.Module):
  """A dense layer over the last axes of tokens."""

  # The shapes of a token before (`inputs`) and after (`outputs`) the layer.
  inputs: Sequence[int]
  outputs: Sequence[int]
  precision: Precision

  @nn.compact
  def __call__(self, z: Float[Array, "b s ..."]) -> Float32[Array, "b s ..."]:
    shape = (*self.inputs, *self.outputs)
    init = when_made(
      self,
      nn.initializers.lecun_normal(
        in_axis=tuple(range(len(self.inputs))),
        out_axis=tuple(range(len(self.inputs), len(shape))),
      ),
    )
    d, f = math.prod(self.inputs), math.prod(self.outputs)
    # Reshape the kernel to a matrix: with more axes, the backward pass would
    # transpose the kernel, which takes a third of a training step on CPU.
    if self.has_variable("params", TRANSPOSED):
      spec = "bsd,fd->bsf"
      kernel: Array = self.get_variable("params", TRANSPOSED)
    else:
      spec = "bsd,df->bsf"
      kernel = self.param("kernel", init, shape).reshape(d, f)
    bias = self.param("bias", nn.initializers.zeros, self.outputs)
    (b, s), precision = z.shape[:2], self.precision
    z = z.reshape(b, s, d)
    if b * s == 1 and precision.on_cpu and precision.dtype == "bfloat16":
      # Append a second row: with a single row, XLA for CPUs takes five to eight
      # times as long as with two.
      z = jnp.pad(z, ((0, 0), (0, 1), (0, 0)))
    y = einsum(spec, z, kernel, precision)[:, :s]
    return (y + bias.reshape(1, 1, f)).reshape(b, s, *self.outputs)


def when_made(
  module: nn.Module, init: nn.initializers.Initializer
) -> nn.initializers.Initializer:
  """Return `init` if `module` is initializing, else a cheap initializer."""
  # Flax traces the initializer of a parameter even if the parameter exists, to
  # compare shapes. Random initializers would take a third of the time of
  # tracing the model.
  return init if module.is_initializing() else nn.initializers.zeros
