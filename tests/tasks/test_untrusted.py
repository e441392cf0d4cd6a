"""Untrusted files: every trick is refused, and costs no memory."""

import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import struct
import sys
import time
import tracemalloc
import types
import zipfile
import zlib

import fake_data
import jax
import mutations
import numpy as np
import pytest
import safetensors.numpy
from conftest import edit_task, random_task, tiny_backbone
from memory import peak_rss, start_rss

import memory_vit as mv
from memory_vit.backbones import load, stored_arrays
from memory_vit.commands import check_data, console, evaluate, inspect, predict
from memory_vit.errors import BackboneError, TaskError
from memory_vit.evaluation import task_data
from memory_vit.images import image_files
from memory_vit.images.reader import ImageReader
from memory_vit.model import trees
from memory_vit.run_result import RunResult
from memory_vit.runtime import messages
from memory_vit.tasks import array_files, find, manifest, store
from memory_vit.train import results, summary

SMALL = 8 * 2**20  # bytes that a refusal may take


def peak_of(call, error) -> tuple[str, int]:
  """The message of a refused call, and the bytes that it allocated."""
  tracemalloc.start()
  try:
    with pytest.raises(error) as caught:
      call()
    return str(caught.value), tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


# .npz files.


def npy(shape, descr="<f4", values=b"", version=1) -> bytes:
  """An .npy file with any header."""
  out = io.BytesIO()
  header = {"descr": descr, "fortran_order": False, "shape": shape}
  if version == 1:
    np.lib.format.write_array_header_1_0(out, header)
  else:
    np.lib.format.write_array_header_2_0(out, header)
  return out.getvalue() + values


@pytest.fixture
def archive(tmp_path):
  """Write the file of a backbone, with entries replaced or added."""
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


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  ("entry", "message"),
  [
    (npy((10**12,)), r"\(1000000000000,\) of float32, which takes 4,000,000,0"),
    (npy((2**62, 4)), "header claims"),
    (npy((-1, -8), values=bytes(32)), "the shape .* has an axis"),
    (npy((1, 1, 31), values=bytes(128)), "124 bytes, but the entry has 128"),
    (npy((1, 1, 32), values=bytes(124)), "128 bytes, but the entry has 124"),
    (npy((32,), "|O", bytes(256)), "the dtype is object, expected a float"),
    (npy((32,), [("a", "|O")], bytes(256)), "expected a float"),
    (npy((16,), "<c8", bytes(128)), "the dtype is complex64, expected a float"),
    (npy((32,), "<i4", bytes(128)), "the dtype is int32, expected a float"),
    (npy((32,), "|V0"), "expected a float"),
    (b"\x93NUMPY\x03\x00" + npy((32,))[8:], r"format is \(3, 0\)"),
    (npy((32,)).replace(b"(32,)", b"(32L,"), "cannot be read"),
    (npy((32,)).replace(b"(32,)", b"open("), "cannot be read"),
    (b"", "cannot be read"),
    (npy((2,), values=b"\0\0\x80\x7f" * 2), "values that are not finite"),
    (npy((1,), values=b"\0\0\xc0\x7f"), "values that are not finite"),
  ],
)
def test_forged_entries_are_refused(archive, entry, message):
  file = archive(entries={"cls.npy": entry})
  said, peak = peak_of(lambda: mv.load_backbone(file), BackboneError)
  assert "vit.npz: entry 'cls'" in said
  assert re.search(message, said)
  assert peak < SMALL


@pytest.mark.fault("lying-npz")
def test_a_bomb_is_never_unpacked(archive, monkeypatch):
  """67 kB that would be 67 MB."""
  zeros = npy((2**24,), values=bytes(2**26))
  file = archive(entries={"more.npy": zeros})
  del zeros
  assert file.stat().st_size < 200_000
  began = time.process_time()  # not of whoever else uses the machine
  said, peak = peak_of(lambda: mv.load_backbone(file), BackboneError)
  assert "would be 67," in said
  assert "100 times as many" in said
  assert peak < SMALL
  assert time.process_time() - began < 5
  monkeypatch.setattr(stored_arrays, "MAX_RATIO", 10**6)
  monkeypatch.setattr(stored_arrays, "MAX_BYTES", 2**25)
  with pytest.raises(BackboneError, match="expected at most 33,554,432"):
    mv.load_backbone(file)


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  "name",
  ["../x.npy", "a/../../x.npy", "/etc/x.npy", "./x.npy", "a//x.npy", "a/.npy",
   "C:\\x.npy", "a\\x.npy", "c:x.npy", "a\nx.npy", "a\0x.npy", "x.txt", "x",
   ".npy", "..npy"],
)  # fmt: skip
def test_array_names_that_could_be_paths_are_refused(archive, name):
  if "\0" not in name:
    file = archive(entries={name: b""})
  else:  # zipfile would not write it
    file = archive(entries={"a_x.npy": b""})
    file.write_bytes(file.read_bytes().replace(b"a_x.npy", b"a\0x.npy"))
  with pytest.raises(BackboneError, match="no array|no name of an array"):
    mv.load_backbone(file)


