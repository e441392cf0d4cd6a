"""Worth of memory cells: against the oracle, and counted by hand."""

import dataclasses
import functools

import fake_data
import jax
import numpy as np
import oracle
import pytest
from conftest import one_device, random_task
from scipy import stats

import memory_vit as mv
from memory_vit.data import batching
from memory_vit.data.graph_source import GraphSource
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
from memory_vit.looking import cell_removal
from memory_vit.runtime import sharding

DEPTH, CELLS, EXAMPLES = 2, 3, 43


def family_of(backbone):
  """A task that reads another, both with memory, and one apart."""
  parent = random_task(backbone, "parent", seed=1, cells=2)
  child = random_task(
    backbone, "child", seed=2, cells=CELLS, classes=4, attends_to=[parent],
    regime="cls+memory+norms+layers+side", side_width=4,
  )  # fmt: skip
  child.params["side"]["up"]["keys"] *= 0.1  # or no cell is looked at
  return [random_task(backbone, "other", seed=3, cells=0), child, parent]


def logits_of_variants(backbone, tasks, images, seen=None):
  """Return logits of "child" without parts (b, v, c), and whole (b, c)."""
  child, parent = tasks[1:]
  slots = mv.fill_slots(backbone, [child, parent], cells=CELLS).arrays
  _, context = mv.encode(backbone, images)
  if seen is None:
    seen = cell_removal.variant_masks(DEPTH, CELLS)
  whole = np.ones((1, *seen.shape[1:]), bool)
  found = all_logits(
    backbone.params, slots, child.params["head"],
    np.concatenate([whole, seen]), context, backbone.config,
  )  # fmt: skip
  return np.asarray(found[:, 1:]), np.asarray(found[:, 0])


@functools.partial(jax.jit, static_argnums=5)
def all_logits(params, slots, head, seen, context, config):
  """(b, v, c), by one program for all arrays of these shapes."""
  return jax.vmap(
    lambda one: cell_removal.logits_without(
      params, slots, head, one, context, config=config
    ),
    out_axes=1,
  )(seen)


def removed():
  """Return the hidden cells of each variant, in order: [(layer, cell), ...]."""
  single = [[(i, j)] for i in range(DEPTH) for j in range(CELLS)]
  layers = [[(i, j) for j in range(CELLS)] for i in range(DEPTH)]
  return [*single, *layers, [pair for layer in layers for pair in layer]]


def source_of(task, size=EXAMPLES):
  """Random pictures, with random classes of a task."""
  source = fake_data.numbered_source(size)
  labels = np.random.default_rng(0).integers(0, task.spec.num_classes, size)

  def fetch(i):
    encoded, _ = source.source.fetch(i)
    return encoded, fake_data.tf.gather(labels.astype(np.int32), i)

  names = tuple(map(str, range(task.spec.num_classes)))
  return dataclasses.replace(
    source, class_names=names, source=GraphSource(fetch)
  )


@pytest.mark.slow
def test_a_removed_cell_is_one_that_the_token_never_saw(backbone, images):
  tasks = family_of(backbone)
  params = {
    "backbone": backbone.params, "tasks": {t.name: t.params for t in tasks},
  }  # fmt: skip
  known = [(t.name, t.spec.attends_to, t.spec.memory_norm) for t in tasks]

  @jax.jit
  def by_oracle(seen):
    run = lambda seen: oracle.forward(  # noqa: E731
      backbone.config, params, known, images, seen=seen
    )["child"]
    return jax.vmap(run, out_axes=1)(seen)

  found, whole = logits_of_variants(backbone, tasks, images)
  # The task as it is, then each variant; "other" has no cells, the parent two.
  seen = np.ones((1 + len(removed()), DEPTH, CELLS + 2), bool)
  for variant, gone in zip(seen[1:], removed(), strict=True):
    for layer, cell in gone:
      variant[layer, cell] = False
  expected = by_oracle(seen)
  np.testing.assert_allclose(whole, expected[:, 0], atol=2e-5)
  np.testing.assert_allclose(found, expected[:, 1:], atol=2e-5)
  # Each removal is another one.
  rows = np.concatenate([whole[:, None], found], axis=1)[0]
  gaps = np.abs(rows[:, None] - rows[None]).max(-1) + np.eye(len(rows))
  assert gaps.min() > 1e-3


@pytest.mark.slow
def test_without_all_cells_it_is_the_task_without_memory_to_the_bit(
  backbone, images
):
  tasks = family_of(backbone)
  child = tasks[1]
  none = dataclasses.replace(
    child,
    spec=dataclasses.replace(child.spec, cells=0),
    params={**child.params, "memory": child.params["memory"][:, :0]},
  )
  found, _ = logits_of_variants(backbone, tasks, images)
  seen = np.ones((found.shape[1], DEPTH, CELLS), bool)
  tasks[1] = none
  _, expected = logits_of_variants(backbone, tasks, images, seen)
  np.testing.assert_array_equal(found[:, -1], expected)


def all_images(tasks, source):
  """The images and labels of a data set, in one batch."""
  (batch,) = batching.eval_batches(
    source, tasks[0].spec.preprocessing, batch_size=source.size
  )
  return batch["image"], np.asarray(batch["label"])


