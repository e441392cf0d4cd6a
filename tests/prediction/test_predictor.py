"""A predictor answers as `forward` does, while tasks come and go."""

import contextlib
import dataclasses
import pickle
import threading
import time

import jax
import numpy as np
import pytest
from conftest import random_task, run_program, tiny_backbone
from kinds_of_tasks import LABELS, VALUES, tasks_of_kinds

import memory_vit as mv
from memory_vit.errors import ConfigError, TaskError, UnknownTask
from memory_vit.kinds import CLASSES, guesses
from memory_vit.model.regimes import REGIMES
from memory_vit.prediction import (
  Predictor,
  compilations,
  fixed_shapes,
  task_set,
)
from memory_vit.tasks import inference

SIZES = (1, 4)


@pytest.fixture(scope="module")
def backbone():
  """One block: no test depends on the depth."""
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
  found = unchanged("t1")
  # Its parent is in another slot than its number among the tasks.
  assert same_bits(found.logits["child"], expected["child"])
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


@pytest.mark.fault("changing-tasks")
@pytest.mark.parametrize(
  "committed", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_nothing_compiles_after_the_warm_up(tasks, pixels, committed):
  # Of its own: whatever it runs is compiled here.
  backbone = tiny_backbone(depth=1, seed=5, mlp_dim=40 + 8 * committed)
  if committed:  # to a device, as by who chooses one
    params = jax.device_put(backbone.params, jax.devices()[0])
    backbone = dataclasses.replace(backbone, params=params)

  def on_it(task):
    spec = dataclasses.replace(task.spec, backbone=backbone.id)
    return dataclasses.replace(task, spec=spec)

  tasks = [on_it(task) for task in tasks]
  predictor = predictor_of(backbone, tasks[:2], warm_up=False, features=True)
  # Of each size what makes the context, the features, and reads.
  assert predictor.compiled_sizes == ()
  assert predictor.warm_up(1) == 3
  assert predictor.compiled_sizes == SIZES[:1]
  # Larger requests are answered by several batches of it.
  with compilations.counted() as tally:
    predictor.predict_pixels(pixels, features=True, original=True)
  assert tally.count == 0
  assert predictor.warm_up() == 3 * len(SIZES[1:])
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
    assert not predictor.remove("big").grew  # what has grown stays
    predictor.predict_pixels(pixels)
  assert tally.count == 0
  assert found.logits["big"].shape == (9, 200)


@pytest.mark.fault("growing-room")
@pytest.mark.slow
def test_slots_grow_if_needed_and_say_so(backbone, tasks):
  predictor = predictor_of(backbone, tasks[1:3])
  sizes = predictor.task_set.sizes
  rooms, parents = dict(sizes.rooms), 0
  for task, grown in (
    (random_task(backbone, "cells", cells=9), {"memory": 16}),
    (random_task(backbone, "norms", cells=0, regime="norms_masked"),
     {"norms": True}),
    (random_task(backbone, "child", attends_to=[tasks[1]]), {}),
  ):  # fmt: skip
    assert predictor.add(task).grew
    rooms, parents = rooms | grown, parents or len(task.spec.attends_to)
    sizes = predictor.task_set.sizes
    assert (dict(sizes.rooms), sizes.parents) == (rooms, parents)
    predictor.remove(task.name)
  assert [predictor.add(tasks[i]).grew for i in (0, 3)] == [False, False]
  change = predictor.add(tasks[5])  # the fifth
  assert change.grew
  assert predictor.task_set.sizes.slots == 8
  assert change.version == predictor.task_set.version == 10


@pytest.mark.fault("changing-tasks")
@pytest.mark.slow
def test_threads_see_one_set_each_while_tasks_are_swapped(
  backbone, tasks, pixels
):
  predictor = predictor_of(backbone, tasks[:2])
  stop, found, failures = threading.Event(), [], []

  def ask():
    try:
      while not stop.is_set():
        answer = predictor.predict_pixels(pixels[:4], original=True)
        found.append(answer)
        assert answer.logits.keys() == set(answer.task_set.names)
    except Exception as error:  # in a thread: reported below
      failures.append(error)

  threads = [threading.Thread(target=ask) for _ in range(8)]
  for thread in threads:
    thread.start()
  for i in range(4):
    predictor.replace("t1", tasks[2 + i % 4])
    predictor.add(tasks[2 + i % 4])
    time.sleep(0.01)
    predictor.remove(tasks[2 + i % 4].name)
  stop.set()
  for thread in threads:
    thread.join()
  assert failures == []
  versions = {answer.task_set.version: answer.task_set for answer in found}
  assert len(versions) > 3
  assert max(versions) <= predictor.task_set.version == 13
  expected = {
    version: by_forward(backbone, list(shown.by_slot.values()), pixels[:4])
    for version, shown in versions.items()
  }
  for answer in found:
    of_version = expected[answer.task_set.version]
    assert same_bits(answer.original, of_version["backbone"])
    for name, logits in answer.logits.items():
      assert same_bits(logits, of_version[name])


@pytest.mark.fault("changing-tasks")
@pytest.mark.parametrize(
  ("plans", "change", "classes"),
  [
    (
      "with_added",
      lambda model, name, task: model.add(task, name=f"{name}2"),
      {"t0": 2, "t1": 3, "t02": 9, "t12": 9},
    ),
    (
      "with_replaced",
      lambda model, name, task: model.replace(name, task),
      {"t0": 9, "t1": 9},
    ),
    ("without", lambda model, name, _: model.remove(name), {}),
  ],
)
def test_concurrent_changes_are_both_made(
  backbone, tasks, monkeypatch, plans, change, classes
):
  """No change is planned from a set that another change replaces."""
  model = predictor_of(backbone, tasks[:2], warm_up=False)
  both, real = threading.Barrier(2), getattr(task_set, plans)

  def planned(*given):
    found = real(*given)
    with contextlib.suppress(threading.BrokenBarrierError):
      both.wait(0.3)
    return found

  monkeypatch.setattr(task_set, plans, planned)
  other = random_task(backbone, "other", seed=9, classes=9)
  threads = [
    threading.Thread(target=change, args=(model, name, other))
    for name in model.task_set.names
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  found = {one.name: one.classes for one in model.task_set.describe()}
  assert found == classes
  assert model.task_set.version == 3


@pytest.mark.fault("growing-room")
def test_a_snapshot_answers_after_a_change(backbone, tasks, pixels):
  predictor = predictor_of(backbone, tasks[:2], warm_up=False)
  before = predictor.task_set
  expected = predictor.predict_pixels(pixels)
  predictor.remove("t0")
  predictor.add(random_task(backbone, "big", classes=130))
  found = predictor.predict_pixels(pixels, task_set=before)
  assert found.task_set is before
  assert found.logits.keys() == {"t0", "t1"}
  for name, logits in found.logits.items():
    assert same_bits(logits, expected.logits[name])


def test_requested_outputs_are_returned(backbone, tasks, pixels):
  predictor = predictor_of(backbone, tasks[:3], warm_up=False)
  every = predictor.predict_pixels(pixels)
  assert every.original is None
  assert every.features is None
  found = predictor.predict_pixels(pixels, tasks=("t2", "t0"))
  assert list(found.logits) == ["t2", "t0"]
  for name, logits in found.logits.items():
    assert same_bits(logits, every.logits[name])
    # Those of other slots are not kept alive behind it.
    assert logits.base is None or logits.base.size == logits.size
  images = list(pixels)
  for answer in (
    predictor.predict_pixels(pixels, tasks=(n for n in ("t2", "t0"))),
    predictor.predict(images, tasks=iter(["t2", "t0"])),
  ):
    assert list(answer.logits) == ["t2", "t0"]
  with pytest.raises(UnknownTask, match=r"no task 't9'.*t0, t1, t2") as raised:
    predictor.predict_pixels(pixels, tasks=("t0", "t9"))
  assert raised.value.known == ("t0", "t1", "t2")
  with pytest.raises(UnknownTask):
    predictor.predict(["no such file"], tasks=("t9",))
  with pytest.raises(UnknownTask):
    found.probabilities("t1")  # there, and not asked for
  with pytest.raises(TaskError, match="the string 't1'"):
    predictor.predict_pixels(pixels, tasks="t1")
  with pytest.raises(TaskError, match="of type int"):
    predictor.predict_pixels(pixels, tasks=7)
  only = predictor.predict_pixels(pixels[:3], tasks=(), features=True)
  assert only.logits == {}
  assert only.original is None
  summary = inference.summary_program(
    backbone.params,
    np.concatenate([pixels[:3], np.zeros_like(pixels[:1])]),
    config=backbone.config,
  )
  assert same_bits(only.features, np.asarray(summary)[:3].reshape(3, 1, 2, 32))


def test_predictor_answers_without_tasks_or_images(backbone, tasks, pixels):
  predictor = predictor_of(backbone, ())
  found = predictor.predict_pixels(pixels, original=True)
  plain = by_forward(backbone, tasks[:1], pixels)["backbone"]
  assert same_bits(found.original, plain)
  assert predictor.preprocessing == mv.EvalPreprocessing(image_size=8)
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  predictor.add(random_task(backbone, "central", preprocessing=central))
  assert predictor.preprocessing == central
  predictor.remove("central")
  assert predictor.preprocessing == mv.EvalPreprocessing(image_size=8)
  predictor.add(
    random_task(backbone, "again", classes=3, preprocessing=central)
  )
  with pytest.raises(TaskError, match="need images prepared differently"):
    predictor.add(tasks[0])
  assert predictor.task_set.names == ("again",)
  none = predictor.predict([], original=True, features=True)
  assert none.logits["again"].shape == (0, 3)
  assert none.original.shape == (0, 7)
  assert none.features.shape == (0, 1, 2, 32)
  assert none.top("again") == []


@pytest.mark.fault("task-in-use")
def test_changes_that_are_refused_change_nothing(backbone, tasks, pixels):
  child = random_task(backbone, "child", attends_to=tasks[1:2])
  predictor = predictor_of(backbone, [*tasks[:2], child], warm_up=False)
  before = predictor.task_set
  other = random_task(tiny_backbone(depth=1, seed=1), "other")
  for change, message in (
    (lambda: predictor.remove("t1"), "cannot be removed.*'child'"),
    (lambda: predictor.remove("t9"), "no task 't9'.*t0, t1, child"),
    (lambda: predictor.replace("t9", tasks[2]), "no task 't9'"),
    # What the child has learned to read is not there any more.
    (lambda: predictor.replace("t1", tasks[2]), "'t1' cannot be repl.*child"),
    (lambda: predictor.add(tasks[0]), "a task 't0' already"),
    (lambda: predictor.add(tasks[2], name="No name"), "expected 1 to 64 char"),
    (lambda: predictor.add(other), "belongs to another backbone"),
    (lambda: predictor.add("no/such/task"), "no/such/task"),
    (lambda: predictor.add(7), "of type int, expected a Task or the path"),
    (
      lambda: predictor.add(
        random_task(backbone, "orphan", attends_to=("none",))
      ),
      "'orphan' attends to 'none'",
    ),
  ):
    with pytest.raises(TaskError, match=message):
      change()
    assert predictor.task_set is before
  with pytest.raises(UnknownTask) as raised:
    predictor.remove("a\x1b[2J")
  assert "\x1b" not in str(raised.value)
  predictor.remove("child")
  predictor.remove("t1")


@pytest.mark.fault("task-in-use")
def test_parent_read_by_name_is_not_replaced(backbone, tasks, pixels):
  """A child that knows only its parent's name would answer differently."""
  child = random_task(backbone, "child", attends_to=("t0",))
  assert not any(child.spec.parent_digests)
  predictor = predictor_of(backbone, [tasks[0], child], warm_up=False)
  before = predictor.task_set
  with pytest.raises(TaskError, match="'t0' cannot be replaced.*child"):
    predictor.replace("t0", tasks[1])
  assert predictor.task_set is before
  predictor.replace("t0", tasks[0])  # the same values
  predictor.replace("child", tasks[1])
  predictor.replace("t0", tasks[2])


def test_most_probable_classes_are_those_of_forward(backbone, pixels):
  names = tuple("abcdef")
  tasks = [
    random_task(backbone, "named", classes=6, class_names=names),
    random_task(backbone, "two", seed=1, classes=2),
  ]
  found = predictor_of(backbone, tasks, warm_up=False).predict_pixels(
    pixels, original=True
  )
  probabilities = found.probabilities("named")
  np.testing.assert_allclose(
    probabilities, jax.nn.softmax(found.logits["named"]), rtol=1e-5
  )
  top = found.top("named", 3)
  assert len(top) == len(pixels)
  for row, found_top in zip(probabilities, top, strict=True):
    order = np.argsort(-row)[:3]
    assert [guess.index for guess in found_top] == list(order)
    assert [guess.class_name for guess in found_top] == [
      names[i] for i in order
    ]
    assert [guess.probability for guess in found_top] == list(row[order])
  assert {len(row) for row in found.top("two")} == {2}
  assert {g.class_name for g in found.top("two")[0]} == {"0", "1"}
  for count in (0, -1):
    with pytest.raises(ConfigError, match=f"classes is {count}, expected"):
      found.top("two", count)
  assert len(found.top("backbone", 9)[0]) == 7


def test_outputs_that_are_not_finite_are_refused(backbone, tasks, pixels):
  broken = dataclasses.replace(
    tasks[0], params=jax.tree.map(lambda x: x * np.nan, tasks[0].params)
  )
  found = predictor_of(
    backbone, [broken, tasks[1]], warm_up=False
  ).predict_pixels(pixels)
  with pytest.raises(TaskError, match="'t0' are not finite"):
    found.top("t0")
  found.top("t1")  # whom it does not disturb


def test_each_kind_is_answered_in_its_way(backbone, pixels):
  tasks = tasks_of_kinds(backbone)
  predictor = predictor_of(backbone, tasks, warm_up=False)
  found = predictor.predict_pixels(pixels, original=True)
  expected = by_forward(backbone, tasks, pixels)
  assert same_bits(found.original, expected["backbone"])
  for name, kind in (("tags", LABELS), ("size", VALUES)):
    assert same_bits(found.logits[name], expected[name])
    assert found.kind(name) == kind
  tags = expected["tags"].astype(np.float64)
  np.testing.assert_allclose(
    found.probabilities("tags"), 1 / (1 + np.exp(-tags))
  )
  values = found.values("size")
  np.testing.assert_allclose(values[:, 0], 10 + 30.0 * expected["size"][:, 0])
  np.testing.assert_allclose(values[:, 1], 2000 + 0.5 * expected["size"][:, 1])
  for of_image, row in zip(
    found.labels("tags"), found.probabilities("tags"), strict=True
  ):
    over = [i for i in np.argsort(-row) if row[i] >= LABELS.thresholds[i]]
    assert [guess.index for guess in of_image] == over
    assert [guess.probability for guess in of_image] == list(row[over])
  assert "is of values" in refusal(found.probabilities, "size")
  for method in (found.top, found.values):
    assert "use probabilities or labels" in refusal(method, "tags")
  assert "use probabilities or top" in refusal(found.labels, "backbone")
  described = {one.name: one.kind for one in predictor.task_set.describe()}
  assert described == {"pets": CLASSES, "tags": LABELS, "size": VALUES}


def test_kinds_come_and_go_without_a_new_program(backbone, pixels):
  pets, tags, size = tasks_of_kinds(backbone)
  predictor = predictor_of(backbone, [pets])
  predictor.predict_pixels(pixels)
  for task in (tags, size):
    assert predictor.add(task).compiled == 0
  predictor.predict_pixels(pixels)
  assert predictor.compilations == 0


def refusal(method, name):
  with pytest.raises(TaskError) as caught:
    method(name)
  return str(caught.value)


def test_describe_lists_every_task(backbone, tasks):
  child = random_task(backbone, "child", cells=3, attends_to=tasks[1:2])
  predictor = predictor_of(backbone, [tasks[1], child], warm_up=False)
  assert predictor.task_set.describe() == (
    task_set.TaskDescription(
      name="t1", slot=0, classes=3, kind=CLASSES, class_names=(), cells=1,
      regime="memory_masked", parents=(), digest=tasks[1].digest,
      fingerprint=backbone.fingerprint,
    ),
    task_set.TaskDescription(
      name="child", slot=1, classes=3, kind=CLASSES, class_names=(), cells=3,
      regime="memory_masked", parents=("t1",), digest=child.digest,
      fingerprint=backbone.fingerprint,
    ),
  )  # fmt: skip


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_sizes": ()}, r"batch_sizes is \(\)"),
    ({"batch_sizes": (8, 1)}, "that ascend"),
    ({"batch_sizes": [1, 8]}, "expected a tuple"),
    ({"batch_sizes": (0, 8)}, "from 1 to"),
    ({"slots": 0}, "slots is 0, expected at least 1"),
    ({"slots": "8"}, "slots is '8'"),
    ({"top": 0}, "top is 0"),
    ({"top": 2**20 + 1}, "expected at least 1 and at most 1,048,576"),
    ({"parts": "norms"}, "parts is 'norms', .* one of .'norms', 'layers'"),
    ({"parts": ("heads",)}, r"parts\[0\] is 'heads', expected one of"),
    ({"parts": (["norms"],)}, r"parts\[0\] is \['norms'\], expected str"),
    ({"tasks": "DIR"}, r"tasks is 'DIR', expected tuple\[str, ...\]: at"),
    ({"features": "no"}, "features is 'no', expected bool: true or false"),
    ({"slots": True}, "slots is True, expected int: at least"),
    ({"batch_sizes": (True, 8)}, "from 1 to"),
    ({"image_size": -1}, "image_size is -1, expected at least 0"),
    ({"dtype": "float16"}, "dtype is 'float16', expected one of"),
  ],
)
def test_invalid_options_are_refused(options, message):
  with pytest.raises(ConfigError, match=message):
    mv.PredictorConfig("augreg-B/32", **options)


