"""What strangers can send: every trick is refused, and costs no memory."""

import contextlib
import io
import json
import os
import re
import shutil
import struct
import sys
import time
import tracemalloc
import zipfile
import zlib

import fake_data
import jax
import mutations
import numpy as np
import pytest
from conftest import edit_task, random_task, tiny_backbone

import memory_vit as mv
from memory_vit import (
  adapters,
  array_files,
  commands,
  compose,
  evaluate,
  inspect,
  manifest,
  npz,
  pictures,
  predict,
  results,
  trees,
)
from memory_vit.errors import CheckpointError, TaskError

SMALL = 8 * 2**20  # bytes that a refusal may take


def peak_of(call, error) -> tuple[str, int]:
  """What a call says that must be refused, and the bytes that it took."""
  tracemalloc.start()
  try:
    with pytest.raises(error) as caught:
      call()
    return str(caught.value), tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


# .npz files.


def npy(shape, descr="<f4", values=b"", version=1) -> bytes:
  """An .npy file whose header says anything."""
  out = io.BytesIO()
  header = {"descr": descr, "fortran_order": False, "shape": shape}
  if version == 1:
    np.lib.format.write_array_header_1_0(out, header)
  else:
    np.lib.format.write_array_header_2_0(out, header)
  return out.getvalue() + values


@pytest.fixture
def archive(tmp_path):
  """Writes the file of a backbone, with entries replaced or added."""
  whole = {
    f"{name}.npy": npy(array.shape, values=array.tobytes())
    for name, array in trees.flatten(tiny_backbone().params).items()
  }

  def write(method=zipfile.ZIP_DEFLATED, **changed):
    file = tmp_path / "vit.npz"
    entries = {**whole, **changed.pop("entries", {})}
    with zipfile.ZipFile(file, "w", method) as out:
      for name, content in entries.items():
        out.writestr(name, content)
    return file

  return write


def test_the_fixture_is_a_backbone(archive, backbone):
  assert mv.load_backbone(archive()).fingerprint == backbone.fingerprint
  older = npy((1, 1, 32), values=backbone.params["cls"].tobytes(), version=2)
  file = archive(entries={"cls.npy": older})
  assert mv.load_backbone(file).fingerprint == backbone.fingerprint


@pytest.mark.parametrize(
  ("entry", "message"),
  [
    (npy((10**12,)), r"header says \(1000000000000,\) of float32, 4,000,000,0"),
    (npy((2**62, 4)), "header says"),
    (npy((-1, -8), values=bytes(32)), "its shape is"),
    (npy((1, 1, 31), values=bytes(128)), "124 bytes, and there are 128"),
    (npy((1, 1, 32), values=bytes(124)), "128 bytes, and there are 124"),
    (npy((32,), "|O", bytes(256)), "it is object, expected a float"),
    (npy((32,), [("a", "|O")], bytes(256)), "expected a float"),
    (npy((16,), "<c8", bytes(128)), "it is complex64, expected a float"),
    (npy((32,), "<i4", bytes(128)), "it is int32, expected a float"),
    (npy((32,), "|V0"), "expected a float"),
    (b"\x93NUMPY\x03\x00" + npy((32,))[8:], r"format \(3, 0\)"),
    (npy((32,)).replace(b"(32,)", b"(32L,"), "cannot be read"),
    (npy((32,)).replace(b"(32,)", b"open("), "cannot be read"),
    (b"", "cannot be read"),
    (npy((2,), values=b"\0\0\x80\x7f" * 2), "values that are not finite"),
    (npy((1,), values=b"\0\0\xc0\x7f"), "values that are not finite"),
  ],
)
def test_entries_that_lie(archive, entry, message):
  file = archive(entries={"cls.npy": entry})
  said, peak = peak_of(lambda: mv.load_backbone(file), CheckpointError)
  assert "vit.npz: entry 'cls'" in said
  assert re.search(message, said)
  assert peak < SMALL


