"""Task masks against Table 1 of the paper written out."""

import dataclasses

import numpy as np
import pytest

from memory_vit.errors import TaskError
from memory_vit.model.masks import attention_graph, task_mask
from memory_vit.model.task import BackboneId, EvalPreprocessing, Task, TaskSpec
from memory_vit.tasks.compose import require_fit

BACKBONE = BackboneId(
  fingerprint="f", variant="B/32", image_size=224, gelu="tanh"
)


def spec(name, *attends_to, **options):
  return TaskSpec(
    **{
      "name": name,
      "attends_to": attends_to,
      "num_classes": 3,
      "cells": 2,
      "backbone": BACKBONE,
      "preprocessing": EvalPreprocessing(image_size=224),
      **options,
    }
  )


def test_masks_equal_table_1_of_the_paper():
  # Rows C_1, C_2, C_k. Concatenation: "ext" is no. Extension: "ext" is yes.
  concatenated = attention_graph([spec("c1"), spec("c2"), spec("ck")])
  assert concatenated.astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
  extended = attention_graph(
    [spec("c1"), spec("c2", "c1"), spec("ck", "c1", "c2")]
  )
  assert extended.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_attention_is_not_transitive_in_any_order_of_tasks():
  specs = [spec("child", "b"), spec("a"), spec("b", "a")]
  # Not transitive: a task attends to exactly those that it names.
  expected = [[1, 0, 1], [0, 1, 0], [0, 1, 1]]
  assert attention_graph(specs).astype(int).tolist() == expected


@pytest.mark.fault("replaced-task")
@pytest.mark.parametrize(
  ("specs", "message"),
  [
    ([spec("a"), spec("b"), spec("a")], r"the same name: \['a'\]"),
    ([spec("a", "a")], "attends to 'a', which is not among the other"),
    ([spec("a", "z"), spec("b")], r"'z', which is not among .*\['b'\]"),
    ([spec("a", "b"), spec("b", "a"), spec("c")], r"cycle .*\['a', 'b'\]"),
  ],
)
def test_impossible_sets_are_refused(specs, message):
  with pytest.raises(TaskError, match=message):
    attention_graph(specs)


def test_task_mask_has_cells_parents_and_norms():
  specs = [
    spec("a", cells=0),
    spec("b", cells=3, memory_norm=False),
    spec("c", "b", "a", cells=1),
  ]
  mask = task_mask(specs)
  assert mask.cells.astype(int).tolist() == [[0, 0, 0], [1, 1, 1], [1, 0, 0]]
  assert mask.is_parent.astype(int).tolist() == [[0, 0], [0, 0], [1, 1]]
  # Filled up with the task itself: no neighbour is ever gathered.
  assert mask.parents.tolist() == [[0, 0], [1, 1], [0, 1]]
  assert mask.memory_norm.tolist() == [True, False, True]
  # In concatenation nothing is gathered; without memory nothing is padded.
  assert task_mask(specs[:2]).parents.shape == (2, 0)
  assert task_mask(specs[:1]).cells.shape == (1, 0)
  assert all(isinstance(a, np.ndarray) for a in mask)
  padded = task_mask(specs, slots=4, cells=5, parents=3)
  assert padded.cells.sum(1).tolist() == [0, 3, 1, 0]
  assert padded.cells.shape == (4, 5)
  assert padded.parents[2].tolist() == [0, 1, 2]
  assert padded.is_parent.sum(1).tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize(
  "name",
  [
    "",
    "../x",
    "/etc",
    "A",
    "a b",
    "a" * 65,
    "ä",
    ".a",
    "-a",
    "backbone",
    "a\n",
  ],
)
def test_invalid_names_are_refused(name):
  with pytest.raises(TaskError, match="task name"):
    spec(name)


def test_invalid_specs_are_refused():
  with pytest.raises(TaskError, match="at least 1"):
    spec("a", num_classes=0)
  with pytest.raises(TaskError, match="at least 0"):
    spec("a", cells=-1)
  with pytest.raises(TaskError, match="2 class names for 3 classes"):
    spec("a", class_names=("x", "y"))
  with pytest.raises(TaskError, match="prepared at 192 px"):
    spec("a", preprocessing=EvalPreprocessing(image_size=192))
  for crop, resize in (
    ("central", 200), ("resize", 256), ("middle", 0), ("central", 4097),
    ("central", 10**4000), ("x" * 5000, 0),
  ):  # fmt: skip
    with pytest.raises(TaskError, match="not possible") as raised:
      EvalPreprocessing(image_size=224, crop=crop, resize=resize)
    assert len(str(raised.value)) < 700
  for size in (0, 2049, 10**4000):
    with pytest.raises(TaskError, match="expected 1 to 2048 pixels"):
      EvalPreprocessing(image_size=size)
  EvalPreprocessing(image_size=2048, crop="central", resize=4096)


@pytest.mark.parametrize(
  ("paths", "hint"),
  [
    (["runs/a\n\u202e"], r"DIR was 'runs/a\\n\\u202e'\."),
    ([], r"one more --task=DIR\."),
    (["a", "b"], r"one more --task=DIR\."),
    ([3], r"one more --task=DIR\."),
    ("x", r"one more --task=DIR\."),
  ],
)
def test_task_without_its_parent_is_refused(paths, hint):
  """The message says what to give, and where its run found the parent."""
  made = {"config": {"task": {"attends_to": paths}}}
  child = Task(spec("child", "colours"), {}, made)
  with pytest.raises(TaskError, match=f"'colours'.*add that task.*{hint}"):
    require_fit([child])


def test_specs_can_be_keys():
  a, b = spec("a"), dataclasses.replace(spec("a"), cells=2)
  assert len({a, b}) == 1