def test_batch_beyond_the_memory_is_refused(backbone):
  with pytest.raises(ConfigError, match="do not fit into 1 MiB"):
    predictor_of(backbone, (), batch_sizes=(4096,), memory_mib=1)


def test_task_set_of_another_model_is_refused(backbone, tasks, pixels):
  other = tiny_backbone(depth=1, seed=1)
  foreign = predictor_of(other, [random_task(other, "t0")], warm_up=False)
  predictor = predictor_of(backbone, tasks[:1], warm_up=False)
  with pytest.raises(TaskError, match="'t0' belongs to another backbone"):
    predictor.predict_pixels(pixels, task_set=foreign.task_set)
  with pytest.raises(TaskError, match="'t0' belongs to another backbone"):
    predictor_of(other, tasks[:1], warm_up=False)
  with pytest.raises(ConfigError, match="dtype cannot be given with a loaded"):
    predictor_of(backbone, tasks[:1], dtype="bfloat16")
  with pytest.raises(ConfigError, match="no option 'slot'; nearest: slots"):
    Predictor.from_model(backbone, tasks[:1], slot=3)


@pytest.mark.fault("unknown-task")
def test_unknown_task_error_can_be_pickled(backbone, tasks):
  with pytest.raises(UnknownTask) as raised:
    predictor_of(backbone, tasks[:2], warm_up=False).remove("t9")
  error = pickle.loads(pickle.dumps(raised.value))
  assert error.known == ("t0", "t1")
  assert str(error) == str(raised.value)


