"""`inspect` describes backbones and tasks as their files are."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, edit_task, random_task, tiny_backbone
from kinds_of_tasks import tasks_of_kinds

import memory_vit as mv
from memory_vit.backbones import describe
from memory_vit.commands import inspect
from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.tasks import manifest, store

PROVENANCE = {
  "config": {
    "data": {
      "name": "digits:5-9", "dir": "", "train": "train[:80%]",
      "validation": "train[80%:]", "test": "test",
    },
  },
  "metrics": {
    "name": "pets", "regime": "memory_masked", "learning_rate": 0.25,
    "seed": 7, "steps": 1500, "chance": 0.25, "majority": 0.375,
    "val": {"score": 0.8125, "metrics": {"top1": 0.8125}},
    "test": {"loss": None, "metrics": {"top5": 1.0}, "examples": 1234,
             "per_output": {"accuracy": [0.5, 0.75]}},
  },
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory):
  """WORKDIR/tasks with two tasks; the second attends to the first."""
  root = tmp_path_factory.mktemp("workdir") / "tasks"
  names = [*(f"pet{i}" for i in range(11)), "日"]
  pets = random_task(backbone, "pets", classes=12, cells=3, class_names=names)
  pets = dataclasses.replace(pets, provenance=PROVENANCE)
  birds = random_task(backbone, "birds", cells=0, attends_to=("pets",))
  for task in (pets, birds):
    mv.save_task(task, root / task.spec.name)
  (root / "notes.txt").write_text("no task")
  return root


@pytest.fixture
def tasks(saved, tmp_path):
  """A copy to be damaged."""
  return shutil.copytree(saved, tmp_path / "tasks")


def run(capsys, *arguments):
  """Run the command; return its status, stdout and stderr."""
  capsys.readouterr()
  status = inspect.main([str(a) for a in arguments])
  return (status, *capsys.readouterr())


def fields(text):
  """{first word: the rest} of the aligned lines."""
  lines = [re.split(r"  +", line, maxsplit=1) for line in text.splitlines()]
  return {line[0]: line[1] for line in lines if len(line) == 2}


def test_backbone_is_described(backbone, tmp_path, capsys):
  file = tmp_path / "vit.npz"
  mv.save_backbone(backbone, file)
  status, out, err = run(capsys, file)
  assert (status, err) == (0, "")
  found = fields(out)
  assert found["fingerprint"] == backbone.fingerprint
  assert found["variant"] == "width32-depth2-mlp48-heads2/2"
  assert found["shape"] == "2 blocks of width 32, 2 heads, MLP 48"
  assert found["image size"] == "8 px: 16 patches of 2 px"
  assert found["num_classes"] == "7"
  assert found["representation_size"] == "0"
  assert found["layout"] == "vit_jax, layers numbered as before Linen"
  # By hand: patches, class, 17 positions, 2 blocks, the last norm, the head.
  block = 4 * 32 + 4 * (32 * 32 + 32) + (32 * 48 + 48) + (48 * 32 + 32)
  total = (12 * 32 + 32) + 32 + 17 * 32 + 2 * block + 64 + (32 * 7 + 7)
  assert found["parameters"] == f"{total:,}"
  # Published names, whatever the numbers in the file.
  name = "Transformer/encoderblock_1/MultiHeadDotProductAttention_0/key/kernel"
  assert re.search(rf"^{name} +32 x 2 x 16 +float32$", out, re.M)
  assert set(trees.flatten(backbone.params)) < set(re.findall(r"\S+", out))


def test_backbone_is_described_as_json(tmp_path, capsys):
  backbone = tiny_backbone(representation_size=24, num_classes=0)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  status, out, _ = run(capsys, tmp_path / "vit.npz", "--json")
  found = json.loads(out)
  assert status == 0
  assert found["kind"] == "backbone"
  assert found["fingerprint"] == backbone.fingerprint
  assert found["representation_size"] == 24
  assert found["num_classes"] == 0
  assert found["parameters"] == trees.count(backbone.params)
  assert {k: v["shape"] for k, v in found["arrays"].items()} == {
    k: list(v.shape) for k, v in trees.flatten(backbone.params).items()
  }


def big_vision(backbone, stacked):
  """Arrays as big_vision publishes them, in half precision."""
  flat = {
    name: np.asarray(array, np.float16)
    for name, array in trees.flatten(backbone.params).items()
  }
  positions = flat.pop("Transformer/posembed_input/pos_embedding")
  arrays = {"pos_embedding": positions[:, 1:]}
  for name, array in flat.items():
    if stacked and "encoderblock_0/" in name:
      pair = [array, flat[name.replace("encoderblock_0/", "encoderblock_1/")]]
      arrays[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(pair)
    elif not stacked or "encoderblock_1/" not in name:
      arrays[name] = array
  return {f"params/{name}": array for name, array in arrays.items()}


@pytest.mark.parametrize(
  ("stacked", "layout"),
  [(False, "big_vision"), (True, "big_vision, blocks stacked")],
)
def test_layouts_and_types_are_those_of_the_file(
  backbone, tmp_path, stacked, layout
):
  np.savez(tmp_path / "vit.npz", **big_vision(backbone, stacked))
  report = describe.inspect_backbone(str(tmp_path / "vit.npz"))
  assert report.layout == layout
  assert {a.dtype.name for a in report.arrays.values()} == {"float16"}
  assert report.arrays.keys() == trees.flatten(backbone.params).keys()
  assert (
    report.fingerprint == mv.load_backbone(tmp_path / "vit.npz").fingerprint
  )


def test_linen_layout_and_bfloat16_are_named(backbone, tmp_path):
  flat = trees.flatten(backbone.params)
  flat["cls"] = np.asarray(flat["cls"], jnp.bfloat16)
  np.savez(tmp_path / "vit.npz", **flat)
  report = describe.inspect_backbone(str(tmp_path / "vit.npz"))
  assert report.layout == "vit_jax, layers numbered as by Linen"
  types = {name: array.dtype.name for name, array in report.arrays.items()}
  assert types.pop("cls") == "bfloat16"
  assert set(types.values()) == {"float32"}


def test_task_is_described_without_its_backbone(tasks, backbone, capsys):
  status, out, err = run(capsys, tasks / "pets")
  assert (status, err) == (0, "")
  found = fields(out)
  assert found["task"] == "pets"
  assert found["classes"] == (
    "12: pet0, pet1, pet2, pet3, pet4, pet5, pet6, pet7, pet8, pet9, and 2 "
    "more (--labels)"
  )
  assert "日" not in out
  assert found["cells"] == "3 per layer"
  assert found["preprocessing"] == "8 px, resize"
  assert found["backbone"].endswith("8 px, gelu tanh")
  assert backbone.fingerprint in out
  assert found["arrays"] == "verified"
  assert found["parameters"] == f"{32 + 2 * 3 * 32 + 32 * 12 + 12:,}"
  assert re.search(r"^memory +2 x 3 x 32  float32  [0-9a-f]{16}$", out, re.M)


def test_provenance_is_shown_as_far_as_it_is_there(tasks, capsys):
  found = fields(run(capsys, tasks / "pets")[1])
  assert found["regime"] == "memory_masked"
  assert found["learning_rate"] == "0.25"
  assert found["seed"] == "7"
  assert found["steps"] == "1,500"
  assert found["val_top1"] == "81.25 %"
  assert found["test_examples"] == "1,234"
  assert found["data"] == (
    "name 'digits:5-9', train 'train[:80%]', validation 'train[80%:]', "
    "test 'test'"
  )
  assert not {"val_score", "test_loss", "test_accuracy", "test"} & found.keys()
  assert (found["chance"], found["majority"]) == ("25.00 %", "37.50 %")
  assert found["test_top5"] == "100.00 %"  # of 12 classes
  provenance = {**PROVENANCE, "metrics": {"test": {"top5": 1.0}}}
  edit_task(tasks / "birds", lambda m: m.update(provenance=provenance))
  assert "test_top5" not in fields(run(capsys, tasks / "birds")[1])  # of 3
  edit_task(tasks / "birds", lambda m: m.update(provenance={}))
  assert fields(run(capsys, tasks / "birds")[1])["provenance"].startswith(
    "unknown"
  )
  for odd in ({"a": [1]}, {"metrics": 3}, {"config": {"data": None}}):
    edit_task(tasks / "pets", lambda m, odd=odd: m.update(provenance=odd))
    assert run(capsys, tasks / "pets")[0] == 0


def test_all_labels_are_listed_if_asked_for(tasks, capsys):
  out = run(capsys, tasks / "pets", "--labels")[1]
  assert re.search(r"^10 +pet10$", out, re.M)
  assert re.search(r"^11 +日$", out, re.M)


def test_labels_and_values_are_described(backbone, tmp_path, capsys):
  _, tags, size = tasks_of_kinds(backbone)
  made = {
    "metrics": {"chance": None, "test": {"metrics": {"map": 0.75}}, "val": 3}
  }
  mv.save_task(dataclasses.replace(tags, provenance=made), tmp_path / "tags")
  mv.save_task(size, tmp_path / "size")
  out = run(capsys, tmp_path / "tags", "--labels")[1]
  assert fields(out)["labels"] == "3: even, above 4, prime"
  assert fields(out)["test_map"] == "75.00 %"
  assert "chance" not in fields(out)
  assert re.search(r"^prime +2 +0.7$", out, re.M)
  out = run(capsys, tmp_path / "size", "--labels")[1]
  assert fields(out)["values"] == "2: angle, height"
  assert re.search(r"^height +1 +mm +2000 +0.5$", out, re.M)


def test_directory_of_tasks_is_described(tasks, capsys):
  status, out, err = run(capsys, tasks)
  assert (status, err) == (0, "")
  assert re.findall(r"^task +(.+)$", out, re.M) == ["birds", "pets"]
  assert fields(out.split("\n\n\n")[0])["attends to"] == "pets"
  found = json.loads(run(capsys, tasks, "--json")[1])
  birds, pets = found["tasks"]
  assert birds["spec"]["attends_to"] == ["pets"]
  assert birds["verified"] is True
  assert pets["provenance"] == PROVENANCE
  assert pets["spec"]["class_names"][11] == "日"
  assert pets["arrays"]["memory"]["shape"] == [2, 3, 32]


def test_task_in_one_file_is_described(tasks, backbone, tmp_path, capsys):
  file = tmp_path / "pets.safetensors"
  pets = mv.load_task(tasks / "pets", backbone)
  mv.save_task(pets, file, format="safetensors")
  found = [
    json.loads(run(capsys, path, "--json")[1]) | {"path": ""}
    for path in (file, tasks / "pets")
  ]
  assert found[0] == found[1]
  assert fields(run(capsys, file)[1])["arrays"] == "verified"


def test_arrays_are_read_without_the_backbone(tasks, backbone):
  for name in ("pets", "birds"):
    expected = trees.flatten(mv.load_task(tasks / name, backbone).params)
    found = store.read_arrays(tasks / name, manifest.read(tasks / name))
    assert found.keys() == expected.keys()
    for key, array in found.items():
      assert array.dtype == np.float32
      assert np.array_equal(array, expected[key])


def test_a_damaged_array_is_named(tasks, capsys):
  edit_task(
    tasks / "pets", lambda m: m["arrays"]["cls"].update(sha256="0" * 64)
  )
  status, out, _ = run(capsys, tasks / "pets")
  assert status == 2
  assert re.search(r"^arrays +DAMAGED: .*\['cls'\] do not match", out, re.M)
  # It hides no other task.
  status, out, _ = run(capsys, tasks, "--json")
  assert status == 2
  assert [t["verified"] for t in json.loads(out)["tasks"]] == [True, False]


def test_a_damaged_file_is_noticed(tasks, capsys):
  file = tasks / "pets" / "arrays.safetensors"
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  status, out, _ = run(capsys, tasks / "pets")
  assert status == 2
  assert "DAMAGED" in out
  assert "verified" not in out


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda m: m["spec"].update(cells=4), r"shape of memory: \(2, 3, 32\)"),
    (lambda m: m["arrays"].pop("cls"), r"missing: cls \(32,\)"),
    (lambda m: m["arrays"]["cls"].update(dtype="object"), "dtype of cls"),
    (lambda m: m["arrays"]["cls"].update(shape=[10**15]), "would take"),
    (lambda m: m["arrays"]["memory"].update(shape=[-2, 3, 32]), "memory"),
    (lambda m: m["arrays"]["memory"].update(shape=[]), "memory"),
    (lambda m: m["arrays"].update(cls=None), "arrays.cls is None"),
    (lambda m: m.update(arrays=[]), "arrays is"),
  ],
)
def test_foreign_arrays_are_reported(tasks, capsys, change, message):
  edit_task(tasks / "pets", change)
  with pytest.raises(TaskError, match=message):
    manifest.read(tasks / "pets")
  assert run(capsys, tasks / "pets")[0] == 2


def test_a_broken_task_does_not_hide_the_others(tasks, capsys):
  (tasks / "pets" / "task.json").write_text("{")
  status, out, err = run(capsys, tasks)
  assert status == 2
  assert re.findall(r"^task +(.+)$", out, re.M) == ["birds"]
  assert re.match(r"error: .*pets/task\.json is not readable as JSON", err)
  status, out, _ = run(capsys, tasks / "pets", "--json")
  assert status == 2
  assert "not readable as JSON" in json.loads(out)["error"]


def test_paths_that_are_neither_backbone_nor_task_are_refused(tmp_path, capsys):
  (tmp_path / "text.npz").write_text("no archive")
  for path, message in [
    (tmp_path / "nothing", r"is not there: expected the \.npz .* task direct"),
    (tmp_path, "is neither a task nor a directory of tasks"),
    (tmp_path / "text.npz", r"is no \.npz file"),
  ]:
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "")
    assert re.match(f"error: .*{message}", err), err


def test_extra_weights_are_refused(backbone, tmp_path, capsys):
  more = jax.tree.map(np.asarray, {**backbone.params, "more": np.zeros(3)})
  mv.save_backbone(
    dataclasses.replace(backbone, params=more), tmp_path / "a.npz"
  )
  status, _, err = run(capsys, tmp_path / "a.npz")
  assert status == 2
  assert "extra: more (3,)" in err


@pytest.mark.slow
def test_as_a_command_it_imports_nothing_heavy(saved):
  code = (
    "import sys; from memory_vit.commands import inspect; "
    f"status = inspect.main([{str(saved / 'pets')!r}, '--labels']); "
    "heavy = ('tensorflow', 'tensorflow_datasets', 'ml_collections', "
    "'sklearn', 'matplotlib'); "
    "print([m for m in heavy if m in sys.modules]); sys.exit(status)"
  )
  env = {**os.environ, "XLA_FLAGS": "", "PYTHONIOENCODING": "ascii"}
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
    text=True, check=True,
  )  # fmt: skip
  assert done.stdout.splitlines()[-1] == "[]"
  assert fields(done.stdout)["arrays"] == "verified"
  # Characters that the terminal cannot show do not stop the command.
  assert fields(done.stdout)["11"] == "\\u65e5"


def test_a_side_stream_is_named(backbone, tmp_path, capsys):
  task = random_task(backbone, "a", regime="side_masked", cells=0, side_width=4)
  mv.save_task(task, tmp_path / "a")
  assert fields(run(capsys, tmp_path / "a")[1])["side stream"] == (
    "width 4, conv"
  )