def test_a_bomb_is_never_unpacked(archive, monkeypatch):
  """67 kB that would be 67 MB."""
  zeros = npy((2**24,), values=bytes(2**26))
  file = archive(entries={"more.npy": zeros})
  del zeros
  assert file.stat().st_size < 200_000
  began = time.perf_counter()
  said, peak = peak_of(lambda: mv.load_backbone(file), CheckpointError)
  assert "would be 67," in said
  assert "100 times as many" in said
  assert peak < SMALL
  assert time.perf_counter() - began < 5
  monkeypatch.setattr(npz, "MAX_RATIO", 10**6)
  monkeypatch.setattr(npz, "MAX_BYTES", 2**25)
  with pytest.raises(CheckpointError, match="expected at most 33,554,432"):
    mv.load_backbone(file)


@pytest.mark.parametrize(
  "name",
  ["../x.npy", "a/../../x.npy", "/etc/x.npy", "./x.npy", "a//x.npy", "a/.npy",
   "C:\\x.npy", "a\\x.npy", "c:x.npy", "a\nx.npy", "a\0x.npy", "x.txt", "x",
   ".npy", "..npy"],
)  # fmt: skip
def test_names_that_could_be_paths(archive, name):
  if "\0" not in name:
    file = archive(entries={name: b""})
  else:  # zipfile would not write it
    file = archive(entries={"a_x.npy": b""})
    file.write_bytes(file.read_bytes().replace(b"a_x.npy", b"a\0x.npy"))
  with pytest.raises(CheckpointError, match="no array|no name of an array"):
    mv.load_backbone(file)


def test_other_ways_to_pack(archive, monkeypatch):
  for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
    with pytest.raises(CheckpointError, match=f"by method {method}, expected"):
      mv.load_backbone(archive(method))
  monkeypatch.setattr(npz, "MAX_ENTRIES", 5)
  with pytest.raises(CheckpointError, match="entries, expected at most 5"):
    mv.load_backbone(archive())


def test_an_encrypted_entry(archive):
  file = archive()
  content = bytearray(file.read_bytes())
  content[content.index(b"PK\x01\x02") + 8] |= 1
  file.write_bytes(content)
  with pytest.raises(CheckpointError, match="cannot be read: .*encrypted"):
    mv.load_backbone(file)


# Directories of tasks.


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "pets"
  task = random_task(backbone, "pets", class_names=("cat", "dog", "日"))
  mv.save_task(task, path)
  return path


@pytest.fixture
def pets(saved, tmp_path):
  """A saved task, to be spoilt."""
  return shutil.copytree(saved, tmp_path / "tasks" / "pets")


def refusal(path, backbone) -> str:
  with pytest.raises(TaskError) as caught:
    mv.load_task(path, backbone)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def resign(path) -> None:
  """Makes the digests of the files fit, as whoever changed them can."""

  def change(values):
    files = mutations.read_files(path / "arrays")
    values["files"] = {k: array_files.sha256(v) for k, v in files.items()}

  edit_task(path, change)


@pytest.mark.parametrize(
  "change",
  [
    lambda spec: spec.update(name="cats"),
    lambda spec: spec.update(memory_norm=False),
    lambda spec: spec.update(class_names=["dog", "cat", "日"]),
    lambda spec: spec["evaluation"].update(crop="central", resize=9),
    lambda spec: spec["backbone"].update(variant="B/32"),
  ],
)
def test_no_word_of_the_spec_changes_unnoticed(pets, backbone, change):
  values = json.loads((pets / "task.json").read_text())
  change(values["spec"])
  (pets / "task.json").write_text(json.dumps(values))
  assert "task.json was changed after it was" in refusal(pets, backbone)


def test_order_and_spaces_of_json_are_free(pets, backbone):
  values = json.loads((pets / "task.json").read_text())
  backwards = dict(reversed(values.items()))
  (pets / "task.json").write_text(json.dumps(backwards, indent=7))
  assert mv.load_task(pets, backbone).spec.name == "pets"