@pytest.mark.parametrize(
  "name",
  ["a\u2028b", "a\u202eb", "日", "a\x85b", "x" * 201, "x" * 60_000, "a/" * 150],
  ids=range(7),
)
def test_unprintable_array_names_are_refused(archive, name):
  file = archive(entries={f"{name}.npy": npy((1,), values=bytes(4))})
  said, _ = peak_of(lambda: mv.load_backbone(file), BackboneError)
  assert "no name of an array" in said
  assert said.isprintable()
  assert len(said) < 1_000


@pytest.mark.fault("greedy-npz")
@pytest.mark.parametrize(
  "name", ["Transformer/encoderblock/x", "Transformer/encoderblock_0/x", "x"]
)
def test_arrays_without_values_are_refused(archive, name):
  """Two thousand million blocks without values take no bytes."""
  for shape in ((2 * 10**9, 0), (10**6, 0), (0,), (0, 10**18)):
    file = archive(entries={f"{name}.npy": npy(shape)})
    said, peak = peak_of(lambda f=file: mv.load_backbone(f), BackboneError)
    assert "has an axis shorter than 1" in said
    assert peak < SMALL


@pytest.mark.fault("greedy-npz")
def test_more_blocks_than_any_vit_are_refused(archive, monkeypatch):
  """Whatever number is in the name of a block."""
  monkeypatch.setattr(load, "_require_weights", pytest.fail)
  value, one = bytes(4), (1,)
  block = "Transformer/encoderblock"
  for entries in (
    {f"{block}_{i}/x.npy": npy(one, values=value) for i in range(2, 70)},
    {f"{block}_64/x.npy": npy(one, values=value)},
    {f"{block}_{'9' * 100}/x.npy": npy(one, values=value)},
    {f"{block}/x.npy": npy((65,), values=value * 65)},
    {f"{block}/x.npy": npy((2**18, 1), values=value * 2**18)},
  ):
    file = archive(zipfile.ZIP_STORED, entries=entries)
    said, peak = peak_of(lambda f=file: mv.load_backbone(f), BackboneError)
    assert "at most 64" in said
    assert len(said) < 1_000
    assert peak < SMALL


def test_invalid_block_names_are_refused(archive):
  """They name no block, and are too many arrays."""
  block, content = "Transformer/encoderblock", npy((1,), values=bytes(4))
  for name in (f"{block}_x/x", f"{block}_00/x", f"{block}_-1/x", f"{block}_/x"):
    file = archive(entries={f"{name}.npy": content})
    with pytest.raises(BackboneError, match=f"extra: {name}"):
      mv.load_backbone(file)


@pytest.mark.fault("greedy-npz")
@pytest.mark.parametrize("value", [1e300, -1e39])
def test_values_beyond_float32_are_refused(archive, value):
  wide = np.full((1, 1, 32), 0.5)
  file = archive(entries={"cls.npy": npy((1, 1, 32), "<f8", wide.tobytes())})
  assert mv.load_backbone(file).params["cls"][0, 0, 7] == 0.5
  wide[0, 0, 7] = value
  file = archive(entries={"cls.npy": npy((1, 1, 32), "<f8", wide.tobytes())})
  with pytest.raises(BackboneError, match="'cls' has values that are not fi"):
    mv.load_backbone(file)


def test_no_error_of_a_file_is_long(archive, tmp_path, capsys):
  """However many names are wrong."""
  deep = "/".join(["x" * 12] * 15)
  entries = {f"{deep}{i}.npy": npy((1,) * 30, values=bytes(4))
             for i in range(500)}  # fmt: skip
  assert inspect.main([str(archive(entries=entries))]) == 2
  said = capsys.readouterr().err
  assert "and 49" in said
  assert len(said) <= 2_001
  header = b"{'" + b"x" * 5_000 + b"': 1}"
  broken = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
  assert inspect.main([str(archive(entries={"cls.npy": broken}))]) == 2
  assert len(capsys.readouterr().err) < 500


def test_unknown_compression_and_many_entries_are_refused(archive, monkeypatch):
  for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
    with pytest.raises(BackboneError, match=f"by method {method}, expected"):
      mv.load_backbone(archive(method))
  monkeypatch.setattr(stored_arrays, "MAX_ENTRIES", 5)
  with pytest.raises(BackboneError, match="entries, expected at most 5"):
    mv.load_backbone(archive())


def test_encrypted_entry_is_refused(archive):
  file = archive()
  content = bytearray(file.read_bytes())
  content[content.index(b"PK\x01\x02") + 8] |= 1
  file.write_bytes(content)
  with pytest.raises(BackboneError, match="cannot be read: .*encrypted"):
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
  """A saved task, to be damaged."""
  return shutil.copytree(saved, tmp_path / "tasks" / "pets")