def test_reserved_parts_are_no_growth(backbone, tasks, pixels):
  predictor = predictor_of(
    backbone, tasks[:1], parts=("norms", "layers"), parents=1, slots=2
  )
  both = random_task(
    backbone, "both", cells=2, regime="cls+memory+norms+layers",
    attends_to=tasks[:1],
  )  # fmt: skip
  assert not predictor.add(both).grew
  found = predictor.predict_pixels(pixels)
  assert predictor.compilations == 0
  expected = by_forward(backbone, [tasks[0], both], pixels, slots=2)
  for name, logits in found.logits.items():
    assert same_bits(logits, expected[name])


def lone_task(backbone, regime, name="lone", **options):
  learned = REGIMES[regime]
  return random_task(
    backbone, name, regime=regime, cells=2 if learned.has("memory") else 0,
    bottleneck=3 if "bottleneck" in learned.fields else 0, **options,
  )  # fmt: skip


@pytest.mark.parametrize(
  "regime", [name for name, r in REGIMES.items() if not r.composes]
)
def test_lone_task_is_answered(backbone, pixels, regime):
  """By the programs of its training, with original outputs and features."""
  task = lone_task(backbone, regime)
  predictor = predictor_of(backbone, task, batch_sizes=(4,), warm_up=False)
  found = predictor.predict_pixels(pixels[:5], original=True, features=True)
  filled = np.zeros((8, 8, 8, 3), np.float32)
  filled[:5] = pixels[:5]
  halves = [
    run_program(backbone, [task], jax.device_put(half))["lone"]
    for half in (filled[:4], filled[4:])
  ]
  assert same_bits(found.logits["lone"], np.concatenate(halves)[:5])
  assert found.logits.keys() == {"lone"}
  plain = predictor_of(backbone, (), batch_sizes=(4,), warm_up=False)
  others = plain.predict_pixels(pixels[:5], original=True, features=True)
  assert same_bits(found.original, others.original)
  assert same_bits(found.features, others.features)
  none = predictor.predict_pixels(pixels[:0])
  assert none.logits["lone"].shape == (0, 3)