NAMES = ["", "../x", "/etc/x", "x/y", "x\\y", "..", ".x", "-x", "_x", "X",
         "x y", "x\0y", "x\n", "a" * 65, "a" * 300, "CON", "pеts", "ｐｅｔｓ",
         "é", "backbone"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_none(pets, backbone, name):
  with pytest.raises(TaskError, match="task name"):
    random_task(backbone, name)
  edit_task(pets, lambda m: m["spec"].update(name=name))
  assert "task.json: spec: task name" in refusal(pets, backbone)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_names_of_parents_that_are_none(pets, backbone, name):
  edit_task(pets, lambda m: m["spec"].update(attends_to=[name]))
  assert "which is no task name" in refusal(pets, backbone)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda m: m["spec"].update(num_classes=10**30, class_names=[]),
     "spec.num_classes is"),
    (lambda m: m["spec"].update(bottleneck=10**30, regime="adapter", cells=0),
     "spec.bottleneck is"),
    (lambda m: m["spec"]["evaluation"].update(image_size=10**6)
     or m["spec"]["backbone"].update(image_size=10**6), "at most 4096 pixels"),
    (lambda m: m["spec"]["evaluation"].update(crop="central", resize=10**6),
     "at most 4096 pixels"),
    (lambda m: m["spec"]["backbone"].update(fingerprint="x"), "of 64 digits"),
    (lambda m: m["spec"].update(attends_to=["a"], parent_digests=["x"]),
     "parent_digests[0] is 'x', expected a SHA-256"),
    (lambda m: m["spec"].update(regime="none"), "spec: regime is 'none'"),
    (lambda m: m["spec"]["evaluation"].update(crop="none"),
     "spec.evaluation: evaluation preprocessing: crop 'none'"),
    (lambda m: m["arrays"]["memory"].update(shape=[10**9, 10**9]),
     "the arrays would take 4000000000000"),
    (lambda m: m["arrays"]["memory"].update(shape=[10**30, 0, 32]),
     "the arrays would take"),
    (lambda m: m["arrays"]["memory"].update(shape=[1] * 9), "the shape of mem"),
    (lambda m: m["arrays"]["cls"].update(dtype="object"), "dtype of cls"),
    (lambda m: m["arrays"]["cls"].update(dtype="x" * 9000), "dtype of cls"),
    (lambda m: m["arrays"]["cls"].update(sha256="0"), "of 64 digits"),
    (lambda m: m["arrays"].update({"../x": m["arrays"]["cls"]}), "is no name"),
    (lambda m: m["arrays"].update(
      {f"x{i}": m["arrays"]["cls"] for i in range(5000)}), "at most 4096"),
    (lambda m: m["files"].update({"../task.json": "0" * 64}), "is no name"),
    (lambda m: m["files"].update({"/etc/passwd": "0" * 64}), "is no name"),
    (lambda m: m["files"].update({"x": 1}), "files.x is 1, expected a SHA"),
    (lambda m: m.update(files=[]), "files is"),
    (lambda m: m.update(provenance=[]), "provenance is"),
    (lambda m: m.update(provenance={"a": "x" * 10_001}), "10000 characters"),
    (lambda m: m.update(provenance={"a": "\ud800"}), "no Unicode"),
    (lambda m: m["spec"].update(cells=float("nan")), "cells is nan, expected"),
  ],
)  # fmt: skip
def test_values_that_cannot_be(pets, backbone, change, message):
  edit_task(pets, change)
  said, peak = peak_of(lambda: mv.load_task(pets, backbone), TaskError)
  assert message in said
  assert peak < SMALL


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[" * 100_000, "not readable as JSON"),
    ('{"a":' * 50 + "0" + "}" * 50, "more than 32 levels deep"),
    ('{"format_version": 4, "format_version": 4}', "has a key twice"),
    ("1" * 5000, "not readable as JSON"),
    ("[]", "has format_version None"),
    ('{"format_version": true}', "has format_version True"),
    (" " * (8 * 2**20 + 1), "has more than the 8,388,608 bytes"),
    ("\xff", "not readable as JSON"),
  ],
  ids=range(8),
)
def test_json_that_is_hard_to_read(pets, backbone, text, message):
  (pets / "task.json").write_text(text, encoding="latin-1")
  assert message in refusal(pets, backbone)