def refusal(path, backbone) -> str:
  with pytest.raises(TaskError) as caught:
    mv.load_task(path, backbone)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize(
  "change",
  [
    lambda spec: spec.update(name="cats"),
    lambda spec: spec.update(memory_norm=False),
    lambda spec: spec.update(class_names=["dog", "cat", "日"]),
    lambda spec: spec["preprocessing"].update(crop="central", resize=9),
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


@pytest.mark.fault("bad-task-name")
@pytest.mark.parametrize("name", NAMES)
def test_invalid_task_names_are_refused(pets, backbone, name):
  with pytest.raises(TaskError, match="task name"):
    random_task(backbone, name)
  edit_task(pets, lambda m: m["spec"].update(name=name))
  assert "task.json: spec: task name" in refusal(pets, backbone)


@pytest.mark.fault("bad-task-name")
@pytest.mark.parametrize("name", NAMES[:-1])
def test_invalid_parent_names_are_refused(pets, backbone, name):
  edit_task(pets, lambda m: m["spec"].update(attends_to=[name]))
  assert "which is not a valid task name" in refusal(pets, backbone)


def labels_kind(*thresholds):
  kind = dataclasses.asdict(mv.TaskKind(name="labels"))
  return kind | {"thresholds": [*thresholds]}


def values_kind(**changed):
  kind = dataclasses.asdict(mv.TaskKind(name="values"))
  return kind | {"mean": [0] * 3, "std": [1] * 3} | changed


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda m: m["spec"].update(num_classes=10**30, class_names=[]),
     "spec.num_classes is"),
    (lambda m: m["spec"].update(bottleneck=10**30, regime="adapter", cells=0),
     "spec.bottleneck is"),
    (lambda m: m["spec"]["preprocessing"].update(image_size=10**6)
     or m["spec"]["backbone"].update(image_size=10**6), "1 to 2048 pixels"),
    (lambda m: m["spec"]["preprocessing"].update(crop="central", resize=10**6),
     "to 4096 for 'central'"),
    (lambda m: m["spec"]["backbone"].update(fingerprint="x"), "of 64 digits"),
    (lambda m: m["spec"].update(attends_to=["a"], parent_digests=["x"]),
     "parent_digests[0] is 'x', expected a SHA-256"),
    (lambda m: m["spec"].update(regime="none"), "spec: regime is 'none'"),
    (lambda m: m["spec"]["kind"].update(name="none"),
     "spec.kind: the kind of a task is 'none'"),
    (lambda m: m["spec"]["kind"].update(units=["mm"]), "cannot have uni"),
    (lambda m: m["spec"].update(kind=labels_kind(0.5)),
     "thresholds has 1 entries, but"),
    (lambda m: m["spec"].update(kind=labels_kind(0.5, 0.5, 1.5)),
     "thresholds has 1.5, expected 0 to 1"),
    (lambda m: m["spec"].update(kind=labels_kind(0.5, 0.5, "1")),
     "kind.thresholds[2]"),
    (lambda m: m["spec"].update(kind=labels_kind(0.5, 0.5, float("inf"))),
     "must be finite, and std must"),
    (lambda m: m["spec"].update(kind=values_kind(mean=[0, 0, 1e31])),
     "mean has 1e+31, expected -1e+30 to 1e+30"),
    (lambda m: m["spec"].update(kind=values_kind(std=[1, 1, 1e-31])),
     "std has 1e-31, expected 1e-30 to 1e+30"),
    (lambda m: m["spec"].update(kind=values_kind(std=[1, 1, 0])), "above 0"),
    (lambda m: m["spec"]["kind"].update(temperature=1e9),
     "temperature has 1e+09, expected 0.0001 to 10000"),
    (lambda m: m["spec"]["kind"].update(temperature=0), "above 0"),
    (lambda m: m["spec"]["kind"].update(temperature="2"), "kind.temperature"),
    (lambda m: m["spec"]["kind"].update(unknown=1e31),
     "unknown has 1e+31, expected -1e+30 to 1e+30"),
    (lambda m: m["spec"]["kind"].update(unknown=True), "kind.unknown"),
    (lambda m: m["spec"].update(kind=values_kind(units=["m" * 41] * 3)),
     "more than 40 characters"),
    (lambda m: m["spec"]["preprocessing"].update(crop="none"),
     "spec.preprocessing: evaluation preprocessing: crop 'none'"),
    (lambda m: m["arrays"]["memory"].update(shape=[10**9, 10**9]),
     "the arrays would take 4000000000000"),
    (lambda m: m["arrays"]["memory"].update(shape=[10**30, 0, 32]),
     "the arrays would take"),
    (lambda m: m["arrays"]["memory"].update(shape=[1] * 9), "the shape of mem"),
    (lambda m: m["arrays"]["cls"].update(dtype="object"), "dtype of cls"),
    (lambda m: m["arrays"]["cls"].update(dtype="x" * 9000), "dtype of cls"),
    (lambda m: m["arrays"]["cls"].update(sha256="0"), "of 64 digits"),
    (lambda m: m["arrays"].update({"../x": m["arrays"]["cls"]}),
     "is not a valid name"),
    (lambda m: m["arrays"].update(
      {f"x{i}": m["arrays"]["cls"] for i in range(5000)}), "at most 4096"),
    (lambda m: m.update(provenance=[]), "provenance is"),
    (lambda m: m.update(provenance={"a": "x" * 10_001}), "10000 characters"),
    (lambda m: m.update(provenance={"a": "\ud800"}), "not Unicode"),
    (lambda m: m.update(provenance={"x" * 10_001: 1}), "10000 characters"),
    (lambda m: m.update(provenance={"\ud800": 1}), "not Unicode"),
    (lambda m: m["spec"].update(cells=float("nan")), "cells is nan, expected"),
    (lambda m: m["arrays"].update({"x" * 201: {}}), "at most 200 characters"),
    (lambda m: m["arrays"].update(
      {f"{'x' * 90}/{'x' * 90}{i}": m["arrays"]["cls"] for i in range(99)}),
     "and 94 more"),
  ],
)  # fmt: skip
def test_invalid_manifest_values_are_refused(pets, backbone, change, message):
  edit_task(pets, change)
  said, peak = peak_of(lambda: mv.load_task(pets, backbone), TaskError)
  assert message in said
  assert peak < SMALL


