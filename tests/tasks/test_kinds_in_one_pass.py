"""Tasks of all kinds share one pass; their probabilities and values."""

import numpy as np
import pytest
from conftest import random_task, run_program
from kinds_of_tasks import LABELS, VALUES, tasks_of_kinds

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.kinds import answer_line
from memory_vit.kinds.labels import chosen, guesses
from memory_vit.prediction import compilations


def test_kinds_share_a_pass_to_the_bit(backbone, images):
  """Independent tasks, and one of labels that attends to one of values."""
  tasks = tasks_of_kinds(backbone)
  pets, tags, size = tasks
  child = random_task(backbone, "child", seed=3, kind=LABELS, attends_to=[size])
  original, _ = mv.encode(backbone, images)

  def outputs(*some):
    slots = mv.fill_slots(backbone, some, slots=4, cells=8, classes=128)
    found = mv.forward(backbone, slots, images)
    assert np.array_equal(found.pop("backbone"), original)
    return found

  for together, apart in (
    (mv.concatenate(*tasks), [[pets], [tags], [size]]),
    (mv.concatenate(*tasks, child), [[size, child], [size, pets, child]]),
  ):
    every = outputs(*together)
    assert len(every) == len(together)
    for some in apart:
      for name, logits in outputs(*some).items():
        assert np.array_equal(every[name], logits), name
  unslotted = mv.forward(backbone, [*tasks, child], images)
  assert np.array_equal(unslotted["backbone"], original)
  # As a model card says; `outputs` are arrays of JAX.
  values = size.spec.kind.activate(unslotted["size"])
  np.testing.assert_allclose(
    values, VALUES.activate(np.asarray(unslotted["size"])), rtol=1e-6
  )


def test_no_program_depends_on_the_kind(backbone, images):
  """A task of labels that runs alone runs what one of classes compiled."""
  tasks = [
    random_task(backbone, "a", regime="full", cells=0, kind=kind)
    for kind in (mv.TaskKind(), LABELS)
  ]
  run_program(backbone, tasks[:1], images)
  with compilations.counted() as tally:
    run_program(backbone, tasks[1:], images)
  assert tally.count == 0


def test_activation_is_that_of_each_kind():
  """By hand; float32 logits that overflow an exponential included."""
  logits = np.array([[1000.0, 1001.0, -1000.0], [0, 0, 0]])
  share = 1 / (1 + np.e)
  found = mv.TaskKind().activate(logits)
  np.testing.assert_allclose(found, [[share, 1 - share, 0], [1 / 3] * 3])
  found = LABELS.activate(np.array([[-1000.0, 1000.0, np.log(3)]]))
  np.testing.assert_allclose(found, [[0, 1, 0.75]])
  found = VALUES.activate(np.array([[0.0, -2.0], [1.0, 4.0]]))
  np.testing.assert_allclose(found, [[10, 1999], [40, 2002]])
  assert chosen(LABELS, np.array([0.3, 0.49, 0.7])).tolist() == [1, 0, 1]
  plain = mv.TaskKind(name="labels")
  assert chosen(plain, np.array([0.5])).tolist() == [1]


def test_an_image_may_have_no_label():
  chances = np.array([[0.29, 0.49, 0.69], [0.3, 0.9, 0.69], [0.3, 0.5, 0.7]])
  found = guesses(LABELS, ("a", "b", "c"), chances)
  assert [[g.class_name for g in row] for row in found] == [
    [], ["b", "a"], ["c", "b", "a"]
  ]  # fmt: skip
  assert guesses(LABELS, (), chances[:1]) == [[]]
  assert guesses(LABELS, (), chances[:0]) == []
  assert LABELS.answers((), chances[:1]) == [{"labels": []}]
  assert answer_line({"labels": []}) == "no label"


@pytest.mark.parametrize(
  ("classes", "kind", "message"),
  [
    (2, LABELS, "thresholds has 3 entries, but the task has 2 outputs"),
    (3, VALUES, "mean has 2 entries, but the task has 3 outputs"),
    (1, mv.TaskKind(name="values"), "needs mean and std"),
  ],
)
def test_kind_that_does_not_fit_its_head_is_refused(
  backbone, classes, kind, message
):
  with pytest.raises(TaskError, match=message):
    random_task(backbone, "a", classes=classes, kind=kind)


def test_a_saved_task_keeps_its_kind(backbone, tmp_path):
  tasks = tasks_of_kinds(backbone)
  mv.save_tasks(tasks, tmp_path / "tasks")
  mv.save_task(tasks[2], tmp_path / "size.safetensors", format="safetensors")
  loaded = mv.load_tasks(tmp_path / "tasks", backbone)
  assert {t.name: t.spec for t in loaded} == {t.name: t.spec for t in tasks}
  one = mv.load_task(tmp_path / "size.safetensors", backbone)
  assert one.spec.kind == VALUES
