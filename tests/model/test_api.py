"""The public API: what it accepts, refuses and shows."""

import copy
import dataclasses
import inspect
import pickle
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, one_device, random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import DataError, TaskError
from memory_vit.evaluation import evaluate
from memory_vit.tasks import image_check, inference


@pytest.fixture(scope="module")
def small():
  return tiny_backbone(seed=21, depth=1)


@pytest.fixture(scope="module")
def task(small):
  return random_task(small, "a")


# Images.


def bad_pictures(images):
  """{what the message says: pictures}."""
  images = np.asarray(images)
  nan, endless = images.copy(), images.copy()
  nan[1, 2, 3, 0] = np.nan
  endless[0, 0, 0] = -np.inf
  return {
    r"values from 0 to 255;": np.round((images + 1) * 127.5).clip(0, 255),
    r"values from -0\.99.* to 0\.99.*, 1 NaN and 0 infinite;": nan,
    r"values from -0\.99.* to 0\.99.*, 0 NaN and 3 infinite;": endless,
    "no finite value, 1536 NaN and 0 infinite;": np.full_like(images, np.nan),
    r"values from -1\.0001 to": np.where(images < -0.9, -1.0001, images),
    r"values from -3 to ": np.where(images < -0.9, -3, images).astype("f2"),
  }


@pytest.mark.fault("bad-pixels")
@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
def test_pictures_the_model_does_not_expect_are_refused(
  small, task, images, where
):
  assert jnp.abs(images).max() > 0.99
  edge = np.array(images)
  edge[0, 0, 0, 0] = 1 + 5e-6  # what rounding may add
  edge[1] = np.sign(edge[1])
  mv.forward(small, task, where(edge))
  for message, bad in bad_pictures(images).items():
    with pytest.raises(DataError, match=message) as error:
      mv.forward(small, task, where(bad))
    assert "expected finite values in [-1, 1]" in str(error.value)
    assert "mv.preprocess" in str(error.value)
    assert "(x - 127.5) / 127.5" in str(error.value)
  with pytest.raises(DataError, match=message):
    mv.encode(small, where(bad))
  large = where(np.float32(9) * np.asarray(images))
  found = mv.forward(small, task, large, check=False)
  assert np.array_equal(
    found["backbone"], mv.encode(small, large, check=False)[0]
  )


def test_unusable_images_are_refused(small, task):
  for bad, message in [
    ("cat.jpg", "type str, expected an array; mv.preprocess"),
    (None, "type NoneType, expected an array"),
    (
      np.zeros((2, 8, 8, 3), np.uint8),
      r"uint8 \(2, 8, 8, 3\), expected floats",
    ),
    (np.zeros((8, 8, 3), np.float32), r"of shape \(batch, 8, 8, 3\)"),
  ]:
    with pytest.raises(DataError, match=message):
      mv.forward(small, task, bad)


def test_known_images_are_checked_and_traced_are_not(small, task, images):
  bad = 9 * images
  loud = jax.jit(lambda x: mv.forward(small, task, x)["a"])
  assert loud(bad).shape == (8, 3)
  assert jax.vmap(lambda x: mv.encode(small, x[None])[0])(bad).shape[0] == 8
  jax.eval_shape(lambda x: mv.encode(small, x), bad)
  for known in (bad, np.asarray(bad)):
    with pytest.raises(DataError, match="expected finite values"):
      jax.jit(lambda t, x=known: mv.forward(small, t, x)["a"])(task)


