"""Sets of tasks compute what their tasks compute alone."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.tasks import compose, find, store


@pytest.fixture
def family(backbone):
  """Task b attends to a; c attends to b and a; a and d attend to none."""
  a = random_task(backbone, "a", seed=1)
  b = random_task(backbone, "b", seed=2, cells=1, attends_to=[a])
  c = random_task(backbone, "c", seed=3, cells=3, attends_to=[b, a])
  d = random_task(backbone, "d", seed=4, cells=0)
  return mv.concatenate([a, b], c, d)


def names(tasks):
  return [task.spec.name for task in tasks]


def assert_same(found, expected):
  for name, value in found.items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


def test_remaining_tasks_compute_the_same(family, backbone, images):
  every = mv.forward(backbone, family, images)
  assert list(every) == ["backbone", "a", "b", "c", "d"]
  fewer = compose.remove(family, "c", "d")
  assert names(fewer) == ["a", "b"]
  assert_same(mv.forward(backbone, fewer, images), every)
  chosen = compose.select(family, ["d", "b", "a"])
  assert names(chosen) == ["d", "b", "a"]
  assert_same(mv.forward(backbone, chosen, images), every)


def test_task_comes_with_all_its_ancestors(backbone):
  """Its parents and their parents, and nothing else."""
  a, other = random_task(backbone, "a"), random_task(backbone, "other")
  b = random_task(backbone, "b", attends_to=[a])
  c = random_task(backbone, "c", attends_to=[b])
  d = random_task(backbone, "d", attends_to=[c])
  tasks = mv.concatenate(other, d, b, a, c)
  for name, names in (("d", "dcba"), ("c", "cba"), ("a", "a")):
    found = compose.with_parents(tasks, name)
    assert [task.spec.name for task in found] == [*names]


def test_renamed_tasks_are_still_read(family, backbone, images):
  every = mv.forward(backbone, family, images)
  renamed = compose.rename(family, "a", "first")
  assert names(renamed) == ["first", "b", "c", "d"]
  assert renamed[2].spec.attends_to == ("b", "first")
  out = mv.forward(backbone, renamed, images)
  assert_same({"a": out.pop("first"), **out}, every)


def test_task_with_children_cannot_be_removed(family):
  with pytest.raises(TaskError, match=r"'a' cannot be removed: \['b', 'c'\]"):
    compose.remove(family, "a")
  with pytest.raises(TaskError, match=r"'a' cannot be removed: \['c'\]"):
    compose.remove(family, "a", "b")
  assert names(compose.remove(family, "a", "b", "c")) == ["d"]
  with pytest.raises(TaskError, match="'b' attends to 'a', which is not"):
    compose.select(family, ["b"])


def test_mismatched_tasks_cannot_be_combined(family, backbone):
  a = family[0]
  with pytest.raises(TaskError, match="have the same name"):
    mv.concatenate(family, a)
  with pytest.raises(TaskError, match="no task 'z' among"):
    compose.remove(family, "z")
  with pytest.raises(TaskError, match="no task 'z' among"):
    compose.select(family, ["z"])
  with pytest.raises(TaskError, match="have the same name"):
    compose.rename(family, "a", "d")
  with pytest.raises(TaskError, match="task name '../a'"):
    compose.rename(family, "a", "../a")
  elsewhere = random_task(tiny_backbone(seed=1), "z")
  with pytest.raises(TaskError, match="The backbone of 'a' has fingerprint"):
    mv.concatenate(a, elsewhere)
  larger = tiny_backbone(image_size=12)
  larger = dataclasses.replace(larger, fingerprint=backbone.fingerprint)
  with pytest.raises(TaskError, match="image_size 8, but the task needs 12"):
    mv.concatenate(a, random_task(larger, "z"))
  x = random_task(backbone, "x", attends_to=["y"])
  y = random_task(backbone, "y", attends_to=["x"])
  with pytest.raises(TaskError, match="has a cycle among"):
    mv.concatenate(x, y)


def test_saved_set_is_loaded_as_its_tasks(family, backbone, images, tmp_path):
  store.save_tasks(family, tmp_path / "set")
  assert sorted(p.name for p in (tmp_path / "set").iterdir()) == list("abcd")
  loaded = store.load_tasks(tmp_path / "set", backbone)
  assert names(loaded) == ["a", "b", "c", "d"]
  expected = mv.forward(backbone, family, images)
  found = mv.forward(backbone, loaded, images)
  for name, value in expected.items():
    assert np.array_equal(found[name], value)
  # Directories of single tasks and of sets can be mixed.
  (tmp_path / "set" / "d").rename(tmp_path / "alone")
  mixed = store.load_tasks([tmp_path / "alone", tmp_path / "set"], backbone)
  assert names(mixed) == ["d", "a", "b", "c"]
  assert (
    mv.load_task(tmp_path / "set" / "a", backbone).digest == mixed[1].digest
  )
  with pytest.raises(TaskError, match="3 tasks: a, b, c. Give the path of one"):
    mv.load_task(tmp_path / "set", backbone)
  with pytest.raises(TaskError, match="neither a task nor a directory"):
    store.load_tasks(tmp_path / "empty", backbone)


def test_working_directory_is_refused_with_its_tasks_named(tmp_path):
  (tmp_path / "tasks").mkdir()
  with pytest.raises(TaskError, match=rf"are in {tmp_path / 'tasks'}\.$"):
    find.task_paths(tmp_path)
  with pytest.raises(TaskError, match="file.$"):
    find.task_paths(tmp_path / "tasks")


def test_a_task_that_is_given_twice_counts_once(family, backbone, tmp_path):
  """Every run exports the parents beside its task."""
  a, b = family[:2]
  store.save_tasks([a], tmp_path / "first")
  store.save_tasks([a, b], tmp_path / "second")
  given = [tmp_path / "first", tmp_path / "second"]
  found = [path for path, _ in find.find_tasks(given)]
  assert found == [given[0] / "a", given[1] / "b"]
  assert names(store.load_tasks(given, backbone)) == ["a", "b"]
  # A different task of this name is refused.
  store.save_tasks([random_task(backbone, "a", seed=8)], tmp_path / "third")
  with pytest.raises(TaskError, match=r"have the same name: \['a'\]"):
    store.load_tasks([*given, tmp_path / "third"], backbone)


def test_save_does_not_mix_two_sets(family, backbone, tmp_path):
  store.save_tasks(family, tmp_path)
  store.save_tasks(family, tmp_path)
  fewer = compose.remove(family, "c")
  with pytest.raises(TaskError, match=r"holds other tasks, \['c'\]"):
    store.save_tasks(fewer, tmp_path)


def test_a_retrained_parent_on_disk_is_noticed(family, backbone, tmp_path):
  store.save_tasks(family, tmp_path)
  mv.save_task(random_task(backbone, "a", seed=8), tmp_path / "a")
  with pytest.raises(TaskError, match="'b' was trained with another version"):
    store.load_tasks(tmp_path, backbone)
  manifest = json.loads((tmp_path / "b" / "task.json").read_text())
  assert manifest["spec"]["parent_digests"] == [family[0].digest]


def test_digest_covers_what_is_computed(family, backbone):
  a, b, *_ = family
  renamed = compose.rename(family, "a", "z")[0]
  assert renamed.digest == a.digest
  spec = dataclasses.replace(a.spec, memory_norm=False)
  others = {
    mv.Task(spec, a.params).digest,
    mv.Task(a.spec, {**a.params, "cls": -a.params["cls"]}).digest,
    b.digest,
    mv.Task(
      dataclasses.replace(b.spec, attends_to=(), parent_digests=()), b.params
    ).digest,
  }
  assert len(others | {a.digest}) == 5