def test_lone_task_admits_no_others(backbone, tasks, pixels, tmp_path):
  probe, full = lone_task(backbone, "probe"), lone_task(backbone, "full", "own")
  mv.save_task(probe, tmp_path / "probe")
  predictor = predictor_of(backbone, tasks[:2])
  before = predictor.task_set
  reads = "reads all layers of the backbone, and not its pooled output"
  with pytest.raises(
    TaskError, match=f"'lone' has the regime 'probe', which {reads}: it cannot "
  ):
    predictor.add(tmp_path / "probe")
  assert predictor.task_set is before
  predictor.remove("t0")
  change = predictor.replace("t1", tmp_path / "probe")  # it lies in slot 1
  assert (change.names, change.grew) == (("t1",), True)
  found = predictor.predict_pixels(pixels[:4], original=True)
  four = jax.device_put(pixels[:4])
  expected = run_program(backbone, [probe], four)["lone"]
  assert same_bits(found.logits["t1"], np.asarray(expected))
  with pytest.raises(TaskError, match="'t1' has the regime 'probe'"):
    predictor.add(tasks[0])
  predictor.remove("t1")
  assert predictor.add(full).grew
  with pytest.raises(TaskError, match="'full', which changes what the backb"):
    predictor.add(probe)
  counts = [predictor.compilations]
  predictor.predict_pixels(pixels[:4])
  counts.append(predictor.compilations)
  assert predictor.remove("own").grew
  assert not predictor.add(tasks[2]).grew
  counts.append(predictor.compilations)
  found = predictor.predict_pixels(pixels)
  counts.append(predictor.compilations)
  expected = by_forward(backbone, tasks[2:3], pixels)
  assert same_bits(found.logits["t2"], expected["t2"])
  # What came and went was compiled before it was shown.
  assert counts[::2] == counts[1::2]