@pytest.mark.fault("bad-pixels")
def test_the_device_never_waits_for_the_check(small, task, images, monkeypatch):
  """It runs before the model; the answer is awaited while the model runs."""
  events = []

  class Answer:
    def __bool__(self):
      events.append("answer")
      return True

  def logged(event, real):
    def call(*args, **kwargs):
      events.append(event)
      return real(*args, **kwargs)

    return call

  for name in ("encode_program", "read_program"):
    monkeypatch.setattr(inference, name, logged(name, getattr(inference, name)))
  monkeypatch.setattr(
    image_check, "_within", logged("look", lambda _: Answer())
  )
  monkeypatch.setattr(
    image_check, "_within_on_host", logged("look on host", lambda _: True)
  )
  slots = mv.fill_slots(small, task)
  model = ["encode_program", "read_program"]
  mv.forward(small, slots, images)
  assert events == ["look", *model, "answer"]
  events.clear()
  mv.forward(small, slots, np.asarray(images))
  assert events == [*model, "look on host"]
  events.clear()
  mv.forward(small, slots, images, check=False)
  assert events == model
  events.clear()
  # Evaluation reads images with our own reader.
  evaluate.predict_fn(small, [task], one_device())(images)
  assert events == model


# Tasks.


def test_tasks_are_given_alone_or_in_any_collection(
  small, task, images, tmp_path
):
  other = random_task(small, "b", seed=1, attends_to=task)
  both = {"a": task, "b": other}
  expected = mv.forward(small, [task, other], images)
  slots = mv.fill_slots(small, both)
  for tasks in ((task, other), (t for t in both.values()), both, slots):
    found = mv.forward(small, tasks, images)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[k], expected[k]) for k in expected)
  alone = mv.forward(small, [task], images)
  assert np.array_equal(mv.forward(small, task, images)["a"], alone["a"])
  _, context = mv.encode(small, images)
  assert np.array_equal(mv.read(small, task, context)["a"], alone["a"])

  def names(tasks):
    return [t.name for t in tasks]

  assert names(mv.concatenate(task, (t for t in [other]))) == ["a", "b"]
  assert names(mv.concatenate(both)) == ["a", "b"]
  assert names(mv.select(mv.rename(task, "a", "long"), "long")) == ["long"]
  assert names(mv.select(both, ("a",))) == ["a"]
  assert names(mv.select((t for t in (task, other)), ["b", "a"])) == ["b", "a"]
  assert names(mv.remove((t for t in (task, other)), "b")) == ["a"]
  assert names(mv.rename((t for t in (task, other)), "a", "c")) == ["c", "b"]
  mv.save_tasks((t for t in (task, other)), tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
  mv.save_tasks(task, tmp_path / "one")
  assert [path.name for path in (tmp_path / "one").iterdir()] == ["a"]
  for parents in (task, [task], (t for t in [task]), {"a": task}):
    spec = random_task(small, "c", attends_to=parents).spec
    assert (spec.attends_to, spec.parent_digests) == (("a",), (task.digest,))
  assert random_task(small, "c", attends_to="a").spec.attends_to == ("a",)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda a, slots: 3, "type int, expected a Task, a sequence or generator"),
    (lambda a, slots: "a", "type str, expected a Task"),
    (lambda a, slots: None, "type NoneType, expected a Task"),
    (lambda a, slots: [a, "b"], "entry 1 of the tasks is of type str"),
    (lambda a, slots: [[a]], "entry 0 of the tasks is of type list"),
    (lambda a, slots: {"b": a}, "has 'a' under the key 'b'"),
  ],
)
def test_values_that_are_no_tasks_are_refused(
  small, task, images, tmp_path, make, message
):
  slots = mv.fill_slots(small, task)
  calls = [
    lambda tasks: mv.forward(small, tasks, images),
    lambda tasks: mv.read(small, tasks, None),
    lambda tasks: mv.fill_slots(small, tasks),
    lambda tasks: mv.concatenate(tasks),
    lambda tasks: mv.select(tasks, ["a"]),
    lambda tasks: mv.remove(tasks, "a"),
    lambda tasks: mv.rename(tasks, "a", "c"),
    lambda tasks: mv.save_tasks(tasks, tmp_path / "none"),
  ]
  for call in calls:
    with pytest.raises(TaskError, match=message) as error:
      call(make(task, slots))
    assert "\n" not in str(error.value)
  assert not (tmp_path / "none").exists()