def undecided(backbone):
  """Tasks of which "child" hesitates, so that each of its cells matters."""
  tasks = family_of(backbone)
  child, source = tasks[1], source_of(tasks[1])
  spec = dataclasses.replace(child.spec, memory_norm=False)
  params = {**child.params, "memory": 2 * child.params["memory"]}
  tasks[1] = dataclasses.replace(child, spec=spec, params=params)
  found, _ = logits_of_variants(backbone, tasks, all_images(tasks, source)[0])
  head = params["head"]
  head = {**head, "bias": head["bias"] - found.mean((0, 1))}
  tasks[1] = dataclasses.replace(tasks[1], params={**params, "head": head})
  return tasks, source


def flat(removal, field):
  parts = (removal.cells, removal.layers, removal.memory)
  return np.concatenate([np.ravel(getattr(part, field)) for part in parts])


@pytest.mark.slow
@pytest.mark.parametrize("together", [99, 4])
def test_each_example_counts_once(backbone, monkeypatch, together):
  """In batches of which the last is filled up, and in one or several passes."""
  tasks, source = undecided(backbone)
  mesh = sharding.make_mesh(jax.devices()[:2])
  monkeypatch.setattr(cell_removal, "_TOGETHER", together)
  cell_removal._count_program.cache_clear()
  names = "child" if together == 4 else iter(["child"])
  removal = cell_removal.remove_cells(
    backbone, tasks, source, names, batch_size=16, mesh=mesh
  )["child"]
  cell_removal._count_program.cache_clear()
  images, labels = all_images(tasks, source)
  found, own = logits_of_variants(backbone, tasks, images)
  variants = found.argmax(-1) == labels[:, None]
  whole = own.argmax(-1) == labels
  assert removal.task == "child"
  assert (removal.data, removal.split) == ("numbered", "train")
  assert (removal.examples, removal.skipped) == (EXAMPLES, 0)
  assert removal.top1 == whole.mean()
  assert flat(removal, "lost").tolist() == (
    (whole[:, None] & ~variants).sum(0).tolist()
  )
  assert flat(removal, "gained").tolist() == (
    (~whole[:, None] & variants).sum(0).tolist()
  )
  assert removal.cells.lost.shape == (DEPTH, CELLS)
  assert removal.layers.lost.shape == (DEPTH,)
  np.testing.assert_allclose(
    flat(removal, "difference"), variants.mean(0) - whole.mean()
  )
  # As every example is seen by both, the error is that of their differences.
  paired = variants.astype(float) - whole[:, None]
  np.testing.assert_allclose(
    flat(removal, "standard_error"), paired.std(0) / EXAMPLES**0.5, atol=1e-12
  )
  assert (flat(removal, "lost") + flat(removal, "gained")).min() > 0
  assert flat(removal, "lost").max() > 0 < flat(removal, "gained").max()
  evaluated = evaluate_source(
    predict_fn(backbone, tasks, mesh, ["child"]), source,
    tasks[0].spec.preprocessing, batch_size=16, mesh=mesh,
  )  # fmt: skip
  assert evaluated["child"].scores.accuracy == removal.top1


def test_significance_is_the_test_of_mcnemar():
  lost, gained = (
    np.array([[0, 5, 9], [40, 1, 0]]),
    np.array([[0, 5, 0], [12, 0, 3]]),
  )
  found = cell_removal.Removals(lost, gained, 100).p_value
  for (i, j), value in np.ndenumerate(found):
    count = int(lost[i, j] + gained[i, j])
    expected = stats.binomtest(int(lost[i, j]), count).pvalue if count else 1
    assert value == pytest.approx(expected)


def test_chance_is_rarely_taken_for_an_effect():
  """One in 20 tasks whose memory does nothing may show an effect."""
  rng, shown = np.random.default_rng(0), 0
  for _ in range(200):
    changed = rng.integers(0, 30, 4 * 5 + 4 + 1)
    lost = rng.binomial(changed, 0.5)
    parts = [
      cell_removal.Removals(
        lost[a:b].reshape(s), (changed - lost)[a:b].reshape(s), 500
      )
      for a, b, s in ((0, 20, (4, 5)), (20, 24, (4,)), (24, 25, ()))
    ]
    removal = cell_removal.CellRemoval(
      "a", "digits", "test", 500, 0, 0.9, *parts
    )
    shown += any(removal.significant(part).any() for part in parts)
  assert shown <= 10
  # What is plain is seen.
  plain = cell_removal.Removals(np.array(60), np.array(2), 500)
  assert removal.significant(plain)


def test_labels_and_no_examples_are_refused_before_the_removal(backbone):
  labels = random_task(backbone, "b", kind=mv.TaskKind(name="labels"))
  with pytest.raises(TaskError, match="'b' predicts labels: expected a task"):
    cell_removal.require_removable(backbone, labels)
  tasks = family_of(backbone)
  ablation = cell_removal._Ablation(backbone, tasks, "child", one_device())
  with pytest.raises(DataError, match="no example"):
    ablation.removal(np.zeros((4, 9), np.int64), source_of(tasks[0]))


