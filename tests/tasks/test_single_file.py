"""A task in one .safetensors file: the same task, and nothing else."""

import errno
import json
import os
import pathlib

import numpy as np
import PIL.Image
import pytest
import safetensors
import safetensors.numpy
from conftest import random_task, tiny_backbone
from memory import peak_rss, start_rss

import memory_vit as mv
from memory_vit.commands import predict
from memory_vit.errors import MemoryVitError, TaskError, TrainingError
from memory_vit.model import trees
from memory_vit.model.regimes import REGIMES
from memory_vit.tasks import array_files, find, manifest, store

FORMAT = "safetensors"


@pytest.fixture
def task(backbone):
  return random_task(
    backbone, "pets", cells=3, class_names=("cat", "dog", "日")
  )


@pytest.fixture
def file(task, tmp_path):
  path = tmp_path / "pets.safetensors"
  mv.save_task(task, path, format=FORMAT)
  return path


def with_header(file, change):
  """Write the file again with another header, whose length fits."""
  content = file.read_bytes()
  length = int.from_bytes(content[:8], "little")
  header = json.loads(content[8 : 8 + length])
  change(header)
  text = json.dumps(header).encode()
  file.write_bytes(
    len(text).to_bytes(8, "little") + text + content[8 + length :]
  )


def assert_same(found, task):
  assert found.spec == task.spec
  assert found.digest == task.digest
  expected = trees.flatten(task.params)
  for name, array in trees.flatten(found.params).items():
    assert np.asarray(array).tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("regime", REGIMES)
def test_round_trip_is_exact(backbone, tmp_path, regime):
  kind = REGIMES[regime]
  options = {"bottleneck": 4} if "bottleneck" in kind.fields else {}
  cells = 3 if kind.has("memory") else 0
  task = random_task(backbone, "a", cells=cells, regime=regime, **options)
  mv.save_task(task, tmp_path / "a.safetensors", format=FORMAT)
  assert_same(mv.load_task(tmp_path / "a.safetensors", backbone), task)


def test_both_formats_hold_the_same_task(backbone, task, file, tmp_path):
  mv.save_task(task, tmp_path / "pets")
  from_directory = mv.load_task(tmp_path / "pets", backbone)
  assert_same(mv.load_task(file, backbone), from_directory)


def test_a_text_of_many_escapes_is_read_again(backbone, tmp_path):
  """In the header each quote of a name is escaped twice."""
  names = tuple('"' * 2_900 + str(i) for i in range(1_000))
  task = random_task(backbone, "a", classes=1_000, class_names=names)
  path = tmp_path / "a.safetensors"
  mv.save_task(task, path, format=FORMAT)
  length = int.from_bytes(path.read_bytes()[:8], "little")
  assert length > manifest.MAX_FILE_BYTES + array_files.MAX_HEADER_BYTES
  assert_same(mv.load_task(path, backbone), task)


def test_a_task_that_is_cut_off_leaves_the_older_one(
  backbone, file, monkeypatch
):
  before, write = file.read_bytes(), pathlib.Path.write_bytes

  def cut(path, content):
    write(path, content[:100])
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(pathlib.Path, "write_bytes", cut)
  with pytest.raises(TrainingError, match="cannot be written"):
    mv.save_task(random_task(backbone, "other"), file, format=FORMAT)
  assert file.read_bytes() == before
  assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_others_can_read_the_arrays(task, file):
  """With the library of safetensors alone."""
  found = safetensors.numpy.load_file(file)
  expected = trees.flatten(task.params)
  assert found.keys() == expected.keys()
  for name, array in found.items():
    np.testing.assert_array_equal(array, expected[name])
  with safetensors.safe_open(file, "numpy") as opened:
    values = json.loads(opened.metadata()["memory_vit.task"])
  assert values["spec"]["name"] == "pets"


def test_file_is_little_larger_than_its_arrays(task, file):
  arrays = sum(a.nbytes for a in trees.flatten(task.params).values())
  assert file.stat().st_size < arrays + 10_000


def test_another_backbone_is_refused(file):
  with pytest.raises(TaskError, match="another backbone"):
    mv.load_task(file, tiny_backbone(seed=1))


def test_sets_of_files(backbone, task, tmp_path):
  child = random_task(backbone, "child", attends_to=[task])
  mv.save_tasks([task, child], tmp_path / "set", format=FORMAT)
  names = sorted(path.name for path in (tmp_path / "set").iterdir())
  assert names == ["child.safetensors", "pets.safetensors"]
  found = mv.load_tasks(tmp_path / "set", backbone)
  assert [t.name for t in found] == ["child", "pets"]
  # A parent is found beside its child.
  paths = [tmp_path / "set" / "child.safetensors"]
  beside = tmp_path / "set" / "pets.safetensors"
  assert find.ancestor_directories(paths) == [beside]
  with pytest.raises(TaskError, match="holds other tasks"):
    mv.save_tasks([task], tmp_path / "set")


def test_commands_accept_a_task_in_one_file(backbone, file, tmp_path, capsys):
  mv.save_backbone(backbone, tmp_path / "b.npz")
  image = tmp_path / "image.png"
  pixels = np.full((8, 8, 3), 99, np.uint8)
  PIL.Image.fromarray(pixels).save(image)
  argv = [f"--backbone={tmp_path / 'b.npz'}", f"--task={file}", str(image)]
  assert predict.main(argv) == 0
  assert "pets" in capsys.readouterr().out
  report = store.inspect_task(file)
  assert (report.spec.name, report.damage) == ("pets", "")


