"""Tasks in slots: nothing is recompiled, and neighbours have no effect."""

import dataclasses
import functools
import gc
import os
import pathlib

import jax
import numpy as np
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.tasks import inference


def tasks_of(backbone, count, **options):
  return [
    random_task(
      backbone, f"t{i}", seed=i, cells=i % 4, classes=2 + i, **options
    )
    for i in range(count)
  ]


@pytest.mark.fault("batch-size")
def test_another_task_runs_the_compiled_programs(images):
  # A backbone of its own, as compiled programs are counted.
  backbone = tiny_backbone(seed=11, depth=1)
  config = dataclasses.replace(backbone.config, num_classes=0)
  backbone = mv.Backbone(config, backbone.params, backbone.fingerprint)
  tasks = tasks_of(backbone, 9)
  mv.forward(backbone, tasks[:5], images)  # eight slots
  before = [
    p._cache_size()
    for p in (
      inference.encode_program.compiled,
      inference.read_program,
      inference.memory_program,
    )
  ]

  def compiled_since():
    now = (
      inference.encode_program.compiled,
      inference.read_program,
      inference.memory_program,
    )
    return [p._cache_size() - b for p, b in zip(now, before, strict=True)]

  for count in (6, 7, 8, 5):
    mv.forward(backbone, tasks[:count], images)
  mv.forward(backbone, tasks[::-1][:6], images)
  assert compiled_since() == [0, 0, 0]
  mv.forward(backbone, tasks, images)  # nine do not fit into eight
  assert compiled_since() == [0, 1, 1]
  # Unless there are enough slots from the start.
  slots = mv.fill_slots(backbone, tasks[:2], slots=9)
  mv.forward(backbone, slots, images)
  assert compiled_since() == [0, 1, 1]


@pytest.mark.fault("many-tasks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_in_slots_change_no_bit(images, dtype):
  backbone = tiny_backbone(dtype=dtype)
  a, b, c = tasks_of(backbone, 3)
  child = random_task(backbone, "child", cells=3, attends_to=[b])
  _, context = mv.encode(backbone, images)

  def logits(*tasks):
    slots = mv.fill_slots(backbone, tasks, slots=4, cells=8)
    return mv.read(backbone, slots, context)

  broken = dataclasses.replace(
    a, params=jax.tree.map(lambda x: x * np.nan, a.params)
  )
  norms, layers = (
    random_task(backbone, "n", cells=0, regime=regime)
    for regime in ("norms_masked", "layers_masked")
  )
  every = logits(a, b, child, c)
  for others in (
    (c, b, child, a), (broken, b, child), (norms, b, child), (layers, b, child),
  ):  # fmt: skip
    found = logits(*others)
    for name in ("t1", "child"):
      assert np.array_equal(found[name], every[name])
  assert np.isnan(logits(broken, b, child)["t0"]).all()


@pytest.mark.fault("task-leak")
@pytest.mark.slow
def test_tasks_that_come_and_go_leave_nothing_behind(
  backbone, images, tmp_path
):
  """200 tasks, one after the other, as in a server."""
  statm, paths = pathlib.Path("/proc/self/statm"), []
  if not statm.exists():
    pytest.skip("this system does not say how much memory a process has")
  for i in range(4):
    task = random_task(backbone, f"t{i}", seed=i, cells=200, classes=5_000)
    mv.save_task(task, tmp_path / f"t{i}")
    paths.append(tmp_path / f"t{i}")
  size = sum(x.nbytes for x in jax.tree.leaves(task.params))

  def serve(count):
    """Bytes of this process afterwards, arrays of jax, and programs."""
    for i in range(count):
      loaded = mv.load_task(paths[i % 4], backbone)
      mv.forward(backbone, mv.fill_slots(backbone, [loaded]), images)
    del loaded
    gc.collect()
    pages = int(statm.read_text().split()[1])
    compiled = sum(
      p._cache_size()
      for p in (
        inference.encode_program.compiled,
        inference.read_program,
        inference.memory_program,
      )
    )
    return pages * os.sysconf("SC_PAGE_SIZE"), len(jax.live_arrays()), compiled

  first = serve(20)
  last = serve(200)
  print(f"{(last[0] - first[0]) / 2**20:.1f} MiB, of {200 * size / 2**20:.0f}")
  assert last[1:] == first[1:]
  assert last[0] - first[0] < 200 * size / 4


def test_slots_compute_what_training_computes(backbone, images):
  """Padded and stacked or not: the same logits."""
  tasks = tasks_of(backbone, 5)
  tasks.append(random_task(backbone, "n", cells=0, regime="norms_masked"))
  tasks.append(random_task(backbone, "l", cells=0, regime="layers_masked"))
  tasks.append(random_task(backbone, "child", attends_to=tasks[3:]))
  _, context = mv.encode(backbone, images)
  found = mv.read(backbone, tasks, context)
  read = functools.partial(
    inference.read_tasks,
    config=backbone.config,
    specs=tuple(t.spec for t in tasks),
  )
  params = {t.spec.name: t.params for t in tasks}
  expected = jax.jit(read)(params, backbone.params, context)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name].shape == value.shape
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-5)


