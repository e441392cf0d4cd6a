"""Files and directories that are written whole or not at all."""

import os
import pathlib

import pytest

from memory_vit.runtime import checksums, files


@pytest.fixture
def done(monkeypatch):
  """Writes through to the disk and renamings, by name, in their order."""
  found = []
  fsync, rename = os.fsync, pathlib.Path.rename
  replace = pathlib.Path.replace

  def synced(descriptor):
    name = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
    found.append(("sync", name.removeprefix(".").split(".")[0]))
    fsync(descriptor)

  def renamed(real):
    def move(old, new):
      found.append(("name", new.name))
      return real(old, new)

    return move

  monkeypatch.setattr(os, "fsync", synced)
  monkeypatch.setattr(pathlib.Path, "rename", renamed(rename))
  monkeypatch.setattr(pathlib.Path, "replace", renamed(replace))
  return found


def names(directory):
  return sorted(path.name for path in directory.iterdir())


def test_a_file_has_its_name_once_it_is_on_the_disk(tmp_path, done):
  files.write_text(tmp_path / "a", "text")
  with files.replacing(tmp_path / "b") as part:
    part.write_bytes(b"bytes")
  assert done == [
    ("sync", "a"), ("name", "a"), ("sync", tmp_path.name),
    ("sync", "b"), ("name", "b"), ("sync", tmp_path.name),
  ]  # fmt: skip
  assert names(tmp_path) == ["a", "b"]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
  file = tmp_path / "a"
  file.write_text("old")

  def fail():
    with files.replacing(file) as part:
      part.write_text("ne")
      raise KeyError

  with pytest.raises(KeyError):
    fail()
  assert (names(tmp_path), file.read_text()) == (["a"], "old")


def test_a_directory_has_its_name_once_it_is_on_the_disk(tmp_path, done):
  path = tmp_path / "d"
  for text in ("old", "new"):
    done.clear()
    with files.replacing_directory(path) as new:
      (new / "in").mkdir(parents=True)
      (new / "in" / "file").write_text(text)
  at = done.index(("name", "d"))
  assert {("sync", "file"), ("sync", "in"), ("sync", "new")} <= {*done[:at]}
  assert done[at - 1] == ("name", "old")
  assert done[at + 1 :] == [("sync", tmp_path.name)]
  assert (names(tmp_path), names(path)) == (["d"], ["in"])
  assert (path / "in" / "file").read_text() == "new"


def test_a_directory_that_fails_leaves_the_old_one(tmp_path):
  (tmp_path / "d").mkdir()

  def fail():
    with files.replacing_directory(tmp_path / "d") as new:
      new.mkdir()
      (new / "file").write_text("")
      raise KeyError

  with pytest.raises(KeyError):
    fail()
  assert (names(tmp_path), names(tmp_path / "d")) == (["d"], [])


def test_the_digest_of_a_file(tmp_path):
  (tmp_path / "a").write_bytes(b"abc")
  assert checksums.file_digest(tmp_path / "a") == (
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
  )