@pytest.mark.parametrize(
  ("name", "format", "message"),
  [
    ("pets", FORMAT, "ends in .safetensors"),
    ("pets.safetensors", "directory", "ends in .safetensors"),
    ("pets.npz", "npz", "expected 'directory' or 'safetensors'"),
  ],
)
def test_contradictory_names_and_formats_are_refused(
  task, tmp_path, name, format, message
):
  with pytest.raises(TaskError, match=message):
    mv.save_task(task, tmp_path / name, format=format)
  assert not list(tmp_path.iterdir())


def test_save_refuses_foreign_directory(task, tmp_path):
  (tmp_path / "a.safetensors").mkdir()
  with pytest.raises(TaskError, match="is not a file: expected"):
    mv.save_task(task, tmp_path / "a.safetensors", format=FORMAT)


def test_a_file_that_is_given_may_be_a_link(backbone, task, file, tmp_path):
  """As in the cache of a hub."""
  (tmp_path / "cache").mkdir()
  link = tmp_path / "cache" / "pets.safetensors"
  link.symlink_to(file)
  assert_same(mv.load_task(link, backbone), task)
  with pytest.raises(TaskError, match="is a link"):  # nobody has named it
    mv.load_tasks(tmp_path / "cache", backbone)


@pytest.mark.fault("damaged-safetensors")
def test_no_changed_byte_is_accepted(backbone, task, file):
  """Many bytes of the header, and of the arrays."""
  content = file.read_bytes()
  header = 8 + int.from_bytes(content[:8], "little")
  rng = np.random.default_rng(0)
  places = [*range(0, header, 5), *rng.integers(header, len(content), 100)]
  accepted, messages = 0, []
  for place in places:
    changed = bytearray(content)
    changed[place] ^= 1 << int(rng.integers(8))
    file.write_bytes(changed)
    try:
      assert_same(mv.load_task(file, backbone), task)
      accepted += 1  # as an escape that stands for the same letter
    except TaskError as error:
      messages.append(str(error))
  assert max(map(len, messages)) <= 2_000
  assert accepted <= len(places) // 100


@pytest.mark.fault("damaged-safetensors")
def test_no_other_length_is_accepted(backbone, file):
  content = file.read_bytes()
  for changed in (
    b"", content[:4], content[:8], content[:100], content[:-1],
    content + b"\0", content[8:], b"\xff" * 8 + content[8:],
  ):  # fmt: skip
    file.write_bytes(changed)
    with pytest.raises(TaskError, match=str(file)):
      mv.load_task(file, backbone)


@pytest.mark.fault("damaged-safetensors")
@pytest.mark.parametrize(
  "change",
  [
    lambda header: header.pop("cls"),
    lambda header: header.update(more=header["cls"]),
    lambda header: header["cls"].update(dtype="F16"),
    lambda header: header["cls"].update(shape=[2, 16]),
    lambda header: header["memory"].update(shape=[2**40, 2**40]),
    lambda header: header["cls"].update(data_offsets=[0, 2**62]),
    lambda header: header["cls"].update(
      data_offsets=header["memory"]["data_offsets"]
    ),
    lambda header: header.pop("__metadata__"),
    lambda header: header.update(__metadata__={"memory_vit.task": "[" * 9_999}),
    lambda header: header.update(__metadata__={"memory_vit.task": 3}),
  ],
)
def test_no_other_header_is_accepted(backbone, file, change):
  with_header(file, change)
  with pytest.raises(TaskError) as caught:
    mv.load_task(file, backbone)
  assert len(str(caught.value)) <= 2_000


@pytest.mark.fault("damaged-safetensors")
def test_an_endless_header_is_not_read(backbone, file):
  with file.open("r+b") as opened:
    opened.write((2**26).to_bytes(8, "little"))
    opened.truncate(2**27)
  before = start_rss()
  with pytest.raises(TaskError, match="its header has 67108864 bytes. Exp"):
    mv.load_task(file, backbone)
  assert peak_rss() - before < 2**25


@pytest.mark.fault("damaged-safetensors")
def test_foreign_arrays_are_refused(backbone, task, file):
  with safetensors.safe_open(file, "numpy") as opened:
    metadata = opened.metadata()
  flat = {k: np.asarray(v) for k, v in trees.flatten(task.params).items()}
  flat["more"] = np.zeros(3, np.float32)
  safetensors.numpy.save_file(flat, file, metadata)
  with pytest.raises(TaskError, match=r"more is \('F32', \[3\]\)"):
    mv.load_task(file, backbone)


def test_task_may_have_the_name_arrays(backbone, tmp_path):
  """Like the file of arrays in the directory of a task."""
  tasks = [random_task(backbone, name) for name in ("arrays", "pets")]
  mv.save_tasks(tasks, tmp_path / "set", format=FORMAT)
  found = mv.load_tasks(tmp_path / "set", backbone)
  assert [task.name for task in found] == ["arrays", "pets"]


@pytest.mark.fault("damaged-safetensors")
def test_special_files_as_tasks_are_never_read(backbone, tmp_path):
  os.mkfifo(tmp_path / "pipe.safetensors")
  (tmp_path / "directory.safetensors").mkdir()
  (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
  for name in ("pipe", "directory", "zero", "absent"):
    with pytest.raises(MemoryVitError, match="is not a (task|regular file)"):
      mv.load_task(tmp_path / f"{name}.safetensors", backbone)