def test_unusable_slots_names_and_parents_are_refused(small, task, tmp_path):
  with pytest.raises(TaskError, match="type Slots, expected a Task"):
    mv.concatenate(mv.fill_slots(small, task))
  with pytest.raises(TaskError, match="'names' is of type int"):
    mv.select([task], 3)
  with pytest.raises(TaskError, match="expected one Task .save_tasks"):
    mv.save_task([task], tmp_path / "a")
  for parents, message in [(3, "is of type int"), ([3], "has an entry of")]:
    with pytest.raises(TaskError, match=f"'c': attends_to {message}"):
      mv.init_task(
        jax.random.key(0), small, name="c", num_classes=2, attends_to=parents
      )


def test_values_that_are_no_keys_are_refused(small):
  new = {"name": "a", "num_classes": 2}
  for key in (0, None, np.float32(1), jax.random.split(jax.random.key(0))):
    with pytest.raises(mv.MemoryVitError, match=r"jax\.random\.key\(0\)"):
      mv.init_task(key, small, **new)
    with pytest.raises(mv.MemoryVitError, match=r"jax\.random\.key\(0\)"):
      mv.random_backbone("Micro/4", image_size=8, key=key)
  mv.init_task(jax.random.PRNGKey(0), small, **new)  # the older form


def test_programs_of_users_make_tasks(small, monkeypatch):
  """Of a key that is traced, and of one that is not; they round as they do."""
  monkeypatch.delenv("XLA_FLAGS", raising=False)  # which choose the level

  def params(key):
    new = {"name": "a", "num_classes": 2, "regime": "cls+memory+side"}
    return mv.init_task(key, small, **new).params

  key = jax.random.key(1)
  alone = params(key)
  for found in (
    jax.jit(params)(key),
    jax.jit(lambda: params(key))(),
    jax.tree.map(lambda a: a[0], jax.vmap(params)(key[None])),
  ):
    for a, b in zip(
      jax.tree.leaves(found), jax.tree.leaves(alone), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-6)
  shapes = jax.eval_shape(params, key)
  assert jax.tree.map(jnp.shape, alone) == jax.tree.map(jnp.shape, shapes)


# Trees of arrays.


def test_tasks_slots_and_backbones_are_arguments(small, task, images):
  """Of compiled functions, which are traced again for other specs alone."""
  traced = []

  @jax.jit
  def logits(backbone, tasks, images):
    traced.append(1)
    return mv.forward(backbone, tasks, images)

  child = random_task(small, "b", seed=1, attends_to=task)
  expected = mv.forward(small, [task, child], images)
  # The digest of a traced parent is unknown.
  found = logits(small, [task, child], images)
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
  assert len(traced) == 1
  other = dataclasses.replace(
    random_task(small, "a", seed=5), provenance={"metrics": {"top1": 0.5}}
  )
  again = mv.Backbone(small.config, small.params, small.fingerprint)
  changed = logits(again, [other, child], images)
  assert len(traced) == 1
  assert not np.allclose(changed["a"], found["a"])
  with pytest.raises(TaskError, match="trained with another version"):
    mv.forward(small, [other, child], images)
  logits(small, [random_task(small, "c"), task], images)
  assert len(traced) == 2
  slots = [mv.fill_slots(small, t) for t in (task, other)]
  for one, name in zip(slots, (found, changed), strict=True):
    out = logits(small, one, images)["a"]
    np.testing.assert_allclose(out, name["a"], rtol=1e-5, atol=1e-5)
  assert len(traced) == 3


