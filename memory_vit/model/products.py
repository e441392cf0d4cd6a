"""Matrix products with operands in the compute dtype and sums in float32.

XLA has fast bfloat16 kernels for CPUs with matrix units, and uses them only if
the result is float32; GPUs and TPUs sum in float32 anyway. Between two products
all is float32, and an operand is rounded just before it is multiplied; but for
the tokens after each half of a block, see `EncoderBlock`.
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
  """`jnp.einsum` of rounded operands, and gradients, with float32 sums.

  Each axis of an operand must be an axis of the other one or of the result.
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
  """Operands in float32, for a CPU on which XLA cannot run their products."""
  # It compiles all, and fails to run some ("Unsupported element type for
  # DotThunk"), up to jax 0.11 also some that only gradients have.
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
  """Products like the forward ones; jax would multiply in float32 here."""
  # So each axis of an operand must be one of the other or of the result.
  a, b = operands
  dtype = a.dtype
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


# A leaf in place of the kernel (d, f) of a dense layer, of shape (f, d).
TRANSPOSED = "transposed_kernel"


class Dense(nn.Module):
  """A dense layer over the last axes of tokens."""

  # The axes of a token that are summed over, and those in their place.
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
    # As a matrix: of a kernel of several axes the backward pass would write a
    # transposed copy, a third of a training step on CPU.
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
      # XLA for CPUs multiplies one row five to eight times as slowly as two.
      z = jnp.pad(z, ((0, 0), (0, 1), (0, 0)))
    y = einsum(spec, z, kernel, precision)[:, :s]
    return (y + bias.reshape(1, 1, f)).reshape(b, s, *self.outputs)


def when_made(
  module: nn.Module, init: nn.initializers.Initializer
) -> nn.initializers.Initializer:
  """An initializer for parameters that are made, and a quick one otherwise."""
  # Of existing parameters flax compares the shape with the initializer's:
  # tracing random numbers for that is a third of tracing the model.
  return init if module.is_initializing() else nn.initializers.zeros