NUMBERS = [
  lambda m, n: m["arrays"]["memory"].update(shape=[n, n]),
  lambda m, n: m["arrays"]["cls"].update(dtype=n),
  lambda m, n: m["arrays"].update(cls=n),
  lambda m, n: m["spec"].update(num_classes=n),
  lambda m, n: m["spec"].update(cells=n),
  lambda m, n: m["spec"].update(name=[{"a": n}]),
  lambda m, n: m["spec"]["preprocessing"].update(image_size=n),
  lambda m, n: m["spec"]["preprocessing"].update(crop="central", resize=n),
  lambda m, n: m["spec"]["backbone"].update(image_size=n),
  lambda m, n: m.update(format_version=n),
  lambda m, n: m.update(provenance={"metrics": {"steps": n}}),
  lambda m, n: m.update(provenance={"config": {"data": {"cache_gib": n}}}),
]


@pytest.mark.fault("huge-numbers")
@pytest.mark.parametrize("change", NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_of_too_many_digits_are_refused(pets, backbone, change, capsys):
  """Python reads 4,300 digits, but cannot make floats of them."""
  for number in (10**4000, -(10**4000), 10**400, 10**100):
    edit_task(pets, lambda m, n=number: change(m, n))
    assert "a number of more than 100 digits" in refusal(pets, backbone)
    assert inspect.main([str(pets)]) == 2
    assert "more than 100 digits" in capsys.readouterr().err
  file = pets / "task.json"
  file.write_text(file.read_text().replace(str(10**100), "1" + "0" * 5000))
  assert "not readable as JSON" in refusal(pets, backbone)


def test_any_value_can_be_shown_briefly():
  nested = []
  for _ in range(100_000):
    nested = [nested]
  for value in (10**5000, [10**5000], nested, "x" * 10**7, bytes(10**7), {}):
    tracemalloc.start()
    said = messages.brief(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert said.isprintable()
    assert 0 < len(said) <= 200
    assert peak < SMALL


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[" * 100_000, "not readable as JSON"),
    ('{"a":' * 50 + "0" + "}" * 50, "more than 32 levels deep"),
    ('{"format_version": 1, "format_version": 1}', "has a duplicate key"),
    ("1" * 5000, "not readable as JSON"),
    ("[]", "has format_version None"),
    ('{"format_version": true}', "has format_version True"),
    (" " * (8 * 2**20 + 1), "8,388,609 bytes, expected at most 8,388,608"),
    ("\xff", "not readable as JSON"),
  ],
  ids=range(8),
)
def test_hostile_json_is_refused(pets, backbone, text, message):
  (pets / "task.json").write_text(text, encoding="latin-1")
  assert message in refusal(pets, backbone)


@pytest.mark.fault("damaged-task")
def test_foreign_files_beside_a_task_are_refused(pets, backbone, tmp_path):
  def with_entry(name, make):
    path = pets / name
    make(path)
    said = refusal(pets, backbone)
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    mv.load_task(pets, backbone)  # nothing else was wrong
    return said

  for name in ("notes.txt", ".hidden", "more.safetensors"):
    said = with_entry(name, lambda path: path.write_bytes(b"x"))
    assert f"unknown files ['{name}']" in said
    said = with_entry(name, lambda path: path.mkdir())
    assert f"unknown files ['{name}']" in said
    said = with_entry(name, lambda path: path.symlink_to(tmp_path))
    assert f"{name} is a link" in said
    said = with_entry(name, lambda path: os.mkfifo(path))
    assert f"unknown files ['{name}']" in said


@pytest.mark.fault("bad-task-name")
@pytest.mark.parametrize("name", ["task.json", "arrays.safetensors"])
def test_no_part_of_a_task_is_a_link(pets, backbone, tmp_path, name):
  (pets / name).rename(tmp_path / "elsewhere")
  (pets / name).symlink_to(tmp_path / "elsewhere")
  said = refusal(pets, backbone)
  assert "link" in said
  # The directory itself may be a link: the user named it.
  (pets / name).unlink()
  (tmp_path / "elsewhere").rename(pets / name)
  (tmp_path / "link").symlink_to(pets)
  assert mv.load_task(tmp_path / "link", backbone).spec.name == "pets"


def test_a_file_is_never_read_through_a_link(tmp_path):
  """Also if it became a link after the directory was listed."""
  (tmp_path / "secret").write_bytes(b"secret")
  (tmp_path / "link").symlink_to(tmp_path / "secret")
  with pytest.raises(OSError, match="[Ss]ymbolic links"):
    array_files.read_file(tmp_path / "link", 100)


@pytest.mark.fault("bad-task-name")
@pytest.mark.parametrize("name", ["task.json", "arrays.safetensors"])
def test_pipe_in_place_of_a_file_does_not_hang(pets, backbone, name):
  (pets / name).unlink()
  os.mkfifo(pets / name)
  assert "not a regular file" in refusal(pets, backbone)


@pytest.mark.fault("bad-task-name")
def test_a_set_of_tasks_stays_in_its_directory(pets, backbone, tmp_path):
  elsewhere = tmp_path / "elsewhere"
  pets.rename(elsewhere)
  pets.symlink_to(elsewhere)
  with pytest.raises(TaskError, match="pets is a link, which may lead"):
    store.load_tasks(pets.parent, backbone)
  task = mv.load_task(elsewhere, backbone)
  with pytest.raises(TaskError, match="pets is a link, which may lead"):
    store.save_tasks([task], pets.parent)
  # The directory itself may be a link.
  pets.unlink()
  elsewhere.rename(pets)
  (tmp_path / "link").symlink_to(pets.parent)
  [found] = store.load_tasks(tmp_path / "link", backbone)
  assert found.digest == task.digest


@pytest.mark.fault("foreign-task")
def test_forged_claims_of_another_backbone_are_refused(pets, backbone):
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
  assert (
    "does not fit the backbone: shape of memory: (2, 2, 32), expected (3"
    in refusal(pets, tiny_backbone(depth=3))
  )


def test_values_that_are_not_finite_are_neither_saved_nor_loaded(
  pets, backbone, tmp_path, monkeypatch
):
  task = mv.load_task(pets, backbone)
  broken = mv.Task(task.spec, {**task.params, "cls": task.params["cls"] / 0})
  with pytest.raises(TaskError, match=r"'pets' cannot be .* arrays \['cls'\]"):
    mv.save_task(broken, tmp_path / "broken")
  assert not (tmp_path / "broken").exists()
  with monkeypatch.context() as m:
    m.setattr(array_files, "require_finite", lambda *_: None)
    mv.save_task(broken, tmp_path / "broken")
  assert "['cls'] have values that are not finite" in refusal(
    tmp_path / "broken", backbone
  )


def test_task_that_could_not_be_loaded_is_not_saved(pets, backbone, tmp_path):
  task = mv.load_task(pets, backbone)
  for provenance in ({"a": "x" * 10_001}, {"a": "\ud800"}):
    odd = mv.Task(task.spec, task.params, provenance)
    with pytest.raises(TaskError, match=r"odd/task\.json has a text"):
      mv.save_task(odd, tmp_path / "odd")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["tasks"]


# Files of arrays.


def with_arrays(path, content) -> None:
  """Replace the arrays of a task."""
  (path / mutations.ARRAYS).write_bytes(content)


@pytest.mark.fault("damaged-task")
def test_changed_values_are_refused_by_their_digest(pets, backbone):
  """Only the digest of the array can tell."""
  whole = mutations.read_files(pets)[mutations.ARRAYS]
  arrays = safetensors.numpy.load(whole)
  for name, array in arrays.items():
    changed = {**arrays, name: array + 1}
    with_arrays(pets, safetensors.numpy.save(changed))
    assert f"['{name}'] do not match their SHA-256 in task" in refusal(
      pets, backbone
    )
  with_arrays(pets, whole)
  mv.load_task(pets, backbone)


@pytest.mark.fault("lying-metadata")
def test_arrays_other_than_declared_are_refused(pets, backbone):
  arrays = safetensors.numpy.load((pets / mutations.ARRAYS).read_bytes())
  for changed, message in [
    ({"more": arrays["cls"]}, "more is ('F32', [32])"),
    ({"cls": None}, "cls is missing"),
    ({"cls": arrays["cls"].astype(np.float64)}, "cls is ('F64', [32])"),
    ({"cls": arrays["cls"][None]}, "cls is ('F32', [1, 32])"),
  ]:
    found = {k: v for k, v in {**arrays, **changed}.items() if v is not None}
    with_arrays(pets, safetensors.numpy.save(found))
    assert message in refusal(pets, backbone)


HEADERS = {
  "deep": b"[" * 100_000,
  "deep and closed": b"[" * 100_000 + b"]" * 100_000,
  "deep metadata": b'{"__metadata__":' + b"[" * 100_000,
  "huge": json.dumps({"cls": {"dtype": "F32", "shape": [2**30],
                              "data_offsets": [0, 2**32]}}).encode(),
  "negative": json.dumps({"cls": {"dtype": "F32", "shape": [-1],
                                  "data_offsets": [0, -4]}}).encode(),
  "other type": json.dumps({"cls": {"dtype": "O", "shape": [32],
                                    "data_offsets": [0, 128]}}).encode(),
  "none": b"",
}  # fmt: skip


@pytest.mark.fault("lying-metadata")
@pytest.mark.parametrize("name", HEADERS)
def test_forged_headers_are_refused(pets, backbone, name, capfd):
  _, values = mutations.split((pets / mutations.ARRAYS).read_bytes())
  with_arrays(pets, mutations.joined(HEADERS[name], values))
  before = start_rss()
  said = refusal(pets, backbone)
  assert "cannot be read" in said or "arrays do not match" in said
  assert len(said) < 1_000
  assert peak_rss() - before < 50 * 2**20
  assert capfd.readouterr() == ("", "")


@pytest.mark.fault("greedy-task")
def test_a_file_of_arrays_is_no_larger_than_its_task(pets, backbone):
  """4 GiB of zeros, which would be read into memory."""
  with (pets / mutations.ARRAYS).open("r+b") as file:
    file.truncate(2**32)
  before = start_rss()
  assert "bytes, expected at most" in refusal(pets, backbone)
  assert peak_rss() - before < 50 * 2**20


@pytest.mark.fault("greedy-task")
def test_arrays_that_share_their_bytes_are_refused(pets, backbone):
  """300 arrays of 256 KiB, in a file of one."""
  files = mutations.read_files(pets)
  task = json.loads(files[mutations.TASK])
  header, values = mutations.split(files[mutations.ARRAYS])
  one = np.zeros(2**16, np.float32)
  task["spec"] |= {"regime": "full", "cells": 0}
  for name in ("memory", "cls"):
    del task["arrays"][name], header[name]
  begin = len(values)
  for i in range(300):
    task["arrays"][f"backbone/{i}"] = mutations.declared(one)
    header[f"backbone/{i}"] = {
      "dtype": "F32", "shape": [2**16],
      "data_offsets": [begin, begin + one.nbytes],
    }  # fmt: skip
  content = mutations.joined(mutations.to_json(header), values + one.tobytes())
  files = {**files, mutations.ARRAYS: content}
  files = mutations.signed(files, arrays=task["arrays"], spec=task["spec"])
  mutations.write_files(pets, files)
  before = start_rss()
  report = store.inspect_task(pets)
  assert "cannot be read" in report.damage
  assert peak_rss() - before < 50 * 2**20
  assert inspect.main([str(pets)]) == 2


@pytest.mark.fault("greedy-task")
def test_task_that_claims_gibibytes_takes_no_memory(pets):
  """4 GiB, from a few KB, with no backbone to compare with."""
  files = mutations.read_files(pets)
  task = json.loads(files[mutations.TASK])
  header, values = mutations.split(files[mutations.ARRAYS])
  task["spec"] |= {"regime": "full", "cells": 0}
  for name in ("memory", "cls"):
    del task["arrays"][name], header[name]
  shape, begin = [2**30], len(values)
  task["arrays"]["backbone/x"] = {
    "shape": shape, "dtype": "float32", "sha256": "0" * 64,
  }  # fmt: skip
  header["backbone/x"] = {
    "dtype": "F32", "shape": shape, "data_offsets": [begin, begin + 2**32],
  }  # fmt: skip
  content = mutations.joined(mutations.to_json(header), values + bytes(2**20))
  files = {**files, mutations.ARRAYS: content}
  files = mutations.signed(files, arrays=task["arrays"], spec=task["spec"])
  mutations.write_files(pets, files)
  before = start_rss()
  report = store.inspect_task(pets)
  assert "cannot be read" in report.damage
  assert peak_rss() - before < 50 * 2**20


@pytest.mark.fault("damaged-task")
def test_damaged_files_are_named_and_nothing_else_is_said(
  pets, backbone, capfd
):
  whole = (pets / mutations.ARRAYS).read_bytes()
  for content in (b"", whole[:-1], whole[:10], whole + b"x", whole[:-9]):
    with_arrays(pets, content)
    assert f"{mutations.ARRAYS} cannot be read" in refusal(pets, backbone)
  (pets / mutations.ARRAYS).unlink()
  assert f"missing files ['{mutations.ARRAYS}']" in refusal(pets, backbone)
  assert capfd.readouterr() == ("", "")


def test_the_files_say_nothing_of_where_they_were_made(saved):
  files = mutations.read_files(saved)
  assert files
  for name, content in files.items():
    assert str(saved.parent).encode() not in content, name


# The model that the regime `full` exports.


@pytest.mark.fault("damaged-export")
def test_an_exported_model_is_itself_or_refused(backbone, tmp_path):
  task = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=0,
    regime="full",
  )  # fmt: skip
  results.save_model(task, backbone, tmp_path / "a.npz")
  content = (tmp_path / "a.npz").read_bytes()
  fingerprint = mv.load_backbone(tmp_path / "a.npz").fingerprint
  rng, refused = np.random.default_rng(0), 0
  # The date of the first entry does not matter.
  for place in (10, *rng.integers(len(content), size=30)):
    flipped = bytearray(content)
    flipped[place] ^= 1 << rng.integers(8)
    (tmp_path / "a.npz").write_bytes(flipped)
    try:
      found = mv.load_backbone(tmp_path / "a.npz")
    except BackboneError:
      refused += 1
      continue
    assert found.fingerprint == fingerprint
  assert 0 < refused < 31