def test_tasks_are_results(task):
  task = dataclasses.replace(task, provenance={"metrics": {"top1": 0.5}})
  digest = task.digest
  doubled = jax.jit(lambda t: jax.tree.map(lambda a: 2 * a, t))(task)
  assert isinstance(doubled, mv.Task)
  assert doubled.spec == task.spec
  assert np.array_equal(doubled.params["cls"], 2 * task.params["cls"])
  # Neither the digest nor the metrics are of the old parameters.
  assert doubled.digest != digest == task.digest
  assert (doubled.provenance, task.provenance["metrics"]["top1"]) == ({}, 0.5)
  halved = jax.tree.map(lambda a: a / 2, doubled)
  assert halved.digest == digest
  gradient = jax.grad(lambda t: (t.params["cls"] ** 2).sum())(task)
  assert np.array_equal(gradient.params["cls"], 2 * task.params["cls"])


def test_copies_keep_everything(small, task):
  task = dataclasses.replace(task, provenance={"metrics": {"top1": 0.5}})
  digest = task.digest
  for copied in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
    assert (copied.spec, copied.digest) == (task.spec, digest)
    assert copied.provenance == task.provenance
  slots = pickle.loads(pickle.dumps(mv.fill_slots(small, task)))
  assert slots.specs == (task.spec,)
  assert copy.deepcopy(small).fingerprint == small.fingerprint


# First steps of users.


def test_task_is_found_by_its_name(small, task, images):
  other = random_task(small, "b", seed=1)
  tasks = mv.concatenate(task, other)
  assert tasks["b"] is other
  assert tasks[0] is task
  assert tasks == (task, other)
  with pytest.raises(TaskError, match=r"no task 'c' among \['a', 'b'\]"):
    tasks["c"]
  # A tree for JAX like any tuple, with the same tasks afterwards.
  doubled = jax.jit(lambda t: jax.tree.map(lambda a: 2 * a, t))(tasks)
  assert np.array_equal(doubled["b"].params["cls"], 2 * other.params["cls"])
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tasks)]
  assert jax.tree_util.keystr(paths[0]).startswith("[0]")
  found = jax.jit(mv.forward)(small, tasks, images)
  expected = mv.forward(small, [task, other], images)
  np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-5, atol=1e-5)
  for copied in (copy.deepcopy(tasks), pickle.loads(pickle.dumps(tasks))):
    assert copied["b"].digest == other.digest
  assert mv.select(tasks, "b")["b"] is other


def test_several_tasks_are_renamed_at_once(small, task):
  b = random_task(small, "b", attends_to=task)
  swapped = mv.rename([task, b], {"a": "b", "b": "a"})
  assert [t.name for t in swapped] == ["b", "a"]
  assert swapped[1].spec.attends_to == ("b",)
  with pytest.raises(TaskError, match="no task 'c' among"):
    mv.rename([task, b], {"a": "x", "c": "y"})


def test_a_saved_task_has_the_format_of_its_name(small, task, tmp_path):
  mv.save_task(task, tmp_path / "a.safetensors")
  mv.save_task(task, tmp_path / "a")
  assert (tmp_path / "a.safetensors").is_file()
  for path in tmp_path.iterdir():
    assert mv.load_task(path, small).digest == task.digest


def test_an_array_of_images_is_several_images(task):
  pixels = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), np.uint8)
  for form in (pixels, jnp.asarray(pixels)):
    found = mv.preprocess(form, task)
    assert np.array_equal(found, mv.preprocess(list(pixels), task))
  with pytest.raises(DataError, match="image 0, float32"):
    mv.preprocess(pixels.astype(np.float32), task)


def test_tasks_that_were_prepared_differently_name_the_remedy(small, task):
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  other = random_task(small, "b", preprocessing=central)
  with pytest.raises(
    TaskError, match="preprocessing=OTHER_TASK.spec.preprocessing"
  ) as error:
    mv.concatenate(task, other)
  assert "init_task" in str(error.value)
  remedied = random_task(small, "c", preprocessing=other.spec.preprocessing)
  assert len(mv.concatenate(other, remedied)) == 2