def test_a_lone_task_of_the_same_shape_compiles_nothing(backbone, pixels):
  """With another name, other classes and another preprocessing."""
  predictor = predictor_of(backbone, lone_task(backbone, "probe"))
  wide = mv.EvalPreprocessing(image_size=8, crop="central", resize=12)
  for seed, options in enumerate(
    (
      {"class_names": ("a", "b", "c")},
      {"class_names": ("x", "y", "z"), "name": "other"},
    )
  ):
    task = lone_task(backbone, "probe", seed=seed, **options)
    assert predictor.replace("lone", task).compiled == 0
    logits = predictor.predict_pixels(pixels[:4]).logits["lone"]
    expected = run_program(
      backbone, [task], jax.device_put(pixels[:4])
    )  # fmt: skip
    assert expected.keys() == {task.name}
    assert same_bits(logits, np.asarray(expected[task.name]))
  other = predictor_of(
    backbone, lone_task(backbone, "probe", preprocessing=wide), warm_up=False
  )
  other.predict_pixels(pixels[:4])
  assert predictor.compilations == other.compilations == 0


def test_outputs_cut_from_a_batch_do_not_keep_it_alive():
  logits = np.arange(4 * 8 * 128, dtype=np.float32).reshape(4, 8, 128)
  batch = fixed_shapes.BatchOutputs(logits, None, None)
  found = batch.cut(3, {"a": (2, 5), "b": (0, 128)}).logits
  assert same_bits(found["a"], logits[:3, 2, :5])
  assert same_bits(found["b"], logits[:3, 0])
  assert not any(np.shares_memory(one, logits) for one in found.values())