# Images.


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
  preprocessing = mv.EvalPreprocessing(image_size=8)
  entries = [image_files.ImageFile(str(path))]
  [[picture]] = ImageReader(2048, 1, 8).read_files(entries, preprocessing)
  return picture


@pytest.mark.fault("image-bomb")
@pytest.mark.filterwarnings("ignore:Image size")
def test_image_bomb_is_refused(tmp_path):
  (tmp_path / "good.png").write_bytes(bomb(64))
  assert read(tmp_path / "good.png").pixels is not None  # and all is loaded
  for side, reason in [
    (16_000, "more than 64 megapixels"),
    (9_000, "the image has 9000 x 9000 pixels, more than 64 megapixels, "
            "the limit"),
  ]:  # fmt: skip
    file = tmp_path / "bomb.png"
    file.write_bytes(bomb(side))
    assert file.stat().st_size < 40_000
    before, times = start_rss(), []
    for _ in range(5):
      began = time.process_time()
      picture = read(file)
      times.append(time.process_time() - began)
    assert (picture.pixels, picture.entry.reason) == (None, reason)
    assert peak_rss() - before < 50 * 2**20
    assert min(times) < 0.05


@pytest.mark.fault("image-bomb")
def test_garbage_images_are_refused(tmp_path):
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


def test_task_files_never_run_python(pets, backbone, tmp_path, capsys):
  """The server takes JSON, arrays and images alone."""
  sentinel = tmp_path / "sentinel"
  evil = tmp_path / "evil.py"
  evil.write_text(f"open({str(sentinel)!r}, 'w').close()\n")
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
    assert main([vit, task, *last, f"--config={evil}"]) == 2
    assert "unrecognized arguments" in capsys.readouterr().err
  assert inspect.main([str(evil)]) == 2
  assert predict.main([vit, task, str(evil)]) == 1  # no picture
  assert not sentinel.exists()
  for module in (store, console, evaluate, inspect, manifest, predict):
    assert not any("config_flags" in name for name in vars(module))
  exec(evil.read_text())
  assert sentinel.exists()  # it would have worked


