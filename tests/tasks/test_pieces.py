"""Large batches run in pieces on a CPU, and results stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_device, random_task, tiny_backbone
from families import FAMILIES, FEW_FIRST
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import memory_vit as mv
from memory_vit.runtime import sharding
from memory_vit.tasks import inference, pieces


def images_of(backbone, count):
  side = backbone.config.image_size
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (count, side, side, 3)).astype(np.float32)


@pytest.fixture
def at_most_two(monkeypatch):
  """Pieces of two images, in every family of the tiny backbone."""
  monkeypatch.setattr(pieces, "_BYTES", 4 * 40 * tiny_backbone().config.mlp_dim)


@pytest.mark.parametrize(
  ("variant", "batch", "piece"),
  [
    ("B/32", 0, None), ("B/32", 16, None), ("B/32", 64, 16), ("B/32", 100, 20),
    ("B/16", 16, 4), ("B/16", 7, None), ("L/14", 16, 2), ("L/14", 15, 1),
  ],
)  # fmt: skip
def test_pieces_are_equal_and_not_small(variant, batch, piece):
  config = mv.vit_config(variant, image_size=224)
  images = np.zeros((batch, 224, 224, 3), np.float32)
  params = {"cls": jnp.zeros(1)}
  assert pieces.images_in_piece(params, images, config) == piece


def on_mesh(images, mesh):
  return jax.device_put(images, NamedSharding(mesh, PartitionSpec("data")))


def test_batches_stay_whole_on_meshes_and_in_traces(backbone, at_most_two):
  """On several devices, on explicit axes, and while JAX traces."""
  images, config = images_of(backbone, 8), backbone.config

  def piece_of(images, params=backbone.params):
    return pieces.images_in_piece(params, images, config)

  assert piece_of(images) == piece_of(jnp.asarray(images)) == 2
  mesh = one_device()
  assert piece_of(on_mesh(images, mesh)) == 2
  assert piece_of(images, sharding.put_backbone(backbone.params, mesh)) == 2
  explicit = jax.make_mesh(
    (1,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:1]
  )
  several = jax.make_mesh((len(jax.devices()),), ("data",), (AxisType.Auto,))
  assert len(jax.devices()) > 1
  for whole in (explicit, several):
    rows = on_mesh(images, whole)
    assert piece_of(rows) is None
    everywhere = jax.device_put(
      backbone.params, NamedSharding(whole, PartitionSpec())
    )
    assert piece_of(images, everywhere) is None
  found = []

  def traced(images):
    found.append(piece_of(images))
    return inference.encode_program(backbone.params, images, config=config)

  text = jax.jit(traced).lower(images).as_text()
  assert found == [None]
  assert "while" not in text


def test_a_mesh_of_one_device_runs_pieces(backbone, at_most_two):
  """As in training and evaluation."""
  images, config = images_of(backbone, 8), backbone.config
  expected, _ = mv.encode(backbone, images)
  mesh = one_device()
  found, context = inference.encode_program(
    sharding.put_backbone(backbone.params, mesh),
    on_mesh(images, mesh),
    config=config,
  )
  assert np.array_equal(found, expected)
  assert context.layers[0][0].shape[0] == 8
  explicit = jax.make_mesh(
    (1,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:1]
  )
  with jax.set_mesh(explicit):
    whole, _ = mv.encode(backbone, on_mesh(images, explicit))
  np.testing.assert_allclose(whole, expected, atol=1e-5)


@pytest.mark.parametrize("family", FEW_FIRST)
def test_a_piece_computes_what_a_batch_of_its_size_does(family, monkeypatch):
  backbone = tiny_backbone(**FAMILIES[family])
  images, config = images_of(backbone, 6), backbone.config
  programs = (
    inference.encode_program, inference.plain_program,
    inference.summary_program,
  )  # fmt: skip
  for program in programs:
    parts = [
      program(backbone.params, images[i : i + 2], config=config)
      for i in (0, 2, 4)
    ]
    whole = program(backbone.params, images, config=config)
    monkeypatch.setattr(pieces, "images_in_piece", lambda *_: 2)
    found = program(backbone.params, images, config=config)
    monkeypatch.undo()
    same = jax.tree.map(
      lambda a, *b: np.array_equal(a, np.concatenate(b)), found, *parts
    )
    assert all(jax.tree.leaves(same))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, whole
    )


def test_original_outputs_in_pieces_are_those_of_the_plain_vit(
  backbone, at_most_two
):
  """With and without tasks: to the bit."""
  images, config = images_of(backbone, 8), backbone.config
  assert pieces.images_in_piece(backbone.params, images, config) == 2
  plain = inference.plain_program(backbone.params, images, config=config)
  for count in (0, 1, 5):
    tasks = [random_task(backbone, f"t{i}", seed=i) for i in range(count)]
    found = mv.forward(backbone, tasks, images)
    assert np.array_equal(found["backbone"], plain)