def test_the_module_takes_tasks(small, task, images):
  params = {"backbone": small.params, "tasks": {"a": task.params}}
  variables = {"params": params}
  apply = jax.jit(
    lambda module: module.apply(variables, images), static_argnums=0
  )
  found = apply(mv.MemoryViT(small.config, (task,)))
  for specs in ((task.spec,), task, [task]):
    module = mv.MemoryViT(small.config, specs)
    assert np.array_equal(apply(module)["a"], found["a"])
    assert hash(module) == hash(mv.MemoryViT(small.config, (task.spec,)))
  with pytest.raises(TaskError, match="specs has an entry of type str"):
    mv.MemoryViT(small.config, ("a",))


def test_the_package_lists_its_names_alone():
  assert set(dir(mv)) == {*mv.__all__, "__version__"}
  for name in mv.__all__:
    assert re.search(rf"\b{name}\b", mv.__doc__), name


# Representations.


def test_representations_fit_on_a_screen(small, task):
  def named(i):
    names = (f"class {i}",) * 3
    spec = dataclasses.replace(task.spec, name="x" * 60 + str(i))
    return mv.Task(dataclasses.replace(spec, class_names=names), task.params)

  many = [named(i) for i in range(20)]
  child = random_task(small, "child", attends_to=many)
  slots = mv.fill_slots(small, [*many, child])
  shown = {"task": task, "child": child, "slots": slots, "backbone": small}
  for name, value in shown.items():
    text = repr(value)
    assert len(text) < 900, name
    assert "array" not in text.lower()
    assert "\n" not in text
    assert small.fingerprint[:12] in text
    assert small.fingerprint[:13] not in text
    assert small.config.variant in text
    assert "8 px" in text
  assert "16,295 parameters" in repr(tiny_backbone())
  assert repr(task).startswith("Task('a', 3 classes, 2 cells, memory_masked, ")
  assert "195 parameters" in repr(task)
  assert f"attends to {many[0].name}, {many[1].name}" in repr(child)
  assert "and 12 more" in repr(child)
  assert repr(slots).startswith("Slots(21 tasks: xxx")
  assert "class 1" not in repr(many[1].spec)
  assert task.name == "a"
  # Also with other leaves, from a tree operation.
  assert repr(jax.tree.map(np.shape, task)).startswith("Task('a'")
  assert repr(jax.tree.map(lambda _: None, task)).startswith("Task('a'")


def functions():
  """All public functions, and the methods of `MemoryViT`."""
  found = {n: getattr(mv, n) for n in mv.__all__}
  found = {n: f for n, f in found.items() if inspect.isfunction(f)}
  for name in ("__call__", "encode", "read"):
    found[f"MemoryViT.{name}"] = getattr(mv.MemoryViT, name)
  return found


@pytest.mark.parametrize("name", functions())
def test_functions_say_what_they_take(name):
  signature = inspect.signature(functions()[name])
  assert "jaxlib" not in str(signature)  # `help` shows jax.Array by its name
  doc = functions()[name].__doc__
  for parameter in signature.parameters.values():
    if name.startswith("MemoryViT") or parameter.name == "self":
      continue
    assert parameter.annotation is not parameter.empty or (
      parameter.kind is parameter.VAR_KEYWORD
    )
    assert re.search(rf"^ +\**{parameter.name}: ", doc, re.M), parameter.name
  assert signature.return_annotation is not signature.empty


def test_the_version_stands_in_one_place():
  assert re.fullmatch(r"\d+\.\d+\.\d+", mv.__version__)
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert "version" not in project["project"]
  assert "version" in project["project"]["dynamic"]
  setuptools = project["tool"]["setuptools"]
  assert setuptools["dynamic"]["version"] == {
    "attr": "memory_vit.version.__version__"
  }


def test_type_checkers_are_told_of_the_hints():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  shipped = project["tool"]["setuptools"]["package-data"]["memory_vit"]
  assert "py.typed" in shipped
  assert (ROOT / "memory_vit" / "py.typed").is_file()


def test_no_public_name_is_that_of_a_module():
  """Importing the module would replace the function."""
  modules = {path.stem for path in (ROOT / "memory_vit").glob("*.py")}
  assert not modules & set(mv.__all__)