ODD = "ok.png\n  cat  99.0 %\r\x85\u2028\u2029\u202e\u2066\u200f\x1b[2J\udcff"
SHOWN = (
  "ok.png\\n  cat  99.0 %\\r\\x85\\u2028\\u2029\\u202e\\u2066\\u200f\\x1b[2J"
  "\\xff"
)
READABLE = ["日本語　猫", "हिन्दी", "می‌خواهم", "עברית", "👩‍🔬", "Ñandú", "a b"]


def test_task_names_stay_in_their_line():
  assert messages.escaped(ODD) == SHOWN
  assert [messages.escaped(name) for name in READABLE] == READABLE


@pytest.mark.fault("control-characters")
def test_no_class_name_forges_a_line(backbone, tmp_path, capsys):
  odd = ODD.removesuffix("\udcff")  # that is no JSON
  shown = SHOWN.removesuffix("\\xff")
  names = (odd, *READABLE)
  task = random_task(backbone, "pets", classes=8, class_names=names)
  made = {"metrics": {odd: 1, "x": odd, "y": float("nan")},
          "config": {"data": {"name": odd, "dir": "x" * 9_000}}}  # fmt: skip
  mv.save_task(mv.Task(task.spec, task.params, made), tmp_path / "pets")
  assert inspect.main([str(tmp_path / "pets"), "--labels"]) == 0
  out = capsys.readouterr().out
  assert out.count(shown) >= 5
  for name in READABLE:
    assert name in out
  assert "\n  cat" not in out
  assert all(len(line) < 1_000 for line in out.splitlines())
  assert all(messages.escaped(line) == line for line in out.split("\n"))
  assert inspect.main([str(tmp_path / "pets"), "--json"]) == 0
  found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
  assert found["provenance"]["metrics"] == {odd: 1, "x": odd, "y": None}
  assert found["spec"]["class_names"] == list(names)

  source = types.SimpleNamespace(
    class_names=(odd,), num_classes=1, full_name="digits", kind="classes"
  )
  with pytest.raises(TaskError) as caught:
    task_data.require_classes(task, source)
  assert str(caught.value).count(shown) == 2
  assert "\n" not in str(caught.value)


