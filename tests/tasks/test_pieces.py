"""Large batches run in pieces on a CPU, and nothing else changes."""

import jax
import numpy as np
import pytest
from conftest import one_device, random_task, tiny_backbone
from families import FAMILIES, FEW_FIRST

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
  assert pieces.images_in_piece(images, config) == piece


def test_a_mesh_and_a_traced_function_run_batches_whole(backbone, at_most_two):
  images = images_of(backbone, 8)
  config = backbone.config
  assert pieces.images_in_piece(images, config) == 2
  [rows] = jax.tree.leaves(sharding.shard_batch([images], one_device()))
  assert pieces.images_in_piece(rows, config) == 2
  if len(jax.devices()) > 1:
    [rows] = jax.tree.leaves(
      sharding.shard_batch([images], sharding.make_mesh())
    )
    assert pieces.images_in_piece(rows, config) is None
  found = []

  def traced(images):
    found.append(pieces.images_in_piece(images, config))
    return inference.encode_program(backbone.params, images, config=config)

  text = jax.jit(traced).lower(images).as_text()
  assert found == [None]
  assert "while" not in text


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
  """With no task, and with some: to the bit."""
  images, config = images_of(backbone, 8), backbone.config
  plain = inference.plain_program(backbone.params, images, config=config)
  for count in (0, 1, 5):
    tasks = [random_task(backbone, f"t{i}", seed=i) for i in range(count)]
    found = mv.forward(backbone, tasks, images)
    assert np.array_equal(found["backbone"], plain)
