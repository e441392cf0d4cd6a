"""Files and directories that are written whole or not at all."""

import fcntl
import os
import pathlib

import pytest

from memory_vit.errors import TrainingError
from memory_vit.runtime import checksums, files


@pytest.fixture
def done(monkeypatch):
  """Syncs and renames by name, in their order."""
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


def test_file_gets_its_name_after_it_is_synced(tmp_path, done):
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


def test_directory_gets_its_name_after_it_is_synced(tmp_path, done):
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


def replaced(path, text="new", **options):
  with files.replacing_directory(path, **options) as new:
    new.mkdir()
    (new / text).write_text("")


def test_a_new_directory_has_the_permissions_of_the_old_one(tmp_path):
  path = tmp_path / "d"
  path.mkdir()
  for mode in (0o700, 0o2770, 0o755):
    path.chmod(mode)
    replaced(path)
    assert path.stat().st_mode & 0o7777 == mode


def test_new_directory_grants_no_other_group_access(tmp_path, monkeypatch):
  """Permissions of the group are lost if the new directory has another."""
  path, stat = tmp_path / "d", pathlib.Path.stat
  path.mkdir()
  path.chmod(0o2770)
  found = list(path.stat())
  found[5] += 1  # st_gid

  def stands_for(asked, **options):
    is_old = asked.name == "old"
    return os.stat_result(found) if is_old else stat(asked, **options)

  monkeypatch.setattr(pathlib.Path, "stat", stands_for)
  replaced(path)
  monkeypatch.undo()
  assert path.stat().st_mode & 0o7777 == 0o700