def test_no_prediction_forges_a_line(backbone, tmp_path, capsys, monkeypatch):
  odd = ODD.removesuffix("\udcff")  # that is no JSON
  names = (odd, *READABLE)
  task = random_task(backbone, "pets", classes=8, class_names=names)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_task(task, tmp_path / "pets")
  picture = tmp_path / ODD
  picture.write_bytes(fake_data.encode(fake_data.noise(0, 8, 8), "PNG"))
  entries = [
    image_files.ImageFile(str(picture)), image_files.ImageFile(ODD, f"of {ODD}")
  ]  # fmt: skip
  monkeypatch.setattr(image_files, "find_images", lambda _: entries)
  given = [f"--backbone={tmp_path / 'vit.npz'}", f"--task={tmp_path / 'pets'}"]
  assert predict.main([*given, "--top=8", "-"]) == 1
  out, err = capsys.readouterr()
  path, *guesses = out.splitlines()
  assert path == f"{tmp_path / SHOWN}"
  shown = SHOWN.removesuffix("\\xff")
  found = [re.sub(r" +[\d.]+ %$", "", line) for line in guesses]
  assert guesses[0].startswith("  pets  ")
  assert sorted(line[8:] for line in found) == sorted([shown, *READABLE])
  assert err.splitlines() == [
    f"skipped {SHOWN}: of {SHOWN}", "1 of 2 images could not be read"
  ]  # fmt: skip


