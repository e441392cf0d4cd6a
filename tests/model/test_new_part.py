"""What docs/dev/adding.md says of a part without options is all there is.

A part is registered that only this file knows, and goes through training,
evaluation, a file, a set of tasks, a server's slots and a description.
"""

import dataclasses
import re

import fake_data
import jax
import numpy as np
import pytest
from conftest import ROOT, random_task, tiny_backbone

import memory_vit as mv
from memory_vit.commands import inspect
from memory_vit.model.parts import PARTS, Part, PassHooks
from memory_vit.model.regimes import get_regime, is_regime
from memory_vit.runtime import sharding
from memory_vit.tasks import inference
from memory_vit.train import parameters

PIXELS = np.stack([fake_data.noise(i, 8, 8) for i in range(32)])
LABELS = [("light", "dark")[i % 2] for i in range(32)]
IMAGES = PIXELS[:4].astype(np.float32) / 127.5 - 1


class Shift(Part):
  """A vector that is added to the features of a task."""

  name = "shift"
  listed = True
  axis = 0

  def shapes(self, size, axes):
    return (axes.width,)

  def rows(self, spec):
    return [("shift", "one vector")]

  def hooks(self, stacked, config, angles):
    return ShiftHooks(stacked)


@dataclasses.dataclass(frozen=True)
class ShiftHooks(PassHooks):
  shift: jax.Array

  def read_out(self, states, features):
    return features + self.shift[None]


@pytest.fixture
def backbone(monkeypatch):
  monkeypatch.setitem(PARTS, Shift.name, Shift())
  yield tiny_backbone(depth=1)
  get_regime.cache_clear()


def test_new_part_needs_a_file_and_a_line(backbone, tmp_path, capsys):
  result = mv.train_task(
    backbone, (PIXELS, LABELS), test=(PIXELS, LABELS), name="pets",
    regime="cls+memory+shift", epochs=4, batch_size=8, learning_rate=0.3,
    workdir=tmp_path / "run", progress=False,
  )  # fmt: skip
  task = result.task
  shift = np.asarray(task.params["shift"])
  assert shift.shape == (32,)
  assert shift.any()  # it began with zeros
  # Saved, read again, and described.
  loaded = mv.load_task(tmp_path / "run" / "tasks" / "pets", backbone)
  assert loaded.digest == task.digest
  assert np.array_equal(loaded.params["shift"], shift)
  assert inspect.main([str(tmp_path / "run" / "tasks" / "pets")]) == 0
  assert re.search(r"^shift +one vector$", capsys.readouterr().out, re.M)
  # Evaluated as in the run.
  found = mv.evaluate_tasks(backbone, task, (PIXELS, LABELS), progress=False)
  assert found["pets"].score == result.score
  norms = parameters.part_norms(
    {"pets": task.params}, ["pets"], sharding.make_mesh()
  )["pets"]
  assert norms["norm/shift"] == pytest.approx(np.linalg.norm(shift))


def test_a_new_part_composes(backbone):
  """The original outputs stay, and others neither change it nor are changed."""
  task = random_task(backbone, "pets", regime="cls+shift", cells=0)
  plain = random_task(backbone, "birds", seed=2)
  child = random_task(
    backbone, "child", seed=3, regime="cls+side+shift", cells=0, side_width=4,
    attends_to=[task],
  )  # fmt: skip
  every = mv.forward(backbone, [task, plain, child], IMAGES)
  assert np.array_equal(
    every["backbone"], mv.forward(backbone, [], IMAGES)["backbone"]
  )
  for alone in ([task], [plain], [task, child]):
    slots = mv.fill_slots(backbone, alone, slots=4)
    found = mv.forward(backbone, slots, IMAGES)
    for name in found:
      np.testing.assert_allclose(found[name], every[name], atol=1e-5)
  # What it adds is its vector, times the head.
  without = mv.Task(
    dataclasses.replace(task.spec, regime="cls_masked"),
    {part: v for part, v in task.params.items() if part != "shift"},
  )
  added = every["pets"] - mv.forward(backbone, without, IMAGES)["pets"]
  expected = task.params["shift"] @ task.params["head"]["kernel"]
  np.testing.assert_allclose(
    added, np.broadcast_to(expected, added.shape), atol=1e-4
  )


def test_slots_grow_by_a_new_part_once(backbone):
  tasks = [
    random_task(backbone, f"t{i}", seed=i, regime=regime, cells=0)
    for i, regime in enumerate(("cls_masked", "cls+shift", "cls+shift"))
  ]
  predictor = mv.Predictor.from_model(
    backbone, tasks[:1], batch_sizes=(4,), warm_up=False
  )

  def logits():
    return predictor.predict_pixels(IMAGES).logits

  before = logits()["t0"]
  predictor.add(tasks[1])
  logits()
  size = inference.read_program._cache_size()
  predictor.add(tasks[2])
  found = logits()
  assert inference.read_program._cache_size() == size
  np.testing.assert_allclose(found["t0"], before, atol=1e-6)
  slots = mv.fill_slots(backbone, tasks, slots=8, cells=8)
  expected = mv.forward(backbone, slots, IMAGES)
  for name, values in found.items():
    assert np.array_equal(values, expected[name])


def test_new_part_starts_without_effect(backbone):
  new = {
    regime: mv.init_task(
      jax.random.key(0), backbone, name="a", num_classes=3, regime=regime
    )
    for regime in ("cls+memory+shift", "memory_masked")
  }
  assert not new["cls+memory+shift"].params["shift"].any()
  assert np.array_equal(
    new["cls+memory+shift"].params["memory"],
    new["memory_masked"].params["memory"],
  )
  assert is_regime("cls+shift")
  assert not is_regime("shift+cls")


def test_only_shipped_parts_are_registered():
  assert not is_regime("cls+shift")


def test_the_page_names_the_places():
  text = (ROOT / "docs" / "dev" / "adding.md").read_text(encoding="utf-8")
  (row,) = re.findall(r"^\| a part of masked tasks \|.*$", text, re.M)
  files = re.findall(r"`(memory_vit/[\w/]+\.py)`", row)
  assert "memory_vit/model/parts/__init__.py" in files
  for file in files:
    assert (ROOT / file).is_file(), file