def test_images_are_padded_to_the_smallest_batch_that_holds_them(pixels):
  def shapes(count, sizes):
    return [
      (len(batch), whole)
      for batch, whole in fixed_shapes.padded_batches(pixels[:count], sizes)
    ]

  assert shapes(0, (1, 4)) == []
  assert shapes(1, (1, 2, 4)) == [(1, 1)]
  assert shapes(2, (1, 2, 4)) == [(2, 2)]
  assert shapes(3, (1, 2, 4)) == [(4, 3)]
  assert shapes(9, (1, 2, 4)) == [(4, 4), (4, 4), (1, 1)]
  assert shapes(6, (1, 4)) == [(4, 4), (4, 2)]
  [(batch, _)] = fixed_shapes.padded_batches(pixels[:3], (4,))
  assert np.array_equal(batch[:3], pixels[:3])
  assert not batch[3].any()


def test_compilations_of_other_threads_do_not_count():
  """Neither does what the same thread compiles before and after."""
  counter = compilations.CompilationCounter()

  def compile_something(scale):
    jax.jit(lambda x: x * scale)(np.float32(1))

  compile_something(1.25)
  with counter.counting() as tally:
    other = threading.Thread(target=compile_something, args=(1.5,))
    other.start()
    other.join()
    assert tally.count == 0
    compile_something(1.75)
  compile_something(2.25)
  assert tally.count == counter.count == 1