def test_a_file_system_without_permissions_loses_nothing(tmp_path, monkeypatch):
  def invalid(*arguments):
    raise OSError(22, "Invalid argument")

  (tmp_path / "d").mkdir()
  monkeypatch.setattr(pathlib.Path, "chmod", invalid)
  replaced(tmp_path / "d")
  assert names(tmp_path / "d") == ["new"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_failure_between_the_renames_loses_nothing(
  tmp_path, monkeypatch, error
):
  path, rename = tmp_path / "d", pathlib.Path.rename
  replaced(path, "old")

  def fails(source, target):
    if source.name == "new":
      raise error
    return rename(source, target)

  monkeypatch.setattr(pathlib.Path, "rename", fails)
  with pytest.raises(error):
    replaced(path)
  assert (names(tmp_path), names(path)) == (["d"], ["old"])


def test_directory_made_meanwhile_is_kept(tmp_path, monkeypatch):
  """Then neither the old directory nor the new one is removed."""
  path, rename = tmp_path / "d", pathlib.Path.rename
  replaced(path, "old")

  def taken(source, target):
    if source.name == "new":
      target.mkdir()
      (target / "mine").write_text("")
    return rename(source, target)

  monkeypatch.setattr(pathlib.Path, "rename", taken)
  with pytest.raises(OSError, match="not empty"):
    replaced(path)
  monkeypatch.undo()
  files.tidy(tmp_path)
  assert names(path) == ["mine"]
  (scratch,) = tmp_path.glob(".d-*")
  assert names(scratch / "old") == ["old"]
  assert names(scratch / "new") == ["new"]


@pytest.mark.fault("kill-during-write")
def test_next_replacement_tidies_after_a_killed_one(tmp_path):
  """Only for its own path, and only directories of `replacing_directory`."""
  for name in (".d-aaaaaaaa", ".other-aaaaaaaa"):
    (tmp_path / name / "new").mkdir(parents=True)
    (tmp_path / name / "lock").write_bytes(files.SCRATCH_MARK)
  (tmp_path / "elsewhere" / "new").mkdir(parents=True)
  (tmp_path / "elsewhere" / "lock").write_bytes(files.SCRATCH_MARK)
  (tmp_path / ".d-cccccccc").symlink_to(tmp_path / "elsewhere")
  # Names of theirs: hidden directories of a user.
  (tmp_path / ".d-previous" / "old").mkdir(parents=True)
  (tmp_path / ".d-archived" / "new").mkdir(parents=True)
  (tmp_path / ".d-archived" / "lock").write_text("")
  replaced(tmp_path / "d")
  assert names(tmp_path) == [
    ".d-archived", ".d-cccccccc", ".d-previous", ".other-aaaaaaaa", "d",
    "elsewhere",
  ]  # fmt: skip
  assert names(tmp_path / "elsewhere") == ["lock", "new"]


def test_busy_old_directory_is_removed_later(tmp_path, monkeypatch):
  """Such as a file that is open somewhere, on NFS."""
  path, unlink = tmp_path / "d", os.unlink
  replaced(path, "busy")

  def refused(name, *arguments, **options):
    if os.path.basename(name) == "busy":
      raise OSError(16, "Device or resource busy")
    return unlink(name, *arguments, **options)

  monkeypatch.setattr(os, "unlink", refused)
  replaced(path)
  monkeypatch.undo()
  assert names(path) == ["new"]
  assert len(names(tmp_path)) == 2
  files.tidy(tmp_path)
  assert names(tmp_path) == ["d"]


def test_scratch_directory_is_locked_on_nfs(tmp_path, monkeypatch):
  """NFS locks a file exclusively only if it is open for writing."""
  flock = fcntl.flock

  def of_nfs(file, operation):
    if not file.writable():
      raise OSError(9, "Bad file descriptor")
    flock(file, operation)

  monkeypatch.setattr(fcntl, "flock", of_nfs)
  scratch = tmp_path / ".d-aaaaaaaa"
  (scratch / "old").mkdir(parents=True)
  (scratch / "lock").write_bytes(files.SCRATCH_MARK)
  files.tidy(tmp_path)
  assert names(tmp_path) == ["d"]


def test_tidying_spares_directories_being_written(tmp_path):
  path = tmp_path / "d"
  with files.replacing_directory(path) as new:
    new.mkdir()
    (new / "file").write_text("")
    files.tidy(tmp_path)
    replaced(path, "other")
  assert (names(tmp_path), names(path)) == (["d"], ["file"])


def test_immovable_directory_and_the_new_one_both_stay(tmp_path, monkeypatch):
  """Such as a protected directory, or one mounted from the same disk."""
  path, rename = tmp_path / "d", pathlib.Path.rename
  replaced(path, "old")
  path.chmod(0o555)

  def refused(source, target):
    if source == path:
      raise PermissionError(13, "Permission denied", str(source))
    return rename(source, target)

  monkeypatch.setattr(pathlib.Path, "rename", refused)
  with pytest.raises(TrainingError) as error:
    replaced(path)
  kept, d = sorted(tmp_path.iterdir(), reverse=True)
  assert (names(kept), names(path), d) == (["new"], ["old"], path)
  assert "cannot be replaced (Permission denied)" in str(error.value)
  assert f"complete, in {kept}: " in str(error.value)


def test_unreadable_directory_is_not_replaced(tmp_path):
  path = tmp_path / "d"
  replaced(path, "old")

  def foreign_file(directory):
    raise PermissionError(13, "Permission denied", str(directory / "in"))

  with pytest.raises(TrainingError, match="cannot be read: Permission denied"):
    replaced(path, foreign_file=foreign_file)
  assert names(path) == ["old"]
  assert [names(kept) for kept in tmp_path.glob("d.new-*")] == [["new"]]


def test_foreign_files_and_the_new_directory_both_stay(tmp_path):
  path = tmp_path / "d"
  replaced(path, "old")
  asked = []

  def foreign_file(directory):
    asked.extend(names(directory))
    return "a\nb"

  with pytest.raises(TrainingError) as error:
    replaced(path, foreign_file=foreign_file)
  assert asked == names(path) == ["old"]
  kept, d = sorted(tmp_path.iterdir(), reverse=True)
  assert (names(kept), d) == (["new"], path)
  assert f"complete, in {kept}: " in str(error.value)
  assert "'a\\nb'" in str(error.value)


@pytest.mark.parametrize(
  ("error", "room"),
  [
    (OSError(28, "No space left on device"), True),
    (OSError(122, "Disk quota exceeded"), True),
    (ValueError("write failed: No space left on device [os]"), True),
    (OSError(16, "Device or resource busy"), False),
    (PermissionError(13, "Permission denied"), False),
  ],
)
def test_full_disk_error_asks_for_room(tmp_path, error, room):
  with (
    pytest.raises(TrainingError, match="give the same command") as raised,
    files.writing(tmp_path, ValueError),
  ):
    raise error
  assert ("Make room" in str(raised.value)) == room


def test_changed_file_of_equal_size_is_sent_again(tmp_path, monkeypatch):
  sent = []
  monkeypatch.setattr(files.bucket, "is_in", lambda path: True)
  monkeypatch.setattr(
    files.bucket, "upload", lambda file, to: sent.append(file.read_text())
  )
  outbox = files.Outbox(tmp_path)
  for time, text in enumerate(["one", "two"]):
    (outbox.local / "events").write_text(text)
    os.utime(outbox.local / "events", (time, time))
    outbox.send()
    outbox.send()
  outbox.close()
  assert sent == ["one", "two"]


def test_digest_of_a_file_is_its_sha256(tmp_path):
  (tmp_path / "a").write_bytes(b"abc")
  assert checksums.file_digest(tmp_path / "a") == (
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
  )
