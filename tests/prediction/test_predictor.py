"""A predictor answers as `forward` does, whatever comes and goes."""

import dataclasses

import numpy as np
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.prediction import Predictor, compilations

SIZES = (1, 4)


@pytest.fixture(scope="module")
def backbone():
  """One block: nothing here looks into it."""
  return tiny_backbone(depth=1)


@pytest.fixture(scope="module")
def tasks(backbone):
  return tuple(
    random_task(backbone, f"t{i}", seed=i, cells=i % 3, classes=2 + i)
    for i in range(6)
  )


@pytest.fixture(scope="module")
def pixels():
  rng = np.random.default_rng(7)
  return rng.uniform(-1, 1, (9, 8, 8, 3)).astype(np.float32)


def predictor_of(backbone, tasks, **options):
  return Predictor.from_model(
    backbone, tasks, **{"batch_sizes": SIZES, "slots": 4, **options}
  )


def by_forward(backbone, tasks, pixels, **room):
  """The answers of `forward`, in the same batches."""
  slots = mv.fill_slots(backbone, tasks, **{"slots": 4, **room})
  found = []
  for start in range(0, len(pixels), 4):
    part = pixels[start : start + 4]
    batch = np.zeros((1 if len(part) == 1 else 4, 8, 8, 3), np.float32)
    batch[: len(part)] = part
    out = mv.forward(backbone, slots, batch)
    found.append({k: np.asarray(v)[: len(part)] for k, v in out.items()})
  return {k: np.concatenate([f[k] for f in found]) for k in found[0]}


def same_bits(a, b):
  return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("count", range(1, 10))
def test_answers_are_those_of_forward_to_the_bit(
  backbone, tasks, pixels, count
):
  child = random_task(backbone, "child", cells=3, attends_to=tasks[1:2])
  every = [*tasks[:3], child]
  predictor = predictor_of(backbone, every, warm_up=False)
  found = predictor.predict_pixels(pixels[:count], original=True)
  expected = by_forward(backbone, every, pixels[:count])
  assert same_bits(found.original, expected.pop("backbone"))
  assert found.logits.keys() == expected.keys()
  for name, logits in expected.items():
    assert same_bits(found.logits[name], logits)


def test_a_task_keeps_its_bits_while_neighbours_come_and_go(
  backbone, tasks, pixels
):
  child = random_task(backbone, "child", cells=3, attends_to=tasks[1:2])
  predictor = predictor_of(backbone, tasks[:2], parents=1)
  first = predictor.predict_pixels(pixels, original=True)

  def unchanged(*names):
    found = predictor.predict_pixels(pixels, original=True)
    assert same_bits(found.original, first.original)
    for name in names:
      assert same_bits(found.logits[name], first.logits[name])
    return found

  assert predictor.add(child).grew is False
  predictor.add(tasks[2])
  found = unchanged("t0", "t1")
  # As in `forward`, of the same slots.
  expected = by_forward(backbone, [*tasks[:2], child, tasks[2]], pixels)
  for name in ("child", "t2"):
    assert same_bits(found.logits[name], expected[name])
  predictor.remove("t0")
  unchanged("t1")
  assert predictor.task_set.slots == {"t1": 1, "child": 2, "t2": 3}
  change = predictor.add(tasks[5], name="other")  # into the slot that is free
  assert change.names == ("other", "t1", "child", "t2")
  found = unchanged("t1")
  assert same_bits(found.logits["child"], expected["child"])
  other = dataclasses.replace(
    tasks[5], spec=dataclasses.replace(tasks[5].spec, name="other")
  )
  expected = by_forward(backbone, [other, tasks[1], child, tasks[2]], pixels)
  for name, logits in found.logits.items():
    assert same_bits(logits, expected[name])
  for name in ("child", "t2", "other", "t1"):
    predictor.remove(name)
  assert unchanged().logits == {}
  assert predictor.compilations == 0


def test_nothing_compiles_after_the_warm_up(tasks, pixels):
  # Of its own: whatever it runs is compiled here.
  backbone = tiny_backbone(depth=1, seed=5, mlp_dim=40)

  def on_it(task):
    spec = dataclasses.replace(task.spec, backbone=backbone.id)
    return dataclasses.replace(task, spec=spec)

  tasks = [on_it(task) for task in tasks]
  predictor = predictor_of(backbone, tasks[:2], warm_up=False, features=True)
  # Of each size what makes the context, the features, and reads.
  assert predictor.warm_up() == 3 * len(SIZES)
  assert predictor.warm_up() == 0
  with compilations.counted() as tally:
    for count in range(10):
      predictor.predict_pixels(pixels[:count], features=True, original=True)
    predictor.predict([np.uint8(pixels[0] * 127 + 127)] * 3)
    assert not predictor.add(tasks[2]).grew
    predictor.predict_pixels(pixels)
    assert not predictor.replace("t2", tasks[4]).grew
    predictor.predict_pixels(pixels)
    assert not predictor.remove("t0").grew
    predictor.predict_pixels(pixels[:1])
  assert tally.count == predictor.compilations == 0
  big = random_task(backbone, "big", classes=200)
  change = predictor.add(big)
  assert change.grew
  assert change.compiled == len(SIZES)  # what reads, of each size
  assert predictor.compilations == change.compiled
  with compilations.counted() as tally:
    found = predictor.predict_pixels(pixels)
    predictor.remove("big")  # what has grown stays
    predictor.predict_pixels(pixels)
  assert tally.count == 0
  assert found.logits["big"].shape == (9, 200)
  room = predictor.task_set.room
  for task, grown in (
    (random_task(backbone, "cells", cells=9), {"cells": 16}),
    (random_task(backbone, "norms", cells=0, regime="norms_masked"),
     {"norms": True}),
    (random_task(backbone, "child", attends_to=[tasks[1]]), {"parents": 1}),
  ):  # fmt: skip
    assert predictor.add(task).grew
    room = dataclasses.replace(room, **grown)
    assert predictor.task_set.room == room
    predictor.remove(task.name)
  assert [predictor.add(tasks[i]).grew for i in (0, 3)] == [False, False]
  change = predictor.add(tasks[5])  # the fifth
  assert change.grew
  assert predictor.task_set.room.slots == 8
  assert change.version == predictor.task_set.version == 15