def test_a_digest_names_what_answers(backbone, tasks):
  """It does not depend on slots, the version, or earlier changes."""
  one = predictor_of(backbone, tasks[:2], warm_up=False)
  other = predictor_of(backbone, [tasks[2], tasks[1]], warm_up=False)
  change = other.replace("t2", tasks[0])
  assert change.digest == other.task_set.digest != one.task_set.digest
  other.remove("t2")
  other.add(tasks[0])
  assert other.task_set.digest == one.task_set.digest
  spec = dataclasses.replace(tasks[0].spec, class_names=("a", "b"))
  named = dataclasses.replace(tasks[0], spec=spec)
  assert one.replace("t0", named).digest != other.task_set.digest
  digests = set()
  for thresholds in ((), (0.2, 0.3), (0.3, 0.2)):
    kind = mv.TaskKind(name="labels", thresholds=thresholds)
    spec = dataclasses.replace(tasks[0].spec, kind=kind)
    labels = dataclasses.replace(tasks[0], spec=spec)
    digests.add(one.replace("t0", labels).digest)
  assert len({*digests, other.task_set.digest}) == 4


def test_a_digest_names_how_images_are_prepared(backbone, tasks):
  """Sets of the same tasks with two ways differ; empty sets do not."""
  side = backbone.config.image_size
  preprocessing = mv.EvalPreprocessing(image_size=side, interpolation="bicubic")
  spec = dataclasses.replace(tasks[0].spec, preprocessing=preprocessing)
  changed = dataclasses.replace(tasks[0], spec=spec)
  predictors = [
    predictor_of(backbone, [task], warm_up=False)
    for task in (tasks[0], changed)
  ]
  one, other = (predictor.task_set.digest for predictor in predictors)
  assert one != other
  for predictor in predictors:
    predictor.remove("t0")
  one, other = (predictor.task_set.digest for predictor in predictors)
  assert one == other


def test_a_set_that_is_made_ready_answers_once_it_is_shown(
  backbone, tasks, pixels
):
  predictor = predictor_of(backbone, tasks[:2])
  before = predictor.task_set
  wanted = {0: tasks[2], 3: tasks[1]}
  ready, change = predictor.make_ready(wanted)
  assert predictor.task_set is before
  assert (change.version, change.names) == (2, ("t2", "t1"))
  assert (change.grew, change.compiled) == (False, 0)
  asked = predictor.predict_pixels(pixels, task_set=ready)
  predictor.show(ready)
  assert predictor.task_set is ready
  found = predictor.predict_pixels(pixels)
  expected = by_forward(backbone, [tasks[2], tasks[1]], pixels)
  for name in ("t2", "t1"):
    np.testing.assert_array_equal(found.logits[name], expected[name])
    np.testing.assert_array_equal(asked.logits[name], expected[name])
  with pytest.raises(TaskError, match="t1"):
    predictor.make_ready({0: tasks[1], 1: tasks[1]})
  assert predictor.add(tasks[3]).version == 3


@pytest.mark.parametrize("classes", [17, 1000])
def test_first_of_equal_classes_is_the_best(classes):
  """Classes are often equal: a new task has logits of zero."""
  shares = np.random.default_rng(0).integers(0, 3, (20, classes)) / 10
  expected = [
    sorted(range(classes), key=lambda i: (-row[i], i))[:5] for row in shares
  ]
  assert guesses.best(shares, 5).tolist() == expected