@pytest.mark.fault("control-characters")
def test_no_file_name_forges_a_line(pets, backbone, tmp_path, capsys):
  for name in (ODD.encode("utf-8", "surrogateescape"), b"x" * 250):
    path = os.path.join(os.fsencode(pets), name)
    os.mkdir(path)
    said = refusal(pets, backbone)
    assert said.isprintable()
    assert len(said) < 1_000
    os.rmdir(path)
    os.symlink(tmp_path, path)
    assert " is a link" in refusal(pets, backbone)
    assert refusal(pets, backbone).isprintable()
    os.unlink(path)
  pets.rename(pets.parent / ODD)
  with pytest.raises(TaskError, match="is not UTF-8: rename it") as caught:
    find.task_paths(pets.parent)
  assert SHOWN in str(caught.value)
  assert inspect.main([str(pets.parent)]) == 2
  assert capsys.readouterr().err.count("\n") == 1


def test_names_of_left_out_examples_stay_in_their_line():
  result = RunResult(left_out=(ODD,), wall_seconds=1.0)
  said = summary.summary(result, pathlib.Path("runs"))
  assert f"\n  {SHOWN}\n" in said
  problem = {"kind": "cannot be read", "where": ODD, "detail": ODD}
  split = {"role": "train", "data": "folder", "split": "train"}
  report = {
    "splits": [{**split, "problems": [problem]}],
    "duplicates": [{"splits": "ab", "count": 1, "pairs": [(ODD, ODD)]}],
    "clean": False,
  }
  said = check_data.text(report)
  assert f"\n  {SHOWN}: {SHOWN}\n" in said
  assert f"\n  {SHOWN} = {SHOWN}\n" in said


def test_no_error_is_longer_than_a_screen(capsys):
  def fail():
    raise TaskError("x" * 10**6)

  assert console.run_command(fail) == 2
  assert len(capsys.readouterr().err) == 2_001


def test_terminals_obey_no_class_name(capsys):
  console.show("a\x1b[2Jb\rc\x9bd\te\nf", sys.stdout)
  assert capsys.readouterr().out == "a\\x1b[2Jb\\rc\\x9bd\\te\nf\n"