def test_what_does_not_belong_there(pets, backbone, tmp_path):
  def with_entry(name, make):
    path = pets / name
    make(path)
    said = refusal(pets, backbone)
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    mv.load_task(pets, backbone)  # nothing else was wrong
    return said

  for name in ("notes.txt", ".hidden", "arrays/x", "arrays/d/x"):
    said = with_entry(name, lambda path: path.write_bytes(b"x"))
    assert f"unknown files ['{name}']" in said
    said = with_entry(name, lambda path: path.mkdir())
    assert f"unknown files ['{name}']" in said
    said = with_entry(name, lambda path: path.symlink_to(tmp_path))
    assert f"{name} is a link" in said
    said = with_entry(name, lambda path: os.mkfifo(path))
    assert f"unknown files ['{name}']" in said


@pytest.mark.parametrize("name", ["task.json", "arrays", "arrays/_METADATA"])
def test_no_part_of_a_task_is_a_link(pets, backbone, tmp_path, name):
  (pets / name).rename(tmp_path / "elsewhere")
  (pets / name).symlink_to(tmp_path / "elsewhere")
  said = refusal(pets, backbone)
  assert "link" in said
  # As a whole it may be one: who gives the path decides.
  (pets / name).unlink()
  (tmp_path / "elsewhere").rename(pets / name)
  (tmp_path / "link").symlink_to(pets)
  assert mv.load_task(tmp_path / "link", backbone).spec.name == "pets"


def test_a_pipe_does_not_hang(pets, backbone):
  (pets / "task.json").unlink()
  os.mkfifo(pets / "task.json")
  assert "no regular file" in refusal(pets, backbone)


def test_a_set_of_tasks_stays_in_its_directory(pets, backbone, tmp_path):
  elsewhere = tmp_path / "elsewhere"
  pets.rename(elsewhere)
  pets.symlink_to(elsewhere)
  with pytest.raises(TaskError, match="pets is a link, which may lead"):
    compose.load_tasks(pets.parent, backbone)
  task = mv.load_task(elsewhere, backbone)
  with pytest.raises(TaskError, match="pets is a link, which may lead"):
    compose.save_tasks([task], pets.parent)
  # The directory itself may be one.
  pets.unlink()
  elsewhere.rename(pets)
  (tmp_path / "link").symlink_to(pets.parent)
  [found] = compose.load_tasks(tmp_path / "link", backbone)
  assert found.digest == task.digest


def test_other_backbones_with_fitting_digests(pets, backbone):
  """A task of one backbone that claims to be of another."""
  for other in (
    tiny_backbone(width=48, mlp_dim=48),
    tiny_backbone(depth=3),
    tiny_backbone(patch_size=4, seed=3),
  ):
    assert "belongs to another backbone" in refusal(pets, other)

  def claim(values):
    made = tiny_backbone(depth=3)
    values["spec"]["backbone"].update(
      fingerprint=made.fingerprint, variant=made.config.variant
    )

  edit_task(pets, claim)
  assert "does not fit: shape of memory: (2, 2, 32), expected (3" in refusal(
    pets, tiny_backbone(depth=3)
  )


def test_what_is_not_finite_is_neither_saved_nor_loaded(
  pets, backbone, tmp_path, monkeypatch
):
  task = mv.load_task(pets, backbone)
  broken = mv.Task(task.spec, {**task.params, "cls": task.params["cls"] / 0})
  with pytest.raises(TaskError, match=r"'pets' cannot be saved: \['cls'\]"):
    mv.save_task(broken, tmp_path / "broken")
  assert not (tmp_path / "broken").exists()
  with monkeypatch.context() as m:
    m.setattr(array_files, "require_finite", lambda *_: None)
    mv.save_task(broken, tmp_path / "broken")
  assert "['cls'] have values that are not finite" in refusal(
    tmp_path / "broken", backbone
  )


