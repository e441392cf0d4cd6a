"""Parents of parents are found by name beside the task that needs them."""

import pytest
from conftest import random_task

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.tasks.find import ancestor_directories


@pytest.fixture
def family(backbone, tmp_path):
  """A child in tasks/, which attends to a parent, which has a parent too."""
  a = random_task(backbone, "a")
  b = random_task(backbone, "b", attends_to=[a])
  c = random_task(backbone, "c", attends_to=[b])
  mv.save_tasks([a, b, c], tmp_path / "tasks")
  return tmp_path / "tasks"


def test_all_ancestors_of_a_task_are_found(family):
  found = ancestor_directories([family / "c"])
  assert found == [family / "b", family / "a"]
  assert ancestor_directories([family / "b"]) == [family / "a"]
  assert ancestor_directories([family / "c", family / "b"]) == [family / "a"]


def test_given_tasks_are_used_as_ancestors(family, tmp_path):
  (family / "a").rename(tmp_path / "elsewhere")
  with pytest.raises(TaskError, match="'b' in .* attends to 'a', which is not"):
    ancestor_directories([family / "c"])
  given = [tmp_path / "elsewhere"]
  assert ancestor_directories([family / "c"], given) == [*given, family / "b"]


def test_ancestors_are_not_found_through_links(family, tmp_path):
  """Names in a task file never open anything elsewhere."""
  (family / "a").rename(tmp_path / "elsewhere")
  (family / "a").symlink_to(tmp_path / "elsewhere")
  with pytest.raises(TaskError, match="attends to 'a', which is not in"):
    ancestor_directories([family / "b"])


def test_another_task_of_the_name_is_no_ancestor(family, backbone):
  mv.save_task(random_task(backbone, "x"), family / "a")
  with pytest.raises(TaskError, match="attends to 'a', which is not in"):
    ancestor_directories([family / "b"])


def test_circle_of_ancestors_ends(backbone, tmp_path):
  for one, other in ("xy", "yx"):
    task = random_task(backbone, one, attends_to=[other])
    mv.save_task(task, tmp_path / one)
  assert ancestor_directories([tmp_path / "x"]) == [tmp_path / "y"]
