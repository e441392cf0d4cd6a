"""Tasks are saved to the bit, and nothing else is loaded as a task."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from conftest import edit_task, random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import TaskError, TrainingError
from memory_vit.model import trees
from memory_vit.tasks import manifest as tasks_manifest

pytestmark = pytest.mark.versions


@pytest.fixture
def saved(backbone, tmp_path):
  task = random_task(
    backbone, "pets", cells=3, classes=4, class_names=("cat", "dog", "ä", "日")
  )
  task = dataclasses.replace(task, provenance={"metrics": {"top1": 0.5}})
  path = tmp_path / "tasks" / "pets"
  mv.save_task(task, path)
  return task, path


@pytest.mark.parametrize("cells", [0, 3])
def test_round_trip_is_exact(backbone, images, tmp_path, cells):
  task = random_task(backbone, "pets", cells=cells)
  mv.save_task(task, tmp_path / "pets")
  loaded = mv.load_task(tmp_path / "pets", backbone)
  assert loaded.spec == task.spec
  for name, value in trees.flatten(task.params).items():
    found = trees.flatten(loaded.params)[name]
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)
  before = mv.forward(backbone, [task], images)["pets"]
  assert np.array_equal(mv.forward(backbone, [loaded], images)["pets"], before)


def test_task_json_describes_the_task(saved, backbone):
  task, path = saved
  manifest = json.loads((path / "task.json").read_text(encoding="utf-8"))
  assert manifest["format_version"] == 2
  spec = manifest["spec"]
  assert spec["class_names"] == ["cat", "dog", "ä", "日"]
  assert spec["backbone"]["fingerprint"] == backbone.fingerprint
  assert spec["preprocessing"] == {
    "image_size": 8, "crop": "resize", "resize": 0, "interpolation": "bilinear",
  }  # fmt: skip
  assert manifest["arrays"]["memory"]["shape"] == [2, 3, 32]
  assert mv.load_task(path, backbone).provenance == task.provenance


def test_interpolation_is_kept(backbone, tmp_path):
  bicubic = mv.EvalPreprocessing(image_size=8, interpolation="bicubic")
  for preprocessing in (mv.EvalPreprocessing(image_size=8), bicubic):
    task = random_task(backbone, "pets", preprocessing=preprocessing)
    mv.save_task(task, tmp_path / preprocessing.interpolation)
    loaded = mv.load_task(tmp_path / preprocessing.interpolation, backbone)
    assert loaded.spec == task.spec
    assert loaded.spec.preprocessing == preprocessing
  written = json.loads((tmp_path / "bicubic" / "task.json").read_text())
  assert written["spec"]["preprocessing"]["interpolation"] == "bicubic"
  path = tmp_path / "bilinear"

  def lanczos(values):
    values["spec"]["preprocessing"]["interpolation"] = "lanczos\n"

  edit_task(path, lanczos)
  message = "interpolation is 'lanczos.*expected one of bilinear, bilinear_ant"
  with pytest.raises(TaskError, match=message) as error:
    mv.load_task(path, backbone)
  assert "\n" not in str(error.value)


@pytest.mark.fault("replaced-task")
def test_saving_again_replaces_as_a_whole(saved, backbone):
  _, path = saved
  other = random_task(backbone, "pets", seed=9, cells=1)
  mv.save_task(other, path)
  loaded = mv.load_task(path, backbone)
  assert loaded.spec == other.spec
  assert [p.name for p in path.parent.iterdir()] == ["pets"]


def test_irreplaceable_task_stays(saved, backbone, monkeypatch):
  """The new one is complete and cannot be moved, as on a disk that is gone."""
  task, path = saved
  rename = pathlib.Path.rename

  def fails(source, target):
    if source.name == "new":
      raise OSError("no")
    return rename(source, target)

  monkeypatch.setattr(pathlib.Path, "rename", fails)
  with pytest.raises(TrainingError, match="cannot be written: no"):
    mv.save_task(random_task(backbone, "pets", seed=9, cells=1), path)
  loaded = mv.load_task(path, backbone)
  assert loaded.spec == task.spec
  assert loaded.digest == task.digest
  assert [p.name for p in path.parent.iterdir()] == ["pets"]


@pytest.mark.fault("replaced-task")
def test_a_task_that_is_replaced_while_it_is_read_is_not_mixed(
  saved, backbone, monkeypatch
):
  """The manifest of the old one and arrays of the new one, of equal shapes."""
  task, path = saved
  other = dataclasses.replace(
    task, params=jax.tree.map(lambda a: a + 1, task.params)
  )
  read = tasks_manifest.read

  def then_replaced(path):
    found = read(path)
    context.undo()
    mv.save_task(other, path)
    return found

  with monkeypatch.context() as context:
    context.setattr(tasks_manifest, "read", then_replaced)
    with pytest.raises(TaskError, match="is damaged|missing files"):
      mv.load_task(path, backbone)
  assert mv.load_task(path, backbone).digest == other.digest


@pytest.mark.parametrize("beside_a_task", [False, True])
def test_saving_leaves_other_files_alone(saved, backbone, beside_a_task):
  task, path = saved
  path = path if beside_a_task else path.parent.parent / "mine"
  path.mkdir(exist_ok=True)
  (path / "notes.txt").write_text("mine")
  with pytest.raises(TaskError, match="unknown files .*is left as it is"):
    mv.save_task(task, path)
  assert (path / "notes.txt").read_text() == "mine"


@pytest.mark.fault("foreign-task")
@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"seed": 1}, "fingerprint"),
    ({"gelu": "exact"}, "gelu 'exact', but the task needs 'tanh'"),
    (
      {"layer_norm_epsilon": 1e-5},
      "layer_norm_epsilon 1e-05, but the task needs 1e-06",
    ),
  ],
)
def test_other_backbones_are_refused(saved, overrides, message):
  with pytest.raises(TaskError, match=message):
    mv.load_task(saved[1], tiny_backbone(**overrides))


def test_other_image_size_is_refused(saved, backbone):
  other = tiny_backbone(image_size=12)
  other = dataclasses.replace(other, fingerprint=backbone.fingerprint)
  with pytest.raises(TaskError, match="image_size 12, but the task needs 8"):
    mv.load_task(saved[1], other)


@pytest.mark.fault("foreign-task")
@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda m: m.update(format_version=1),
      "format_version 1, .* reads 2.*again",
    ),
    (lambda m: m.update(format_version=3), "by a newer version: update"),
    (lambda m: m.pop("provenance"), r"missing keys \['provenance'\]"),
    (lambda m: m.update(more=1), r"unknown keys \['more'\]"),
    (lambda m: m["spec"].pop("cells"), r"spec: missing keys \['cells'\]"),
    (lambda m: m["spec"].update(cells="3"), "spec.cells is '3', expected"),
    (lambda m: m["spec"].update(cells=True), "spec.cells is True, expected"),
    (
      lambda m: m["spec"].update(cells=4),
      "do not match the spec of the task: .*shape of memory",
    ),
    (lambda m: m["spec"].update(name="../pets"), "task name"),
    (lambda m: m["spec"]["backbone"].pop("gelu"), r"spec.backbone: missing"),
    (
      lambda m: m["arrays"].pop("memory"),
      "do not match the spec of the task: missing: memory",
    ),
    (lambda m: m["arrays"].update(cls=None), "arrays.cls is None, expected"),
    (
      lambda m: m["arrays"]["cls"].update(sha256="0" * 64),
      r"\['cls'\] do not match their SHA",
    ),
  ],
)
def test_changed_manifests_are_refused(saved, backbone, change, message):
  edit_task(saved[1], change)
  with pytest.raises(TaskError, match=message):
    mv.load_task(saved[1], backbone)


@pytest.mark.fault("damaged-task")
def test_damaged_arrays_are_never_loaded_as_something_else(
  saved, backbone, tmp_path
):
  task, path = saved
  refused = 0
  whole = (path / "arrays.safetensors").read_bytes()
  copy = shutil.copytree(path, tmp_path / "copy")
  places = range(0, len(whole), 7)
  for place in places:
    data = bytearray(whole)
    data[place] ^= 1
    (copy / "arrays.safetensors").write_bytes(data)
    try:
      loaded = mv.load_task(copy, backbone)
    except TaskError:
      refused += 1
    else:  # a space of the header
      same = jax.tree.map(np.array_equal, loaded.params, task.params)
      assert all(jax.tree.leaves(same))
  assert refused >= 0.99 * len(places)


def test_missing_or_unreadable_manifest_is_refused(backbone, tmp_path):
  with pytest.raises(TaskError, match=r"no task\.json"):
    mv.load_task(tmp_path, backbone)
  (tmp_path / "task.json").write_text("{")
  with pytest.raises(TaskError, match="not readable as JSON"):
    mv.load_task(tmp_path, backbone)


def test_a_task_that_reads_another_prepares_images_as_that_one():
  """So the two share a pass without further options."""
  backbone = tiny_backbone(depth=1)
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  new = {"num_classes": 2, "cells": 1}
  first = mv.init_task(
    jax.random.key(0), backbone, name="a", preprocessing=central, **new
  )
  for parents in (first, ["c", first]):
    second = mv.init_task(
      jax.random.key(1), backbone, name="b", attends_to=parents, **new
    )
    assert second.spec.preprocessing == central
  assert mv.concatenate(
    first,
    mv.init_task(
      jax.random.key(1), backbone, name="b", attends_to=first, **new
    ),
  )
  # Of a mere name nothing is known; an explicit preprocessing counts.
  resized = mv.EvalPreprocessing(image_size=8)
  for options in ({"attends_to": "a"}, {"attends_to": first,
                                        "preprocessing": resized}):  # fmt: skip
    other = mv.init_task(
      jax.random.key(1), backbone, name="b", **options, **new
    )
    assert other.spec.preprocessing == resized


@pytest.mark.parametrize("value", [-1, 2.5, True, "3", None])
def test_sizes_that_are_no_whole_numbers_are_refused(backbone, saved, value):
  for key in ("num_classes", "bottleneck", "side_width"):
    sizes = {"num_classes": 3, key: value}
    with pytest.raises(TaskError, match=f"{key} is .*, expected .*at least"):
      mv.init_task(jax.random.key(0), backbone, name="a", **sizes)
  task, _ = saved
  for key in ("slots", "cells", "classes"):
    with pytest.raises(TaskError, match=f"{key} is .*, expected .*at least 0"):
      mv.fill_slots(backbone, task, **{key: value})
  size = np.int64(3)  # of NumPy is one, too
  mv.init_task(jax.random.key(0), backbone, name="a", num_classes=size)


def test_new_tasks_start_as_the_paper_says():
  backbone = tiny_backbone(width=64, depth=3)
  task = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=200
  )
  assert np.array_equal(task.params["cls"], backbone.params["cls"][0, 0])
  assert not np.any(task.params["head"]["kernel"])
  memory = np.asarray(task.params["memory"])
  assert memory.shape == (3, 200, 64)
  assert abs(memory.std() - 0.02) < 5e-4
  assert abs(memory.mean()) < 5e-4
  wide = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=200,
    memory_std=1.0,
  )  # fmt: skip
  np.testing.assert_allclose(wide.params["memory"], 50 * memory, rtol=1e-5)
  with pytest.raises(TaskError, match="memory_std is -1, expected a finite"):
    mv.init_task(
      jax.random.key(0), backbone, name="a", num_classes=3, memory_std=-1
    )
  drawn = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cls_init="normal"
  )
  assert not np.array_equal(drawn.params["cls"], task.params["cls"])
  with pytest.raises(TaskError, match="cls_init is 'zeros'"):
    mv.init_task(
      jax.random.key(0), backbone, name="a", num_classes=3, cls_init="zeros"
    )