def test_what_could_not_be_loaded_is_not_saved(pets, backbone, tmp_path):
  task = mv.load_task(pets, backbone)
  for provenance in ({"a": "x" * 10_001}, {"a": "\ud800"}):
    odd = mv.Task(task.spec, task.params, provenance)
    with pytest.raises(TaskError, match=r"odd/task\.json has a text"):
      mv.save_task(odd, tmp_path / "odd")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["tasks"]


def in_database(path):
  """The values that orbax keeps in the files of a task, to be changed."""
  import tensorstore as ts

  base = f"file://{path}/arrays/"
  return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def packed(values: np.ndarray) -> bytes:
  """A chunk as zarr packs it."""
  import tensorstore as ts

  metadata = {
    "shape": values.shape, "chunks": values.shape, "dtype": "<f4",
    "compressor": {"id": "zstd", "level": 1},
  }  # fmt: skip
  spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
  array = ts.open(spec, create=True).result()
  array.write(values).result()
  return array.kvstore.read("0").result().value


def test_chunks_that_are_bombs(pets, backbone, capfd):
  """With digests that fit; 70 KB would be 256 MB."""
  bomb = packed(np.full(2**26, 2.0, np.float32))
  assert len(bomb) < 70_000
  database = in_database(pets)
  database.write("cls/0", bomb).result()
  resign(pets)
  before = peak_rss()
  assert "arrays cannot be read: " in refusal(pets, backbone)
  described = json.loads(database.read("cls/.zarray").result().value)
  described["chunks"] = [2**26]
  database.write("cls/.zarray", json.dumps(described).encode()).result()
  resign(pets)
  said = refusal(pets, backbone)
  assert "a chunk of cls is larger than the array" in said
  assert peak_rss() - before < 50 * 2**20
  assert capfd.readouterr() == ("", "")


def test_values_that_are_others(pets, backbone):
  """The digest of an array is the last one to notice."""
  database = in_database(pets)
  database.write("cls/0", packed(np.ones(32, np.float32))).result()
  resign(pets)
  assert "['cls'] are not what task.json says (SHA" in refusal(pets, backbone)
  database.delete_range(type(database).KeyRange("cls/0", "cls/1")).result()
  resign(pets)
  assert "['cls'] are not what task.json says" in refusal(pets, backbone)


def test_damaged_files_are_named_and_nothing_else_is_said(
  pets, backbone, capfd
):
  """Orbax would print the tracebacks of its threads."""
  whole, files = mv.load_task(pets, backbone), mutations.read_files(pets)
  for name in files:
    if not name.startswith("arrays/"):
      continue
    for content in (b"", files[name][:-1], files[name][:10] + b"x"):
      (pets / name).write_bytes(content)
      assert f"{name} is damaged" in refusal(pets, backbone)
      resign(pets)
      with contextlib.suppress(TaskError):  # some only orbax itself reads
        assert mv.load_task(pets, backbone).digest == whole.digest
      mutations.write_files(pets, files)
    (pets / name).unlink()
    assert f"missing files ['{name}']" in refusal(pets, backbone)
    mutations.write_files(pets, files)
  assert capfd.readouterr() == ("", "")


def test_the_files_say_nothing_of_where_they_were_made(saved):
  for name, content in mutations.read_files(saved).items():
    assert str(saved.parent).encode() not in content, name


# The model that the regime `full` exports.


def test_an_exported_model_is_itself_or_refused(backbone, tmp_path):
  task = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=0,
    regime="full",
  )  # fmt: skip
  results.save_model(task, backbone, tmp_path / "a.npz")
  content = (tmp_path / "a.npz").read_bytes()
  fingerprint = mv.load_backbone(tmp_path / "a.npz").fingerprint
  rng = np.random.default_rng(0)
  for _ in range(30):
    flipped = bytearray(content)
    flipped[rng.integers(len(content))] ^= 1 << rng.integers(8)
    (tmp_path / "a.npz").write_bytes(flipped)
    try:
      found = mv.load_backbone(tmp_path / "a.npz")
    except CheckpointError:
      continue
    assert found.fingerprint == fingerprint


