"""Matrix products of bfloat16 operands, with sums in float32."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from families import FAMILIES, ONE_FIRST

import memory_vit as mv
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import require_float32, rounded
from memory_vit.model.products import Dense, einsum
from memory_vit.runtime import dtypes, sharding
from memory_vit.runtime.dtypes import Precision
from memory_vit.tasks.inference import encode_program, read_program
from memory_vit.tasks.program import make_program
from memory_vit.tasks.split_forward import make_split_forward


def as_bfloat16(a):
  return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)


def close(found, expected, share):
  assert found.shape == expected.shape
  scale = np.abs(expected).max()
  assert np.abs(np.asarray(found, np.float64) - expected).max() < share * scale


def same(found, expected):
  assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def images_of(batch, side=8):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (batch, side, side, 3)).astype(np.float32)


@pytest.mark.parametrize(
  "spec", ["bsd,df->bsf", "bhtk,tphmk->bhtpm", "bhqk,bhsk->bhqs"]
)
def test_operands_are_rounded_and_sums_are_not(spec):
  sizes = dict(zip("abcdefghijklmnopqrstuvwxyz", range(3, 29), strict=True))
  rng = np.random.default_rng(0)
  first, second, out = (
    [sizes[c] for c in part] for part in spec.replace("->", ",").split(",")
  )
  a, b, g = (
    rng.standard_normal(shape, dtype=np.float32)
    for shape in (first, second, out)
  )
  found, pull = jax.vjp(
    lambda a, b: einsum(spec, a, b, Precision("bfloat16")), a, b
  )
  assert found.dtype == jnp.float32
  wide = as_bfloat16(a), as_bfloat16(b)
  close(found, np.einsum(spec, *wide), 1e-6)
  # Gradients are rounded before and after the product.
  _, pull_exact = jax.vjp(lambda a, b: jnp.einsum(spec, a, b), *map(
    np.float32, wide))  # fmt: skip
  expected = pull_exact(np.float32(as_bfloat16(g)))
  for gradient, exact in zip(pull(g), expected, strict=True):
    assert gradient.dtype == jnp.float32
    close(gradient, np.asarray(exact, np.float64), 2**-8)
  exact = jax.make_jaxpr(lambda a, b: einsum(spec, a, b, Precision("float32")))(
    a, b
  )
  assert str(exact) == str(
    jax.make_jaxpr(lambda a, b: jnp.einsum(spec, a, b))(a, b)
  )


def products_of(jaxpr):
  """The types of the operands and the result of each product."""
  for equation in jaxpr.eqns:
    if equation.primitive.name in ("dot_general", "conv_general_dilated"):
      atoms = (*equation.invars, *equation.outvars)
      yield tuple(str(atom.aval.dtype) for atom in atoms)
    for value in equation.params.values():
      for one in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(one, "jaxpr", one)
        if hasattr(inner, "eqns"):
          yield from products_of(inner)


FAST = ("bfloat16", "bfloat16", "float32")


@pytest.mark.versions
@pytest.mark.parametrize("family", ONE_FIRST)
def test_all_products_but_those_of_heads_are_fast(family, images):
  """Forward and backward, in both streams, and in other regimes."""
  backbone = tiny_backbone(
    width=16, depth=1, dtype="bfloat16", **FAMILIES[family]
  )
  heads = 1 + (backbone.config.num_classes > 0)
  for regime in ("cls+memory+norms+layers+side", "adapter_memory", "full"):
    task = random_task(
      backbone, "a", regime=regime, cells=2 * (regime != "full"),
      **({"bottleneck": 4} if regime == "adapter_memory" else {}),
    )  # fmt: skip
    frozen = {"backbone": backbone.params, "tasks": {}}

    def gradient(platform, task=task, frozen=frozen):
      config = dataclasses.replace(backbone.config, platform=platform)
      cut = make_split_forward(config, (task.spec,))

      def loss(params):
        inputs = cut.prepare(frozen, images)
        return cut.logits({"a": params}, frozen, inputs)["a"].sum()

      return jax.value_and_grad(loss)

    # XLA for CPUs compiles products that it cannot run.
    jax.block_until_ready(jax.jit(gradient("cpu"))(task.params))
    kinds = [*products_of(jax.make_jaxpr(gradient("gpu"))(task.params).jaxpr)]
    assert kinds.count(FAST) > 20
    # Forward, and gradients of the input and of the kernel.
    others = [kind for kind in kinds if kind != FAST]
    assert len(others) <= 3 * heads, others
    assert set(others) == {("float32",) * 3}


# A layer of a B/32, of which XLA may multiply otherwise.
WIDE = {
  "width": 768, "depth": 1, "mlp_dim": 3072, "num_heads": 12, "patch_size": 32,
  "image_size": 224,
}  # fmt: skip


@pytest.mark.skipif(not dtypes.cpu_runs_bfloat16(), reason="needs jax 0.10")
@pytest.mark.parametrize(
  "family", [*ONE_FIRST, pytest.param("a wide layer", marks=pytest.mark.slow)]
)
def test_a_cpu_multiplies_by_transposed_kernels_to_the_same_bits(family):
  shape = FAMILIES.get(family, WIDE)
  backbone = jax.device_put(tiny_backbone(dtype="bfloat16", **shape))
  names = trees.flatten(backbone.for_programs)
  below_head = [n for n in names if n.split("/")[0] != "head"]
  assert not [name for name in below_head if name.endswith("/kernel")]
  tasks = [random_task(backbone, name, cells=2) for name in "ab"]
  for batch in (1, 3):
    images = images_of(batch, backbone.config.image_size)
    outputs, context = encode_program(
      backbone.params, images, config=backbone.config
    )
    for count in (1, 2):
      slots = make_program(backbone, tasks[:count]).slots
      logits = read_program(
        backbone.params, slots.arrays, context, config=backbone.config
      )
      found = mv.forward(backbone, tasks[:count], images)
      same(found["backbone"], outputs)
      for i, task in enumerate(tasks[:count]):
        same(found[task.name], logits[:, i, : task.spec.num_classes])


@pytest.mark.skipif(not dtypes.cpu_runs_bfloat16(), reason="needs jax 0.10")
def test_parameters_for_programs_follow_those_of_the_backbone():
  backbone = jax.device_put(tiny_backbone(dtype="bfloat16"))
  images = images_of(2)
  # Its first use is in a trace, whose tracers must not be kept.
  traced = jax.jit(lambda: mv.forward(backbone, [], images))()
  same(mv.forward(backbone, [], images)["backbone"], traced["backbone"])
  assert backbone.for_programs is backbone.for_programs
  # In place, as one who merges an adapter does.
  layer = backbone.params["Transformer"]["encoderblock_1"]["MlpBlock_0"]
  layer["Dense_1"]["kernel"] = -layer["Dense_1"]["kernel"]
  changed = mv.forward(backbone, [], images)["backbone"]
  assert np.ptp(np.asarray(changed - traced["backbone"])) > 0.01
  fresh = mv.Backbone(backbone.config, backbone.params, "fresh")
  same(mv.forward(fresh, [], images)["backbone"], changed)

  again = pickle.loads(pickle.dumps(backbone))
  assert "_ready" in vars(backbone)
  assert "_ready" not in vars(again)
  same(mv.forward(again, [], images)["backbone"], changed)

  # Arrays of NumPy change without another array in their place.
  host = jax.tree.map(np.array, fresh)
  mv.forward(host, [], images)
  host.params["embedding"]["kernel"] *= -1
  same(
    mv.forward(host, [], images)["backbone"],
    mv.forward(jax.device_put(host), [], images)["backbone"],
  )
  # What is exported may run elsewhere.
  exported = dataclasses.replace(fresh)
  jax.make_jaxpr(lambda images: mv.forward(exported, [], images))(images)
  assert not exported._ready
  assert fresh._ready

  wide = tiny_backbone()
  assert wide.for_programs is wide.params
  assert jax.jit(lambda b: b.for_programs is b.params and 1)(backbone)
  mesh = sharding.make_mesh()
  split = dataclasses.replace(
    backbone, params=sharding.put_backbone(backbone.params, mesh)
  )
  assert mesh.size > 1
  assert split.for_programs is split.params


def test_a_cpu_multiplies_no_single_row_in_bfloat16():
  def is_padded(b, s, dtype, platform):
    dense = Dense((4,), (5,), Precision(dtype, platform))
    z = jnp.ones((b, s, 4))
    params = dense.init(jax.random.key(0), z)
    jaxpr = jax.make_jaxpr(dense.apply)(params, z).jaxpr
    assert jaxpr.outvars[0].aval.shape == (b, s, 5)
    return "pad[" in str(jaxpr)

  assert is_padded(1, 1, "bfloat16", "cpu")
  assert not is_padded(1, 1, "float32", "cpu")
  assert not is_padded(1, 1, "bfloat16", "gpu")
  assert not is_padded(1, 2, "bfloat16", "cpu")
  assert not is_padded(2, 1, "bfloat16", "cpu")


def test_rounded_weights_are_neither_saved_nor_trained(tmp_path):
  backbone = rounded(tiny_backbone(dtype="bfloat16"))
  with pytest.raises(BackboneError, match="rounded to bfloat16.*float32"):
    mv.save_backbone(backbone, tmp_path / "a.npz")
  with pytest.raises(BackboneError, match="rounded to bfloat16.*float32"):
    random_task(backbone, "a", regime="full", cells=0)
  same = rounded(tiny_backbone())
  require_float32(same)
  mv.save_backbone(same, tmp_path / "a.npz")
  loaded = mv.load_backbone(tmp_path / "a.npz", dtype="bfloat16")
  assert loaded.fingerprint == same.fingerprint
  assert loaded.params["embedding"]["kernel"].dtype == jnp.bfloat16