def test_memory_is_computed_once(backbone, images, monkeypatch):
  calls = []
  real = inference.memory_program

  def counted(*args, **kwargs):
    calls.append(1)
    return real(*args, **kwargs)

  monkeypatch.setattr(inference, "memory_program", counted)
  slots = mv.fill_slots(backbone, tasks_of(backbone, 2))
  for _ in range(3):
    mv.forward(backbone, slots, images)
  assert len(calls) == 1


def test_logits_can_be_differentiated(images):
  """For a user's own training loop, though `read_tasks` is faster."""
  backbone = tiny_backbone(depth=1)
  task = random_task(backbone, "a")

  def loss(params):
    out = mv.forward(backbone, [mv.Task(task.spec, params)], images)
    return (out["a"] ** 2).sum()

  gradient = jax.tree.leaves(jax.grad(loss)(task.params))
  assert gradient
  assert all(np.abs(g).max() > 0 for g in gradient)


@pytest.mark.fault("batch-size")
def test_sizes_are_rounded_up(backbone):
  tasks = tasks_of(backbone, 11)
  for count, slots in ((1, 1), (3, 4), (8, 8), (9, 16)):
    arrays = mv.fill_slots(backbone, tasks[:count]).arrays
    assert arrays.mask.cells.shape == (slots, 8)
    assert arrays.parts["head"]["kernel"].shape == (slots, 32, 128)
    assert arrays.mask.parents.shape == (slots, 0)
  parents = mv.fill_slots(
    backbone, [*tasks, random_task(backbone, "c", attends_to=tasks[:3])]
  ).arrays.mask.parents
  assert parents.shape == (16, 4)


def test_mismatched_tasks_are_refused(backbone, images):
  a, b = tasks_of(backbone, 2)
  with pytest.raises(TaskError, match="no task"):
    mv.fill_slots(backbone, [])
  other = tiny_backbone(seed=1)
  with pytest.raises(TaskError, match="another backbone.*fingerprint"):
    mv.fill_slots(other, [a])
  with pytest.raises(TaskError, match="another backbone.*fingerprint"):
    mv.forward(other, mv.fill_slots(backbone, [a]), images)
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  spec = dataclasses.replace(b.spec, preprocessing=central)
  with pytest.raises(TaskError, match="'t0' and 't1' need .*differently"):
    mv.fill_slots(backbone, [a, mv.Task(spec, b.params)])
  child = random_task(backbone, "child", attends_to=[a])
  retrained = random_task(backbone, "t0", seed=5)
  with pytest.raises(TaskError, match="'child' was trained with another"):
    mv.fill_slots(backbone, [retrained, child])
  by_name = random_task(backbone, "child", attends_to=["t0"])
  mv.fill_slots(backbone, [retrained, by_name])