@pytest.mark.parametrize(
  ("tasks", "names", "size", "error", "words"),
  [
    (family_of, ["other"], 9, TaskError, "'other' has no memory"),
    (lambda b: [], [], 9, TaskError, "no task of classes has mem"),
    (lambda b: [random_task(b, "a", cells=0)], [], 9, TaskError,
     "no task of classes has mem"),
    (lambda b: [random_task(b, "a", kind=mv.TaskKind(name="labels"))], [], 9,
     TaskError, "no task of classes has mem"),
    (lambda b: random_task(b, "a", classes=9), [], 9, TaskError,
     "has 9 classes .* 'numbered' has 3"),
    (lambda b: random_task(b, "a", class_names=("x", "y", "z")), [], 9,
     TaskError, r"3 classes \(x, y, z, .* \(0, 1, 2, "),
    (lambda b: random_task(b, "a"), [], 0, DataError,
     "'numbered' has no example"),
  ],
)  # fmt: skip
def test_tasks_and_data_that_do_not_fit_are_refused(
  backbone, tasks, names, size, error, words
):
  source = source_of(random_task(backbone, "source", classes=3), size)
  with pytest.raises(error, match=words):
    remove(backbone, tasks(backbone), source, *names)


def remove(backbone, tasks, source, *names):
  return cell_removal.remove_cells(
    backbone, tasks, source, names or None, batch_size=8, mesh=one_device()
  )


def test_tasks_that_want_other_images_are_refused(backbone):
  """Evaluated is one alone: the images would be those of the other."""
  a, b = (
    random_task(
      backbone, name, seed=seed,
      preprocessing=mv.EvalPreprocessing(
        image_size=8, crop=crop, resize=resize
      ),
    )
    for seed, (name, crop, resize) in enumerate(
      [("a", "central", 9), ("b", "resize", 0)]
    )
  )  # fmt: skip
  for names in ((), ("a",), ("b",)):
    with pytest.raises(TaskError, match="'a' and 'b' need images prepared"):
      remove(backbone, [a, b], source_of(b), *names)


def test_a_batch_that_does_not_divide_is_refused(backbone):
  task = random_task(backbone, "a")
  mesh = sharding.make_mesh(jax.devices()[:3])
  with pytest.raises(ConfigError, match="batch_size is 256, .* 3, .* devices"):
    cell_removal.remove_cells(backbone, task, source_of(task), mesh=mesh)


@pytest.mark.slow
def test_tasks_are_given_as_to_forward(backbone):
  """One, several, or by their names; of data of which some cannot be read."""
  task = random_task(backbone, "a", cells=1)
  source = fake_data.broken_source(3, [1], max_bad=1)
  results = [
    remove(backbone, given, source)
    for given in (task, (each for each in [task]), {"a": task})
  ]
  assert [list(found) for found in results] == [["a"]] * 3
  for found in results:
    assert (found["a"].examples, found["a"].skipped) == (2, 1)


@pytest.mark.slow
def test_outputs_that_are_not_finite_are_refused(backbone):
  task = random_task(backbone, "a", cells=1)
  params = {**task.params, "cls": np.full_like(task.params["cls"], np.nan)}
  broken = dataclasses.replace(task, params=params)
  with pytest.raises(TaskError, match="outputs of task 'a' are not finite"):
    remove(backbone, broken, source_of(task, 2))


@pytest.mark.slow
def test_variants_that_run_one_after_the_other_share_memory(
  backbone, monkeypatch
):
  task = random_task(backbone, "a", cells=16)
  _, context = mv.encode(backbone, np.zeros((64, 8, 8, 3), np.float32))
  inputs = (
    backbone.params, mv.fill_slots(backbone, task).arrays, task.params["head"],
    context, np.zeros(64, np.int32), np.ones(64, np.float32),
  )  # fmt: skip
  replicated, taken = sharding.replicated(one_device()), []
  for together in (4, 99):
    monkeypatch.setattr(cell_removal, "_TOGETHER", together)
    cell_removal._count_program.cache_clear()
    program = cell_removal._count_program(replicated, backbone.config, 16)
    compiled = program.lower(*inputs).compile()
    taken.append(compiled.memory_analysis().temp_size_in_bytes)
  cell_removal._count_program.cache_clear()
  assert 2 * taken[0] < taken[1]


def test_too_many_cells_are_refused_before_anything_is_made(backbone):
  task = random_task(backbone, "a", cells=1)
  spec = dataclasses.replace(task.spec, cells=4096)
  many = dataclasses.replace(task, spec=spec)
  with pytest.raises(TaskError, match="4,096 memory cells in each of 2 layers"):
    cell_removal.remove_cells(
      backbone, [many], source_of(task), batch_size=4, mesh=one_device()
    )


def test_the_error_of_a_removal_is_that_of_its_differences():
  removals = cell_removal.Removals(np.array([30]), np.array([10]), 100)
  each = np.repeat([-1, 1, 0], [30, 10, 60])
  np.testing.assert_allclose(removals.standard_error, each.std() / 100**0.5)
