"""Backbone: a frozen ViT with its weights and its fingerprint."""

# Annotations stay strings, so that `help` shows jax.Array by its name.
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.errors import BackboneError, MemoryVitError
from memory_vit.model import trees
from memory_vit.model.products import TRANSPOSED
from memory_vit.model.task import BackboneId, EvalPreprocessing
from memory_vit.model.vit import VisionTransformer
from memory_vit.model.vit_config import ViTConfig, vit_config
from memory_vit.runtime import compilation, dtypes, sharding

# Fields of `ViTConfig` that the shapes of parameters do not determine. The
# fingerprint includes each of these fields that differs from its default.
# `gelu` and `layer_norm_epsilon` are stored in `BackboneId` instead.
_SWITCHES = (
  "class_tokens", "registers", "positions", "rope_base", "position_resize",
  "pre_norm", "mlp", "pooling", "norm_after_pooling",
)  # fmt: skip
_HEAD = ("head", "pre_logits")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["params"],
  meta_fields=["config", "fingerprint", "preprocessing"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
class Backbone:
  """A frozen Vision Transformer: its configuration, weights and fingerprint.

  For JAX (`jax.jit`, `jax.device_put`), a backbone is a pytree: its leaves are
  those of `params`, and other fields are static. Pass it to a compiled function
  as an argument: otherwise its weights become constants of the program.

  Attributes:
    config: all that defines the computation except the weights.
    params: parameters, named as in the published checkpoint, float32; kernels
      may be in bfloat16, see `rounded`.
    fingerprint: SHA-256 of the published parameters, even if leaves have been
      changed since; see `fingerprint_of`.
    preprocessing: how the publisher of the weights prepares images for
      evaluation, which is the default for new tasks; None if unknown.
  """

  config: ViTConfig
  params: dict[str, Any]
  fingerprint: str
  preprocessing: EvalPreprocessing | None = None

  def __repr__(self) -> str:
    config = self.config
    head = f"{config.num_classes} classes" if config.num_classes else "no head"
    return (
      f"Backbone({config.variant} at {config.image_size} px, {head}, "
      f"{config.dtype}, {trees.count(self.params):,} parameters, fingerprint "
      f"{self.fingerprint[:12]})"
    )

  @property
  def for_programs(self) -> dict[str, Any]:
    """`params` in the layout that is fastest on the device that holds them.

    For bfloat16 on CPUs, kernels are transposed: products with few rows take as
    little as half the time and are bitwise identical, unlike in float32.
    """
    config, leaves = self.config, jax.tree.leaves(self.params)
    if config.dtype != "bfloat16" or not dtypes.cpu_runs_bfloat16():
      return self.params
    if not sharding.on_one_cpu(leaves[:1]):
      return self.params
    ready = self._ready
    if not ready or list(map(id, ready[0])) != list(map(id, leaves)):
      with jax.ensure_compile_time_eval():  # never cache tracers
        ready[:] = leaves, _transposed(self.params, config.dtype)
    return ready[1]

  def __getstate__(self) -> dict[str, Any]:
    """Return the fields to pickle: all but `_ready`, which is only a cache."""
    return {k: v for k, v in self.__dict__.items() if k != "_ready"}

  @functools.cached_property
  def _ready(self) -> list[Any]:
    """Cache of `for_programs`: [leaves of `params`, result]; [] at first."""
    return []

  @property
  def id(self) -> BackboneId:
    """The identity of the backbone, as tasks store it."""
    return BackboneId(
      fingerprint=self.fingerprint,
      variant=self.config.variant,
      image_size=self.config.image_size,
      gelu=self.config.gelu,
      layer_norm_epsilon=self.config.layer_norm_epsilon,
    )


def switches_of(config: ViTConfig) -> dict[str, Any]:
  """Return the fields in `_SWITCHES` that differ from their defaults."""
  return {
    field.name: getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name in _SWITCHES and getattr(config, field.name) != field.default
  }


def fingerprint_of(config: ViTConfig, params: Mapping[str, Any]) -> str:
  """Return the SHA-256 of the arrays and of `switches_of(config)`."""
  arrays = trees.fingerprint(params)
  switches = switches_of(config)
  if not switches:
    return arrays
  text = arrays + json.dumps(switches, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def random_backbone(
  variant: str,
  *,
  image_size: int = 224,
  num_classes: int = 0,
  key: jax.Array,
  dtype: str = "float32",
) -> Backbone:
  """Return a backbone with random weights, for tests and for pretraining.

  Args:
    variant: such as "B/32"; see `vit_config`.
    image_size: side of the square input image, in pixels.
    num_classes: c0, the number of outputs of the head; 0 for no head.
    key: JAX PRNG key, such as `jax.random.key(0)`.
    dtype: compute dtype, "float32" or "bfloat16"; "auto" chooses by the device.

  Raises:
    ConfigError: if the variant is unknown, or the options are impossible.
    MemoryVitError: if `key` is not a JAX PRNG key.
  """
  require_key(key)
  config = vit_config(
    variant,
    image_size=image_size,
    num_classes=num_classes,
    dtype=dtypes.resolve(dtype),
  )
  return init_backbone(config, key)


def require_key(key: Any) -> None:
  """Raise `MemoryVitError` unless `key` is a single JAX key, typed or raw."""
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  if dtype is not None:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
      return
    if dtype == jnp.uint32 and shape is not None and len(shape) == 1:
      return
  description = type(key).__name__ if dtype is None else f"{dtype} {shape}"
  raise MemoryVitError(
    f"the random key is {description}, expected a single JAX PRNG key, such as "
    "jax.random.key(0)."
  )


def init_backbone(config: ViTConfig, key: jax.Array) -> Backbone:
  compilation.enable_cache()
  # The program runs once, so it is compiled with less optimization.
  init = jax.jit(
    _init_params, static_argnums=0, compiler_options=compilation.options()
  )
  params = init(config, key)
  return Backbone(config, params, fingerprint_of(config, params))


@functools.lru_cache(maxsize=32)  # tracing is slow
def backbone_shapes(config: ViTConfig) -> dict[str, Any]:
  """Return a backbone's parameters as `jax.ShapeDtypeStruct`, by tracing."""
  # The key is created within the trace, so that nothing is compiled for it.
  return jax.eval_shape(lambda: _init_params(config, jax.random.key(0)))


def rounded(backbone: Backbone) -> Backbone:
  """Round kernels to the compute dtype; outputs stay bitwise identical."""
  # `products.einsum` rounds every kernel before it multiplies, so kernels that
  # are rounded here give the same outputs. Skip the kernels of heads: heads
  # compute with unrounded kernels.
  flat = trees.flatten(backbone.params)
  for name, array in flat.items():
    if name.endswith("kernel") and name.split("/")[0] not in _HEAD:
      flat[name] = jnp.asarray(array, backbone.config.dtype)
  return dataclasses.replace(backbone, params=trees.unflatten(flat))


def _transposed(params: dict[str, Any], dtype: str) -> dict[str, Any]:
  """Return a copy of `params`; transpose kernels in all layers but the head."""
  flat = trees.flatten(params)
  for name in trees.flatten(trunk(params)):
    layer = name.removesuffix("kernel")
    # Skip NumPy arrays: if the caller changed their values, the transposed
    # copies in the cache `_ready` would keep the old values.
    if layer != name and isinstance(flat[name], jax.Array):
      outputs = flat[layer + "bias"].size
      matrix = jnp.asarray(flat.pop(name), dtype).reshape(-1, outputs)
      flat[layer + TRANSPOSED] = matrix.T
  return trees.unflatten(flat)


def require_float32(backbone: Backbone) -> None:
  """Raise `BackboneError` unless the kernels of a backbone are float32."""
  if backbone.params["embedding"]["kernel"].dtype != jnp.float32:
    raise BackboneError(
      f"the weights of the backbone are rounded to {backbone.config.dtype}, "
      "expected float32: use load_backbone(..., dtype='float32')."
    )


def trunk(params: dict[str, Any]) -> dict[str, Any]:
  """Return the parameters of a backbone below its head."""
  return {part: params[part] for part in params if part not in _HEAD}


def _init_params(config: ViTConfig, key: jax.Array) -> dict[str, Any]:
  size = config.image_size
  images = jnp.zeros((1, size, size, 3))
  vit = VisionTransformer(config)
  return vit.init(key, images, method="encode")["params"]