# Pictures.


def peak_rss() -> int:
  """The most memory that this process had, in bytes, since the last call."""
  try:
    with open("/proc/self/status") as file:
      [line] = [x for x in file if x.startswith("VmHWM")]
    with open("/proc/self/clear_refs", "w") as file:
      file.write("5")
  except OSError:
    pytest.skip("this system does not forget its greatest memory")
  return 1024 * int(line.split()[1])


def bomb(side: int) -> bytes:
  """A whole PNG of one bit a pixel, which decodes to 3 bytes a pixel."""

  def chunk(kind, content):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check

  header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
  rows = zlib.compress(bytes(side * (1 + side // 8)), 9)
  chunks = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
  return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in chunks)


def read(path):
  evaluation = mv.EvalPreprocessing(image_size=8)
  [[picture]] = pictures.read_batches(
    [pictures.Entry(str(path))], evaluation, 1, memory_mib=2048
  )
  return picture


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_picture_that_is_a_bomb(tmp_path):
  (tmp_path / "good.png").write_bytes(bomb(64))
  assert read(tmp_path / "good.png").pixels is not None  # and all is loaded
  for side, reason in [
    (16_000, "more than 64 megapixels"),
    (9_000, "9000 x 9000 pixels, more than 64 megapixels"),
  ]:
    file = tmp_path / "bomb.png"
    file.write_bytes(bomb(side))
    assert file.stat().st_size < 40_000
    before, times = peak_rss(), []
    for _ in range(5):
      began = time.perf_counter()
      picture = read(file)
      times.append(time.perf_counter() - began)
    assert (picture.pixels, picture.entry.reason) == (None, reason)
    assert peak_rss() - before < 50 * 2**20
    assert min(times) < 0.05


def test_garbage_is_no_picture(tmp_path):
  rng = np.random.default_rng(0)
  whole = fake_data.encode(fake_data.noise(0, 40, 40), "PNG")
  for i, content in enumerate(
    [
      b"",
      b"\0",
      rng.bytes(1000),
      whole[:8],
      whole[:40],
      whole[: len(whole) // 2],
    ]
  ):
    file = tmp_path / f"{i}.png"
    file.write_bytes(content)
    picture = read(file)
    assert picture.pixels is None
    assert picture.entry.reason


# The commands.


def test_python_is_never_run(pets, backbone, tmp_path, capsys):
  """What the commands of a server take is JSON, arrays and pictures."""
  sentinel = tmp_path / "sentinel"
  evil = tmp_path / "evil.py"
  evil.write_text(f"open({str(sentinel)!r}, 'w')\n")
  (tmp_path / "task.json").write_text(evil.read_text())
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  vit, task = f"--backbone={tmp_path}/vit.npz", f"--task={pets}"
  for main in (evaluate.main, predict.main):
    last = ["--data=digits"] if main is evaluate.main else [str(evil)]
    for given in (
      [vit, f"--task={evil}"],
      [vit, f"--task={tmp_path}"],
      [f"--backbone={evil}", task],
    ):
      assert main([*given, *last]) == 2
      assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit, match="2"):
      main([vit, task, *last, f"--config={evil}"])
    assert "unrecognized arguments" in capsys.readouterr().err
  assert inspect.main([str(evil)]) == 2
  assert predict.main([vit, task, str(evil)]) == 1  # no picture
  assert not sentinel.exists()
  for module in (adapters, commands, evaluate, inspect, manifest, predict):
    assert not any("config_flags" in name for name in vars(module))
  exec(evil.read_text())
  assert sentinel.exists()  # it would have worked


def test_terminals_obey_no_class_name(capsys):
  commands.show("a\x1b[2Jb\rc\x9bd\te\nf", sys.stdout)
  assert capsys.readouterr().out == "a\\x1b[2Jb\\rc\\x9bd\\te\nf\n"
